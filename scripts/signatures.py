"""Signatures as Python sees them, for the page "Python API"; mkdocstrings calls it (mkdocs.yml).

Options behind `**options` are listed, and a default is its value, not the name of a constant.
"""

import inspect
import pydoc
import re
from typing import Any

import griffe

MODULES = re.compile(r"(\w+\.)+")


class RealSignatures(griffe.Extension):
    """Completes the parameters of functions that list options (`lists_options`)."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for each function that was read from source."""
        if not any("Unpack" in str(each.annotation) for each in func.parameters):
            return
        found: Any = pydoc.locate(func.path)
        real = inspect.signature(found).parameters
        for name, each in real.items():
            default = None if each.default is each.empty else repr(each.default)
            if name in func.parameters:
                func.parameters[name].default = default
            else:
                annotation = MODULES.sub("", inspect.formatannotation(each.annotation))
                kind = griffe.ParameterKind.keyword_only
                listed = griffe.Parameter(name, annotation=annotation, kind=kind, default=default)
                func.parameters.add(listed)
        for each in [each for each in func.parameters if each.name not in real]:
            del func.parameters[each.name]
