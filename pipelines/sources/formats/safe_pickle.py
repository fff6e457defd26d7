"""Reads a pickle of plain values and a NumPy array as data: nothing that it names is imported or called.

`opcodes` checks what the pickle would build before anything is built. The few names that it needs become inert records
of this module; the array is made from them after its shape, type and size have been checked.
"""

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.sources.formats import opcodes
from shardset.errors import SourceError

_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What the standard unpickler raises for bytes that are not a whole pickle."""


def loads(data: bytes, where: str) -> Any:
    """The value of a pickle: dicts, lists, bytes, text, small numbers, None and one array of unsigned bytes.

    Strings that Python 2 wrote come as bytes. Raises SourceError if the pickle names or does anything else, holds more
    than a batch could (`opcodes`), or is damaged.
    """
    try:
        opcodes.check(data, _NAMES)
        return _plain(_DataUnpickler(data, where).load(), where)
    except opcodes.Refused as error:
        raise _refused(where, str(error)) from error
    except _BROKEN as error:
        raise SourceError(
            f"{where}: not a whole pickle ({type(error).__name__}: {error!s:.200}); the file is damaged, download it "
            "again"
        ) from error


def _refused(where: str, what: str) -> SourceError:
    return SourceError(
        f"{where}: the pickle holds {what}, expected only numbers, strings, lists, dicts and a byte array; "
        "nothing of it was run, do not trust this file"
    )


class _DataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise _refused(self._where, f"the name {module}.{name}")
        return _STAND_INS[module, name]


class _Named:
    """A callable in place of a global, without attributes that a pickle could change."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} of a name can't be set")

    def __call__(self, *arguments: object) -> Any:
        return self._call(*arguments)


class _Array:
    """The state of an array in a pickle, set by its BUILD instruction."""

    __slots__ = ("state",)

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(slots=True)
class _DType:
    """The element type of an array in a pickle."""

    code: object

    def __setstate__(self, state: object) -> None:
        """Ignores byte order and alignment: they have no meaning for single bytes."""


def _dtype(code: object, *_: object) -> _DType:
    return _DType(code)


def _encode(text: object, encoding: object) -> bytes:
    """How Python 3 writes bytes in a pickle that Python 2 can read."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError("bytes in another encoding than latin1")
    return text.encode("latin1")


def _refuse_call(*_: object) -> None:
    raise ValueError("numpy.ndarray is called, expected as an argument only")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Named(_Array),
    ("numpy._core.multiarray", "_reconstruct"): _Named(_Array),
    ("numpy", "ndarray"): _Named(_refuse_call),
    ("numpy", "dtype"): _Named(_dtype),
    ("_codecs", "encode"): _Named(_encode),
}

_NAMES = frozenset(f"{module} {name}" for module, name in _STAND_INS)


def _plain(value: Any, where: str) -> Any:
    """The value with its array made, which is the value itself or a value of a dict at the top."""
    if isinstance(value, dict):
        return {key: _plain_array(item, where) for key, item in value.items()}
    return _plain_array(value, where)


def _plain_array(value: Any, where: str) -> Any:
    return _make_array(value.state, where) if isinstance(value, _Array) else value


def _make_array(state: object, where: str) -> np.ndarray:
    if not isinstance(state, tuple) or len(state) != 5:
        raise SourceError(f"{where}: an array without its content; the file is damaged, download it again")
    _, shape, dtype, is_fortran, content = state
    if not isinstance(dtype, _DType) or dtype.code not in ("u1", b"u1") or not isinstance(content, bytes):
        raise SourceError(f"{where}: an array of another type than unsigned bytes (u1); download the file again")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise SourceError(f"{where}: an array whose shape is not whole numbers; download the file again")
    if len(content) != math.prod(shape):
        raise SourceError(f"{where}: {len(content)} bytes for an array of shape {shape}; download the file again")
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")
