"""What a sample was called, from the plan of its shard, and which key it got.

A file of a plan says whose it is, how long, and its CRC32C; no bit of it can flip unseen.
"""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.errors import DamagedShard
from shardset.format import naming
from shardset.format.originals import (
    NUM_BYTES,
    Origin,
    frame,
    open_frame,
    read_origins,
    stored_key,
    table_to_bytes,
)
from shardset.format.tar import StoredSample
from shardset.storage.memory import MemoryStorage
from tests.makers.objects import flipped, put
from tests.makers.shardset import references

_counter = itertools.count()
KEYS = ["a", "b/c", "b/c@1", "d"]
NAMES = ["raw/a.jpg", "raw/b/c.jpg", "raw/b/c.jpg", "d d.jpg"]


def planned(data: bytes | None = None) -> MemoryStorage:
    storage = MemoryStorage(f"originals-{next(_counter)}")
    samples = [
        StoredSample(key=key, fields=(), label=0, source=0, copy=int(key.endswith("@1")))
        for key in KEYS
    ]
    put(
        storage,
        naming.references_path("train", 2),
        references(samples, NAMES) if data is None else data,
    )
    return storage


def stored(keys: list[str]) -> np.ndarray:
    return np.array([key.encode() for key in keys])


def names(storage: MemoryStorage, *given) -> list[str] | None:
    found = read_origins(storage, naming.shard_path("train", "train", 2), *given)
    return None if found is None else [origin.name for origin in found]


def test_the_plan_names_all_samples_or_some_or_none_if_it_is_gone_or_of_other_keys():
    storage = planned()
    assert names(storage, stored(KEYS)) == names(storage, None) == NAMES
    assert names(storage, stored([KEYS[3], KEYS[1]]), [3, 1]) == [NAMES[3], NAMES[1]]
    assert names(storage, stored([]), []) == []
    for keys, positions in (([*KEYS[:3], "e"], None), (KEYS[:2], [0, 3]), (KEYS[:1], [4])):
        assert names(storage, stored(keys), positions) is None
    assert read_origins(storage, naming.shard_path("train", "train", 1), stored(KEYS)) is None


def test_what_is_no_plan_of_a_shard_is_named():
    whole = planned().read(naming.references_path("train", 2))
    other = table_to_bytes(pa.RecordBatch.from_pydict({"row": [b""]}))
    for data, what in (
        (b"", "CRC32C"),
        (whole[:-1], "CRC32C"),
        (bytes(other) + frame("", other), "has the columns row, expected row, occurrence"),
    ):
        expected = (
            rf"plan/shards/train-000002\.arrow: not a plan of a shard \(.*{what}.*\); remove it or"
            r" build again"
        )
        with pytest.raises(DamagedShard, match=expected):
            read_origins(planned(data), naming.shard_path("train", "train", 2), stored(KEYS))


@given(st.text() | st.sampled_from(KEYS), st.integers(0, 3), st.integers(0, 3))
def test_a_key_stays_if_it_can_be_one_and_nobody_had_it_before(key, twin, copy):
    origin = Origin("train", "a b.JPEG", key, "")
    found = stored_key(origin, twin, copy)
    stays = twin == 0 and naming.is_key(key)
    assert found == naming.copy_key(
        key if stays else naming.short_key(f"train/a b.JPEG\0{key}", twin), copy
    )
    assert naming.is_member(f"{found}.jpg")


def test_keys_of_samples_whose_own_can_not_stay_are_frozen():
    # Those of every shard set that holds one. To change them, raise PLAN_VERSION.
    assert stored_key(Origin("train", "a b.JPEG", "a b", ""), 0, 0) == "k663rgqcex201b"
    assert stored_key(Origin("train", "a.jpg", "a", ""), 1, 2) == "km5avcd0j8m746@2"


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
