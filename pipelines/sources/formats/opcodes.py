"""Checks what the opcodes of a pickle would build, before the standard unpickler builds it.

A stack of shapes goes through the opcodes as the unpickler's stack of values will, so a value that is refused was never
hashed, called or printed. Only short texts and names may be referred to more than once, never containers: so the values
are a tree, no larger than the file.
"""

import io
import pickle
import pickletools
from collections.abc import Callable, Collection
from typing import Any

import msgspec

MAX_OPCODES = 2_000_000
"""The 50,000 rows of CIFAR-100 take 200,000 as published, 550,000 if Python 3 writes them again."""

MAX_MEMO = 1_000_000
"""The unpickler's memo is an array as long as the largest number in it, so that number has a limit."""

MAX_DEPTH = 16
MAX_ITEMS = 200_000
"""Items of a list, and values on the stack."""

MAX_KEYS = 100
MAX_TUPLE = 16
MAX_TEXT = 1024
"""Letters of a text; one longer text may be the content of the array."""

MAX_LINE = 8192
NUMBER_BITS = 32
_FRAME_HEAD = 9
"""Bytes of the instruction that begins a frame."""

RECONSTRUCT = frozenset(("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"))
ENCODE = "_codecs encode"


class Refused(Exception):
    """The pickle holds something that no batch needs."""


class _Shape(msgspec.Struct, gc=False):
    """Stands for a value: `first` is the kind of a tuple's first item, `text` a short text or a name."""

    kind: str
    depth: int = 0
    num_items: int = 0
    first: str = ""
    text: str = ""


_NUMBER = _Shape("a number")
_CONTENT = _Shape("a long text")
_TEXT, _NAME, _LIST, _DICT, _TUPLE, _OBJECT = "a text", "a name", "a list", "a dict", "a tuple", "an object"

_SHARED = frozenset((_TEXT, _NAME))
_IN_LIST = frozenset((_NUMBER.kind, _TEXT, _LIST))
_IN_DICT = frozenset((_NUMBER.kind, _TEXT, _LIST, _OBJECT))


def check(data: bytes, names: Collection[str]) -> None:
    """Raises Refused unless a pickle has only dicts, lists, texts, small numbers and one array, all of bounded sizes.

    `names` are the globals that it may name, as `MODULE NAME`. If the opcodes make no whole pickle, raises
    UnpicklingError or what `pickletools` raises.
    """
    stack, position, frame_stop = _Stack(names), 0, 0
    try:
        for number, (opcode, argument, at) in enumerate(pickletools.genops(_Lines(data))):
            position = at or 0
            if number == MAX_OPCODES:
                raise Refused(f"more than {MAX_OPCODES} instructions")
            if frame_stop:
                frame_stop = _next_frame_stop(frame_stop, position, opcode.name)
            if opcode.name == "FRAME":
                frame_stop = position + _FRAME_HEAD + int(argument or 0)
            step = _STEPS.get(opcode.name)
            if step is None:
                raise Refused(f"the instruction {opcode.name}")
            step(stack, argument)
    except Refused as error:
        raise Refused(f"{error} at byte {position}") from error


def _next_frame_stop(stop: int, position: int, opcode: str) -> int:
    """Where the frame of an instruction ends, 0 if it is in none.

    Where an instruction reaches across the end of a frame, the unpickler drops the rest of it, and so would run other
    instructions than those checked here.
    """
    if position > stop:
        raise Refused("an instruction across the end of a frame")
    if position < stop and opcode == "FRAME":
        raise Refused("a frame in a frame")
    return stop if position < stop else 0


