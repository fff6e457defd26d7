"""What the markers of a JPEG say, for the build and the reader, before anything decodes it.

Decoders that are asked for a reduced size have memory errors with some types of frames, all of them
rare. So whoever asks for one asks `may_be_reduced` first.
"""

import re
from collections.abc import Iterator

SOS, EOI = b"\xff\xda", b"\xff\xd9"
"""The marks of a scan and of the end."""

_APP2 = b"\xff\xe2"
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_REDUCIBLE = {("SOF0", 8), ("SOF1", 8), ("SOF2", 8)}
"""Baseline, extended and progressive frames with Huffman codes, of 8 bits."""

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


def frame_of(jpeg: bytes) -> tuple[str, int] | None:
    """The type of a JPEG's frame, such as SOF0, and the bits of its samples.

    None unless exactly one frame stands before the first scan.
    """
    frames: list[tuple[str, int]] = []
    for marker, begin, _ in segments(jpeg):
        if marker == SOS:
            return frames[0] if len(frames) == 1 else None
        if marker[1] in _FRAMES:
            frames.append((f"SOF{marker[1] - 0xC0}", int.from_bytes(jpeg[begin : begin + 1])))
    return None


def may_be_reduced(jpeg: bytes) -> bool:
    """Whether a decoder may be asked for the image at a reduced size.

    Pillow decodes all others whole, or refuses them.
    """
    return frame_of(jpeg) in _REDUCIBLE


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
