"""Reads the pickle of a CIFAR batch as data: nothing that it names is imported or called.

The standard library's unpickler, with only the instructions that a batch needs. The names in a
batch become inert objects; the array is made from them after its shape and type have been checked.
Python 3 has to write bytes by protocol 3 or a later one.
"""

import io
import pickle
import pickletools
import struct
from typing import Any, ClassVar

import numpy as np

from shardset.errors import SourceError

MAX_BYTES = 512 << 20
"""The training images of CIFAR-100 take 148 MiB."""

_MAX_TEXT = 1024

_NUMPY = (
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.dtype",
)
_INSTRUCTIONS = """
    PROTO FRAME MARK STOP NONE NEWTRUE NEWFALSE
    BININT BININT1 BININT2 BINSTRING SHORT_BINSTRING
    BINBYTES SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_LIST APPEND APPENDS SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE BUILD
    BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET
"""
_BROKEN = (
    *(pickle.UnpicklingError, struct.error, EOFError),
    *(AttributeError, LookupError, TypeError, ValueError),
)
"""The errors of the unpickler for bytes that are not a complete pickle."""


def loads(data: bytes, where: str) -> dict[str, Any]:
    """The dict in a pickle: its values are numbers, texts, lists of these, or arrays of bytes.

    A text is str or bytes. Raises SourceError if the pickle names or holds anything else, or is
    damaged.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes, at most {MAX_BYTES}")
        value = _Unpickler(io.BytesIO(data), fix_imports=False, encoding="bytes").load()
        if not isinstance(value, _Fields):
            raise TypeError(f"a pickled {type(value).__name__}, expected a dict")
        return {text_of(key): _checked(item) for key, item in value.items()}
    except _BROKEN as error:
        raise SourceError(
            f"{where}: not a whole pickle of numbers, short texts, lists, dicts and an array of"
            f" bytes ({type(error).__name__}: {error!s:.200}); nothing of it was run; download the"
            " published file again"
        ) from error


def text_of(text: str | bytes) -> str:
    """A text in a pickle, whichever Python wrote it."""
    return text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")


class _Made:
    """Stands for what a call of numpy returns."""

    state: object = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Fields(dict[Any, Any]):
    """A dict whose keys are texts: to hash nested tuples could end the process."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if not _is_text(key):
            raise TypeError(f"a key of type {type(key).__name__}, expected a short text")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NUMPY:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _Made

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("an instruction that no batch needs")

    def _make_fields(self) -> None:
        self.stack.append(_Fields())

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **{
            ord(opcode.code): pickle._Unpickler.dispatch[ord(opcode.code)]
            for opcode in pickletools.opcodes
            if opcode.name in _INSTRUCTIONS.split()
        },
        ord(pickle.EMPTY_DICT): _make_fields,
    }


def _checked(value: object) -> Any:
    if isinstance(value, _Made):
        return _array(value.state)
    for item in value if isinstance(value, list) else [value]:
        if type(item) is not int and not _is_text(item):
            raise TypeError(f"a value of type {type(item).__name__}, or a long text")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes) and len(value) <= _MAX_TEXT


def _array(state: object) -> np.ndarray:
    match state:
        case _, (int(), int()) as shape, _Made() as dtype, is_fortran, bytes(content):
            if dtype.arguments[:1] in (("u1",), (b"u1",)):
                array = np.frombuffer(content, np.uint8)
                return array.reshape(shape, order="F" if is_fortran else "C")
    raise TypeError("an array that is not [rows, values] of unsigned bytes (u1) with its content")
