"""Types that threads may decode, and what msgspec raises for bytes that are not of a type.

msgspec prepares a type when it is decoded for the first time. Where two threads do that at once,
one of them uses what the other has not finished, and the process crashes. So the types are prepared
while their modules are imported.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T")

JSON_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""The errors of decoding: JSON of another type, other bytes, bytes that are not UTF-8, too many
brackets.
"""


def prepared(kind: type[T]) -> type[T]:
    """Prepares a type, and all types of its fields, for msgspec's decoders; a decorator."""
    msgspec.json.Decoder(kind)
    return kind
