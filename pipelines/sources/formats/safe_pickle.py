"""Reads the pickle of a CIFAR batch as data: nothing that it names is imported or called.

The four names in a batch become inert objects; the array is made from them after its shape and type
have been checked. Before the standard library's unpickler runs, all instructions are compared with
those that a batch needs: deeply nested tuples could end the process when they are hashed, and a
large memo number would take memory.
"""

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from shardset.errors import SourceError

MAX_BYTES = 512 << 20
"""The training images of CIFAR-100 take 148 MiB."""

_MAX_TEXT = 1024
_MAX_TUPLES = 20
"""An array takes six."""

_NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)
_NEEDED = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT EMPTY_LIST APPEND APPENDS SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
"""
_INSTRUCTIONS = frozenset(_NEEDED.split())
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError)
"""The errors of the unpickler for bytes that are not a complete pickle."""


def loads(data: bytes, where: str) -> dict[str, Any]:
    """The dict in a pickle: its values are numbers, texts, lists of these, or arrays of bytes.

    A text is str or bytes. Raises SourceError if the pickle names or holds anything else, or is
    damaged.
    """
    if len(data) > MAX_BYTES:
        raise _refused(where, f"{len(data)} bytes, at most {MAX_BYTES}")
    try:
        _check_instructions(data, where)
        value = _Unpickler(data, where).load()
        if isinstance(value, dict):
            return {text_of(key): _checked(item, where) for key, item in value.items()}
    except _BROKEN as error:
        raise SourceError(
            f"{where}: not a whole pickle ({type(error).__name__}: {error!s:.200}); the file is"
            " damaged, download it again"
        ) from error
    raise SourceError(
        f"{where}: a pickled {type(value).__name__}, expected a dict; download it again"
    )


def text_of(text: str | bytes) -> str:
    """A text in a pickle, whichever Python wrote it."""
    return text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")


def _refused(where: str, what: str) -> SourceError:
    return SourceError(
        f"{where}: the pickle holds {what}, expected only numbers, strings, lists, dicts and a byte"
        " array; nothing of it was run, do not trust this file"
    )


def _check_instructions(data: bytes, where: str) -> None:
    num_tuples = 0
    for opcode, argument, position in pickletools.genops(data):
        num_tuples += opcode.name.startswith("TUPLE")
        is_large = opcode.name == "LONG_BINPUT" and (argument or 0) > (position or 0)
        if is_large or num_tuples > _MAX_TUPLES or opcode.name not in _INSTRUCTIONS:
            raise _refused(where, "an instruction that no batch needs")


class _Made:
    """Stands for what a call of numpy returns."""

    def __init__(self, *arguments: object) -> None:
        self.arguments, self.state = arguments, object()

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NUMPY:
            raise _refused(self._where, f"the name {module}.{name}")
        return _Made


def _checked(value: object, where: str) -> Any:
    if isinstance(value, _Made):
        return _array(value.state, where)
    for item in value if isinstance(value, list) else [value]:
        if type(item) is not int and not (isinstance(item, str | bytes) and len(item) <= _MAX_TEXT):
            raise _refused(where, f"a value of type {type(item).__name__}, or a long text")
    return value


def _array(state: object, where: str) -> np.ndarray:
    match state:
        case _, (int(), int()) as shape, _Made() as dtype, is_fortran, bytes(content):
            if dtype.arguments[:1] in (("u1",), (b"u1",)):
                array = np.frombuffer(content, np.uint8)
                return array.reshape(shape, order="F" if is_fortran else "C")
    raise SourceError(
        f"{where}: an array that is not [rows, values] of unsigned bytes (u1) with its content;"
        " download the file again"
    )
