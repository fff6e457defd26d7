"""A file of a plan says whose it is, how long, and its CRC32C; no bit of it can flip unseen."""

import pytest

from pipelines.plan.files import NUM_BYTES, frame, open_frame
from tests.makers.objects import flipped

BUILD = "0123456789abcdef"
DATA = b'{"a": 1}\n'


@pytest.mark.parametrize("build", [BUILD, "", "7"])
@pytest.mark.parametrize("content", [b"", DATA, b"\nshardset " * 9])
def test_content_and_build_come_back(build, content):
    found = open_frame(content + frame(build, content))
    assert (found.build, bytes(found.content)) == (build, content)


def test_no_bit_flips_unseen():
    whole = DATA + frame(BUILD, DATA)
    for bit in range(8 * len(whole)):
        with pytest.raises(ValueError, match=r"^its "):
            open_frame(flipped(whole, bit // 8, 1 << bit % 8))


def test_no_cut_is_unseen():
    whole = DATA + frame(BUILD, DATA)
    for cut in [*range(len(whole))]:
        with pytest.raises(ValueError, match=r"^its "):
            open_frame(whole[:cut])
        with pytest.raises(ValueError, match=r"^its "):
            open_frame(whole[len(whole) - cut :])


def test_the_frame_of_a_file_is_frozen():
    # Of every plan that stands somewhere. To change it, raise PLAN_VERSION.
    assert frame(BUILD, DATA) == b"\nshardset 0123456789abcdef 0000000000000009 b55b41b3\n"
    assert len(frame("", b"")) == NUM_BYTES
