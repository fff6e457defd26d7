"""Which JPEGs a decoder may be asked for at a reduced size, by their headers alone.

Memory errors of native decoders, asked for a reduced size of rarer frames, ended the process. No
such file is here: these are headers without an image.
"""

import pytest

from shardset.format.images.jpeg_header import (
    frame_of,
    holds_more,
    is_one_scan,
    may_be_reduced,
)
from tests.makers.odd_images import jpeg

FRAMES = sorted(set(range(16)) - {4, 8, 12})


def header(*frames, before=b""):
    """The header of a JPEG with frames of (type, bits), and no image."""
    sofs = (
        bytes([0xFF, 0xC0 + kind, 0, 11, bits, 0, 9, 0, 9, 1, 1, 17, 0]) for kind, bits in frames
    )
    return b"\xff\xd8" + before + b"".join(sofs) + b"\xff\xda\0\x08\1\1\0\0\0\0" + b"\xff\xd9"


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("kind", FRAMES)
def test_baseline_extended_and_progressive_frames_of_8_bits_may_be_reduced(kind, bits):
    assert frame_of(header((kind, bits))) == (f"SOF{kind}", bits, 9, 9, 1, 1)
    assert may_be_reduced(header((kind, bits))) == (kind <= 2 and bits == 8)


@pytest.mark.parametrize(
    "before",
    [
        b"\xff\xe0\0\x0f\xff\xc0\0\x0b\x08\0\x09\0\x09\1\1\x11\0",  # it looks like a frame
        b"\xff\xff\xff",
        bytes(5),
        b"any bytes",
        b"\xff\xd3",
        b"\xff\1",
        b"\xff\0",
        b"\xff\xc4\0\2\xff\xc8\0\2\xff\xcc\0\2",  # tables, no frames
    ],
)
def test_a_frame_is_found_where_decoders_find_it(before):
    for kind in (0, 3):
        assert frame_of(header((kind, 8), before=before)) == (f"SOF{kind}", 8, 9, 9, 1, 1)


@pytest.mark.parametrize(
    "data", [header(), header((0, 8), (3, 8)), header((0, 8))[:13], b"", b"\xff\xd8\xff\xc0"]
)
def test_a_header_without_one_frame_is_none_to_reduce(data):
    assert not may_be_reduced(data)


def test_every_cut_of_a_header_may_be_asked():
    data = header((0, 8))
    assert [may_be_reduced(data[:size]) for size in range(len(data))].index(True) > 15


def test_a_sequential_frame_whose_first_scan_has_all_components_is_one_scan():
    assert [kind for kind in FRAMES if is_one_scan(header((kind, 8)))] == [0, 1]
    three = header((0, 8)).replace(b"\1\1\x11\0\xff\xda", b"\3\1\x11\0\xff\xda")
    assert not is_one_scan(three)
    assert not any(is_one_scan(header((0, 8))[:size]) for size in range(20))


def test_what_a_jpeg_holds_beside_its_image():
    index = b"\xff\xe2\0\x0aMPF\0II*\0"
    assert holds_more(header((0, 8), before=index))
    assert holds_more(jpeg() + b"\0\0\0\x18ftypmp42")
    assert not any(map(holds_more, (jpeg(), jpeg() + bytes(9), jpeg(icc_profile=b"p" * 99))))
