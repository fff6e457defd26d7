"""What docs/dev/architecture.md names is there: each path, and each `file:function`."""

import ast
import re

from tests.makers.documented import REPOSITORY

NAMED = re.findall(
    r"`((?:shardset|pipelines|trainer|tests)/[\w/.]*)(?::([\w.]+))?`",
    (REPOSITORY / "docs/dev/architecture.md").read_text(),
)


def names_in(file: str) -> set[str]:
    """The functions and classes of a module, and their methods as `Class.method`."""
    names = set()
    for node in ast.parse((REPOSITORY / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            inner = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
            names |= {f"{node.name}.{each.name}" for each in inner}
    return names


def test_every_path_and_function_that_the_page_names_is_there():
    assert len([function for _, function in NAMED if function]) > 20
    missing = [path for path, _ in NAMED if not (REPOSITORY / path).exists()]
    missing += [
        f"{file}:{function}"
        for file, function in NAMED
        if function and file not in missing and function not in names_in(file)
    ]
    assert not missing
