"""Reads the pickle of a CIFAR batch as data: nothing that it names is imported or called.

Before the standard unpickler runs, one pass over the instructions refuses those that would make
values deep, huge or shared. The five names that a batch needs become inert objects; the array is
made from them after its shape, type and size have been checked.
"""

import io
import math
import pickle
import pickletools
from typing import Any, cast

import numpy as np

from shardset.errors import SourceError

MAX_INSTRUCTIONS = 2_000_000
"""The 50,000 rows of CIFAR-100 take 200,000 as published."""

MAX_CONTAINERS = 100
"""Of instructions that make a container, name or call something.

A batch takes 20, so no value is deep.
"""

MAX_MEMO = 1_000_000
"""The unpickler's memo is an array as long as the largest number in it, so that number has a limit.
"""

MAX_TEXT = 1024
_MAX_DIMENSIONS = 4

_NAMES = (
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
)
_TEXTS = {
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINUNICODE",
    "SHORT_BINUNICODE",
}
_GLOBALS = {"GLOBAL", "STACK_GLOBAL"}
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_CONTAINERS = {"EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "REDUCE", "BUILD", *_TUPLES, *_GLOBALS}
_NUMBERS = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"}
_OTHERS = {"PROTO", "FRAME", "MARK", "STOP", "APPEND", "APPENDS", "SETITEM", "SETITEMS"}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
_ALLOWED = _TEXTS | _CONTAINERS | _NUMBERS | _OTHERS | _PUTS | _GETS
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError)
"""What `pickletools` and the unpickler raise for bytes that are not a whole pickle."""


def loads(data: bytes, where: str) -> dict[Any, Any]:
    """The dict in a pickle: its keys are texts, its values None, 32-bit numbers, short texts, lists
    of them or arrays.

    Strings that Python 2 wrote come as bytes, arrays as uint8. Raises SourceError if the pickle
    names or holds anything else or more than a batch could, or is damaged.
    """
    try:
        value = _Unpickler(_checked(data, where), where).load()
    except _BROKEN as error:
        raise SourceError(
            f"{where}: not a whole pickle ({type(error).__name__}: {error!s:.200}); the file is"
            " damaged, download it again"
        ) from error
    if not isinstance(value, dict):
        raise SourceError(
            f"{where}: a pickled {type(value).__name__}, expected a dict; download it again"
        )
    if odd := [type(key).__name__ for key in value if not isinstance(key, str | bytes)]:
        raise _refused(where, f"a key of type {odd[0]}")
    return {_plain(key, where): _plain(item, where) for key, item in value.items()}


def _checked(data: bytes, where: str) -> bytes:
    """The pickle, if it may be run."""
    num_containers, is_shareable, has_frames = 0, False, False
    # whether its value may be used again: only names and short texts, so no value is shared
    memo: dict[int, bool] = {}
    for number, (opcode, value, at) in enumerate(pickletools.genops(data)):
        name, argument, reason = opcode.name, cast(Any, value), ""
        num_containers += name in _CONTAINERS
        has_frames = has_frames or name == "FRAME"
        if name not in _ALLOWED:
            reason = f"the instruction {name}"
        elif number == MAX_INSTRUCTIONS:
            reason = f"more than {MAX_INSTRUCTIONS} instructions"
        elif num_containers > MAX_CONTAINERS:
            reason = f"more than {MAX_CONTAINERS} containers, names and calls"
        elif name in _GETS and not memo.get(argument, True):
            reason = "a value twice that is not a short text"
        elif name in _PUTS:
            slot = len(memo) if argument is None else argument
            memo[slot] = is_shareable
            reason = f"a memo number of {slot}" if slot > MAX_MEMO else ""
        if reason:
            raise _refused(where, f"{reason} at byte {at}")
        is_shareable = name in _GLOBALS or (name in _TEXTS and len(argument) <= MAX_TEXT)
    # `pickletools` and the unpickler differ on a frame that ends inside an instruction, so it gets
    # new frames.
    return pickletools.optimize(data) if has_frames else data


def _refused(where: str, what: str) -> SourceError:
    return SourceError(
        f"{where}: the pickle holds {what}, expected only numbers, strings, lists, dicts and a byte"
        " array; nothing of it was run, do not trust this file"
    )


class _Object:
    """Stands for one occurrence of a name, or for what its call returns; BUILD sets nothing but its
    state.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, *arguments: object) -> None:
        self.name, self.arguments = name, arguments
        self.state: object = None

    def __call__(self, *arguments: object) -> Any:
        if self.name != "_codecs.encode":
            return _Object(self.name, *arguments)
        text, encoding = arguments  # how Python 3 writes bytes in a pickle that Python 2 can read
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise ValueError("bytes in another encoding than latin1")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), fix_imports=False, encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> _Object:
        if (module, name) not in _NAMES:
            raise _refused(self._where, f"the name {module}.{name}")
        return _Object(f"{module}.{name}")


def _plain(value: object, where: str) -> Any:
    """The value with its arrays made; raises SourceError if a batch can't hold it."""
    if isinstance(value, _Object):
        return _array(value.state, where)
    if isinstance(value, list):
        return [_plain(item, where) for item in value]
    if isinstance(value, str | bytes) and len(value) > MAX_TEXT:
        raise _refused(where, f"a text of more than {MAX_TEXT} letters")
    if value is not None and not isinstance(value, str | bytes | int):
        raise _refused(where, f"a value of type {type(value).__name__}")
    return value


def _array(state: object, where: str) -> np.ndarray:
    if not isinstance(state, tuple) or len(state) != 5:
        raise SourceError(
            f"{where}: an array without its content; the file is damaged, download it again"
        )
    _, shape, dtype, is_fortran, content = state
    codes = dtype.arguments[:1] if isinstance(dtype, _Object) else ()
    if codes not in (("u1",), (b"u1",)) or not isinstance(content, bytes):
        raise SourceError(
            f"{where}: an array of another type than unsigned bytes (u1); download the file again"
        )
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise SourceError(
            f"{where}: an array whose shape is not whole numbers; download the file again"
        )
    if len(shape) > _MAX_DIMENSIONS or len(content) != math.prod(shape):
        raise SourceError(
            f"{where}: {len(content)} bytes for an array of shape {shape!s:.80}; download the file"
            " again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape, order="F" if is_fortran else "C")
