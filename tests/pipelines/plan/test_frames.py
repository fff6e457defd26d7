"""Which key a raw sample gets.

A file of a plan says whose it is, how long, and its CRC32C; no bit of it can flip unseen.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.plan.frames import (
    NUM_BYTES,
    Original,
    frame,
    open_frame,
    stored_key,
)
from shardset.format import naming
from tests.makers.objects import flipped

KEYS = ["a", "b/c", "b/c@1", "d"]


@given(st.text() | st.sampled_from(KEYS), st.integers(0, 3), st.integers(0, 3))
def test_a_key_stays_if_it_can_be_one_and_nobody_had_it_before(key, twin, copy):
    origin = Original("train", "a b.JPEG", key, "")  # whatever its split
    found = stored_key(origin, twin, copy)
    stays = twin == 0 and naming.is_key(key)
    assert found == naming.copy_key(
        key if stays else naming.short_key(f"a b.JPEG\0{key}", twin), copy
    )
    assert naming.is_member(f"{found}.jpg")


def test_keys_of_samples_whose_own_can_not_stay_are_frozen():
    # Those of every shard set that holds one. To change them, raise PLAN_VERSION.
    assert stored_key(Original("train", "a b.JPEG", "a b", ""), 0, 0) == "k5ddh5xh6apz99"
    assert stored_key(Original("train", "a.jpg", "a", ""), 1, 2) == "k1nd2g6bcs5bk5@2"


# --- the frame of a file of the plan --------------------------------------------------------------

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
