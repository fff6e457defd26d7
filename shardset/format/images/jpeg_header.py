"""What the markers of a JPEG say, for the build and the reader, before anything decodes it.

Decoders that are asked for a reduced size have memory errors with some types of frames, all of them
rare. So whoever asks for one asks `may_be_reduced` first.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

SOS, EOI = b"\xff\xda", b"\xff\xd9"
"""The marks of a scan and of the end."""

_APP2 = b"\xff\xe2"
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_FRAME = struct.Struct(">BHHB")
_SEQUENTIAL = {"SOF0", "SOF1"}
_REDUCIBLE = {"SOF0", "SOF1", "SOF2"}
"""Baseline, extended and progressive frames with Huffman codes."""

# In entropy-coded data 0xff is followed by 0 or by a restart number. Anything else begins a
# segment, but 1, which stands alone. Decoders skip other bytes before a marker, and so does this.
_NEXT_SEGMENT = re.compile(rb"\xff+[^\x00\x01\xd0-\xd7\xff]")


def segments(jpeg: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The marker of each segment, and where its content begins and ends, up to the end mark or to
    the end of the data.
    """
    end = 2
    while match := _NEXT_SEGMENT.search(jpeg, end):
        begin = match.end()
        marker = jpeg[begin - 2 : begin]
        end = begin if marker == EOI else begin + int.from_bytes(jpeg[begin : begin + 2], "big")
        yield marker, begin + 2, end
        if marker == EOI:
            return


class Frame(NamedTuple):
    """The frame of a JPEG: its type, such as SOF0, the bits of its samples, its size as stored in
    pixels, its number of components, and how many of them are in the first scan.
    """

    kind: str
    bits: int
    height: int
    width: int
    num_components: int
    num_in_first_scan: int


def frame_of(jpeg: bytes) -> Frame | None:
    """The frame of a JPEG; None unless exactly one stands before the first scan."""
    frames: list[tuple[str, int]] = []
    for marker, begin, _ in segments(jpeg):
        if marker == SOS:
            if len(frames) != 1 or begin >= len(jpeg):
                return None
            kind, at = frames[0]
            bits, height, width, num_components = _FRAME.unpack_from(jpeg, at)
            return Frame(kind, bits, height, width, num_components, jpeg[begin])
        if marker[1] in _FRAMES and begin + _FRAME.size <= len(jpeg):
            frames.append((f"SOF{marker[1] - 0xC0}", begin))
    return None


def is_one_scan(jpeg: bytes) -> bool:
    """Whether a JPEG has all of its pixels in its first scan, so that decoders read no other."""
    frame = frame_of(jpeg)
    return (
        frame is not None
        and frame.kind in _SEQUENTIAL
        and frame.num_components == frame.num_in_first_scan
    )


def may_be_reduced(jpeg: bytes) -> bool:
    """Whether a decoder may be asked for the image at a reduced size.

    Pillow decodes all others whole, or refuses them.
    """
    frame = frame_of(jpeg)
    return frame is not None and frame.bits == 8 and frame.kind in _REDUCIBLE


def holds_more(jpeg: bytes) -> bool:
    """Whether a JPEG holds more than its image: an index of several (an MPO: HDR photos with a gain
    map, stereo pairs), or data behind the end mark, such as a film.
    """
    last = 0
    for marker, begin, end in segments(jpeg):
        if marker == _APP2 and jpeg.startswith(b"MPF\0", begin):
            return True
        last = end
    return any(jpeg[last:])