class _Lines(io.BytesIO):
    """A file with a limit to its lines, which hold numbers and names."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(MAX_LINE)
        if len(line) == MAX_LINE:
            raise Refused(f"a line of {MAX_LINE} or more bytes")
        return line


class _Stack:
    """The unpickler's stack, marks and memo, of shapes."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.shapes: list[_Shape] = []
        self.marks: list[int] = []
        self.memo: dict[int, _Shape] = {}
        self.num_contents = self.num_arrays = 0

    def push(self, shape: _Shape) -> None:
        if shape.depth > MAX_DEPTH:
            raise Refused(f"values more than {MAX_DEPTH} deep in each other")
        if len(self.shapes) >= MAX_ITEMS:
            raise Refused(f"more than {MAX_ITEMS} values in a row")
        self.shapes.append(shape)

    def pop(self) -> _Shape:
        if len(self.shapes) <= (self.marks[-1] if self.marks else 0):
            raise pickle.UnpicklingError("an instruction without its values")
        return self.shapes.pop()

    def top(self, kind: str = "") -> _Shape:
        shape = self.pop()
        if kind and shape.kind != kind:
            raise pickle.UnpicklingError(f"{shape.kind}, expected {kind}")
        self.shapes.append(shape)
        return shape

    def pop_to_mark(self) -> list[_Shape]:
        if not self.marks:
            raise pickle.UnpicklingError("an instruction without its mark")
        start = self.marks.pop()
        shapes = self.shapes[start:]
        del self.shapes[start:]
        return shapes

    def put(self, number: int) -> None:
        if not 0 <= number <= MAX_MEMO:
            raise Refused(f"a memo number of {number}")
        self.memo[number] = self.top()


def _nothing(stack: _Stack, argument: Any) -> None:
    pass


def _stop(stack: _Stack, argument: Any) -> None:
    if len(stack.shapes) != 1 or stack.marks:
        raise pickle.UnpicklingError(f"{len(stack.shapes)} values at the end, expected one")


def _mark(stack: _Stack, argument: Any) -> None:
    if len(stack.marks) == MAX_DEPTH:
        raise Refused(f"values more than {MAX_DEPTH} deep in each other")
    stack.marks.append(len(stack.shapes))


def _plain(stack: _Stack, argument: Any) -> None:
    stack.push(_NUMBER)


def _number(stack: _Stack, argument: int) -> None:
    if argument.bit_length() > NUMBER_BITS:
        raise Refused(f"a number of {argument.bit_length()} bits")
    stack.push(_NUMBER)


def _text(stack: _Stack, argument: str | bytes) -> None:
    if len(argument) <= MAX_TEXT:
        stack.push(_Shape(_TEXT, text=argument if isinstance(argument, str) else ""))
        return
    stack.num_contents += 1
    if stack.num_contents > 1:
        raise Refused(f"a second text of more than {MAX_TEXT} letters")
    stack.push(_CONTENT)


def _put(stack: _Stack, argument: int) -> None:
    stack.put(argument)


def _memoize(stack: _Stack, argument: Any) -> None:
    stack.put(len(stack.memo))


def _get(stack: _Stack, argument: int) -> None:
    shape = stack.memo.get(argument)
    if shape is None:
        raise pickle.UnpicklingError(f"nothing has the memo number {argument}")
    if shape.kind not in _SHARED:
        raise Refused(f"{shape.kind} twice")
    stack.push(shape)


def _global(stack: _Stack, argument: str) -> None:
    if argument not in stack.names:
        raise Refused(f"the name {argument.replace(' ', '.', 1)}")
    stack.push(_Shape(_NAME, text=argument))


def _stack_global(stack: _Stack, argument: Any) -> None:
    stack.top(_TEXT)
    name = stack.pop()
    stack.top(_TEXT)
    _global(stack, f"{stack.pop().text} {name.text}")


def _empty_list(stack: _Stack, argument: Any) -> None:
    stack.push(_Shape(_LIST, depth=1))


def _empty_dict(stack: _Stack, argument: Any) -> None:
    stack.push(_Shape(_DICT, depth=1))


def _list(stack: _Stack, argument: Any) -> None:
    items = stack.pop_to_mark()
    _empty_list(stack, None)
    _extend(stack, items)


def _append(stack: _Stack, argument: Any) -> None:
    _extend(stack, [stack.pop()])


def _appends(stack: _Stack, argument: Any) -> None:
    _extend(stack, stack.pop_to_mark())


