"""Reads the pickle of a CIFAR batch as data: nothing that it names is imported or called.

The standard library's unpickler, with only the instructions that a batch needs. The five names in a
batch become inert objects; the array is made from them after its shape and type have been checked.

It is `pickle._Unpickler`, the one in Python: the compiled one can't be forbidden to hash keys of
nested tuples, which can end the process, or to take memory for the largest memo number.
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
    GLOBAL STACK_GLOBAL REDUCE
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
    if len(data) > MAX_BYTES:
        raise _refused(where, f"{len(data)} bytes, at most {MAX_BYTES}")
    try:
        value = _Unpickler(data, where).load()
        if isinstance(value, _Fields):
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


class _Made:
    """Stands for what a call of numpy returns."""

    def __init__(self, *arguments: object) -> None:
        self.arguments, self.state = arguments, object()


class _Fields(dict[Any, Any]):
    """A dict whose keys are texts: to hash nested tuples could end the process."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if not _is_text(key):
            raise TypeError(f"a key of type {type(key).__name__}, expected a short text")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    stack: list[Any]

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._where, self._bytes_to_make = where, len(data)

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        if whole in _NUMPY:
            return _Made
        if whole == "_codecs.encode":
            return self._encode
        raise _refused(self._where, f"the name {whole}")

    def _encode(self, text: str, encoding: str) -> bytes:
        """How Python 3 writes bytes for Python 2: each from a separate text in the file."""
        self._bytes_to_make -= len(text)
        if self._bytes_to_make < 0 or encoding not in ("latin1", b"latin1"):
            raise ValueError("bytes in another encoding than latin1, or more than the file has")
        return text.encode("latin1")

    def _refuse(self) -> None:
        raise _refused(self._where, "an instruction that no batch needs")

    def _make_fields(self) -> None:
        self.stack.append(_Fields())

    def _set_state(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, _Made):
            raise TypeError(f"a state for a {type(made).__name__}")
        made.state = state

    dispatch: ClassVar[dict[int, Any]] = {
        **dict.fromkeys(range(256), _refuse),
        **{
            ord(opcode.code): pickle._Unpickler.dispatch[ord(opcode.code)]
            for opcode in pickletools.opcodes
            if opcode.name in _INSTRUCTIONS.split()
        },
        ord(pickle.EMPTY_DICT): _make_fields,
        ord(pickle.BUILD): _set_state,
    }


def _checked(value: object, where: str) -> Any:
    if isinstance(value, _Made):
        return _array(value.state, where)
    for item in value if isinstance(value, list) else [value]:
        if type(item) is not int and not _is_text(item):
            raise _refused(where, f"a value of type {type(item).__name__}, or a long text")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes) and len(value) <= _MAX_TEXT


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