def _extend(stack: _Stack, items: list[_Shape]) -> None:
    _fill(stack, stack.top(_LIST), items, MAX_ITEMS, _IN_LIST)


def _dict(stack: _Stack, argument: Any) -> None:
    items = stack.pop_to_mark()
    _empty_dict(stack, None)
    _update(stack, items)


def _set_item(stack: _Stack, argument: Any) -> None:
    value = stack.pop()
    _update(stack, [stack.pop(), value])


def _set_items(stack: _Stack, argument: Any) -> None:
    _update(stack, stack.pop_to_mark())


def _update(stack: _Stack, items: list[_Shape]) -> None:
    if len(items) % 2:
        raise pickle.UnpicklingError("a key without a value")
    for key in items[::2]:
        if key.kind != _TEXT:
            raise Refused(f"{key.kind} as the key of a dict")
    _fill(stack, stack.top(_DICT), items[1::2], MAX_KEYS, _IN_DICT)


def _fill(stack: _Stack, holder: _Shape, items: list[_Shape], most: int, kinds: frozenset[str]) -> None:
    holder.num_items += len(items)
    if holder.num_items > most:
        raise Refused(f"{holder.kind} of more than {most} items")
    for item in items:
        if item.kind not in kinds:
            raise Refused(f"{item.kind} in {holder.kind}")
        holder.depth = max(holder.depth, 1 + item.depth)
    if holder.depth > MAX_DEPTH:
        raise Refused(f"values more than {MAX_DEPTH} deep in each other")


def _tuple(stack: _Stack, argument: Any) -> None:
    _push_tuple(stack, stack.pop_to_mark())


def _tuple_of(num_items: int) -> Callable[[_Stack, Any], None]:
    def step(stack: _Stack, argument: Any) -> None:
        _push_tuple(stack, [stack.pop() for _ in range(num_items)][::-1])

    return step


def _push_tuple(stack: _Stack, items: list[_Shape]) -> None:
    if len(items) > MAX_TUPLE:
        raise Refused(f"a tuple of more than {MAX_TUPLE} items")
    depth = 1 + max((item.depth for item in items), default=0)
    stack.push(_Shape(_TUPLE, depth=depth, num_items=len(items), first=items[0].kind if items else ""))


def _reduce(stack: _Stack, argument: Any) -> None:
    stack.top(_TUPLE)
    arguments = stack.pop()
    stack.top(_NAME)
    name = stack.pop().text
    if name == ENCODE:
        _push_encoded(stack, arguments)
        return
    stack.num_arrays += name in RECONSTRUCT
    if stack.num_arrays > 1:
        raise Refused("a second array")
    stack.push(_Shape(_OBJECT, depth=1 + arguments.depth))


def _push_encoded(stack: _Stack, arguments: _Shape) -> None:
    if arguments.first == _TEXT:
        stack.push(_Shape(_TEXT))
    elif arguments.first == _CONTENT.kind:
        stack.push(_CONTENT)
    else:
        raise Refused(f"{arguments.first or 'nothing'} to encode")


def _build(stack: _Stack, argument: Any) -> None:
    state = stack.pop()
    holder = stack.top(_OBJECT)
    if state.kind != _TUPLE:
        raise Refused(f"{state.kind} as the state of an object")
    holder.depth = max(holder.depth, 1 + state.depth)
    if holder.depth > MAX_DEPTH:
        raise Refused(f"values more than {MAX_DEPTH} deep in each other")


_STEPS: dict[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE"), _plain),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG1"), _number),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES"), _text),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"), _text),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    "STOP": _stop,
    "MARK": _mark,
    "MEMOIZE": _memoize,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "EMPTY_LIST": _empty_list,
    "LIST": _list,
    "APPEND": _append,
    "APPENDS": _appends,
    "EMPTY_DICT": _empty_dict,
    "DICT": _dict,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "EMPTY_TUPLE": _tuple_of(0),
    "TUPLE": _tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "REDUCE": _reduce,
    "BUILD": _build,
}
