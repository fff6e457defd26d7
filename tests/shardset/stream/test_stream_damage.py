"""Whatever is broken, the stream yields exactly the right samples or says what is
broken and where.
"""

import itertools
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardset.decode.crops import CenterCrop
from shardset.decode.image import ImageSpec
from shardset.errors import DamagedShard, ShardsetError
from shardset.format.tar import members
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, FaultyProxy, is_media
from tests.makers.reading import stream_of
from tests.makers.shardset import new_set, pixels, png_samples, put

NUM_SAMPLES = 24
SHARD = "train/train-000001.tar"
INDEX = "train/train-000001.parquet"
BYTES = {"image": None, "fields": ("png",), "prefetch": 1}


def write(url):
    return new_set(png_samples("train", NUM_SAMPLES, size=8), url)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Path(write(str(tmp_path_factory.mktemp("whole"))))


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def remote():
    """A shard set that is read by blocks."""
    return write(None)


def opened(url, **options):
    small = {"global_batch_size": 4, "seed": 1, "window": 3, "num_threads": None}
    return stream_of(str(url), **{**small, **options})


def read(url):
    """One epoch, every pixel compared: the ids that came."""
    ids = []
    for batch in opened(url, image=ImageSpec(size=8, crop=CenterCrop(8))).epoch(0):
        for id_, label, image in zip(batch["id"], batch["label"], batch["image"], strict=True):
            assert label == id_ % 10
            assert np.array_equal(image, pixels(id_, 8, 8))
        ids += batch["id"][batch["weight"] == 1].tolist()
    return sorted(ids)


def flip(path, byte, bit):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def refusal(url):
    """What the stream says instead of samples; empty if all of them came and were right."""
    try:
        found = read(url)
    except ShardsetError as error:
        return str(error)
    assert found == list(range(NUM_SAMPLES))
    return ""


def outcome(url, naming):
    """'right', or 'refused' with one of those names in the message; anything else fails."""
    said = refusal(url)
    assert not said or any(name in said for name in naming), said
    return "refused" if said else "right"


def borders(path):
    """Where each member's header and content begin, and where the last content ends."""
    found = list(members(path.read_bytes(), "here"))
    return [at for member in found for at in (member.header_offset, member.offset)] + [
        found[-1].offset + found[-1].num_bytes
    ]


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_bit_anywhere_is_named_or_harmless(whole, tmp_path, data):
    copy = Path(shutil.copytree(whole, tmp_path / uuid.uuid4().hex))
    name = data.draw(st.sampled_from([SHARD, INDEX, "manifest.json"]))
    size = (copy / name).stat().st_size
    flip(copy / name, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    naming = {SHARD: [SHARD], INDEX: [INDEX], "manifest.json": ["manifest.json", "split"]}[name]
    assert outcome(copy, naming) in ("right", "refused")


def test_a_flipped_bit_in_a_payload_names_shard_key_and_offset(copy):
    at = next(
        member
        for member in members((copy / SHARD).read_bytes(), "here")
        if member.key == "train-000015"
    )
    flip(copy / SHARD, at.offset + 20, 3)
    with pytest.raises(
        DamagedShard,
        match=(
            rf"{SHARD}: sample 'train-000015' at byte {at.offset}: crc32c is .*, expected .*rebuild"
        ),
    ):
        read(copy)


def test_a_flipped_bit_in_a_header_changes_nothing_because_the_index_says_where(copy):
    flip(copy / SHARD, 3, 2)
    assert read(copy) == list(range(NUM_SAMPLES))


def test_a_shard_cut_at_any_member_border_is_refused(copy):
    data = (copy / SHARD).read_bytes()
    for border in borders(copy / SHARD):
        (copy / SHARD).write_bytes(data[:border])
        with pytest.raises(
            DamagedShard, match=rf"{SHARD}: {border} bytes, expected {len(data)}; the shard is cut"
        ):
            read(copy)


def test_a_shard_cut_while_it_is_read_is_refused(copy):
    batches = opened(copy, **BYTES, num_threads=1).epoch(0)
    next(batches)
    for name in (SHARD, "train/train-000000.tar"):
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[:600])
    with pytest.raises(DamagedShard, match=r"train-00000\d.tar: sample 'train-0000\d\d' at byte"):
        list(batches)


@pytest.mark.parametrize("name", [SHARD, INDEX])
@pytest.mark.parametrize("where", ["copy", "remote"])
def test_a_missing_file_or_object_is_named(request, where, name):
    url = str(request.getfixturevalue(where))
    open_storage(url).delete(name)
    with pytest.raises(DamagedShard, match=name):
        read(url)


@pytest.fixture
def proxied(gcs_emulator, gcs_root, monkeypatch):
    """(url, proxy): a shard set in the emulator,
    reached through a proxy that can break requests.
    """
    url = write(gcs_root)
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield url, proxy


FAULTS = [
    Fault("status", status=429),
    Fault("status", status=503),
    Fault("reset"),
    Fault("lose"),
    Fault("truncate", at=40),
    Fault("reset_at", at=300),
    Fault("stall", at=40, seconds=0.3),
    Fault("flip", at=100),
]


@pytest.mark.gcs
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}")
def test_a_fault_at_every_single_request_is_survived_or_named(proxied, fault):
    url, proxy = proxied
    read(url)
    found = []
    for wanted in range(len(proxy.seen)):
        numbers = itertools.count()
        proxy.script = lambda _, n=numbers, at=wanted: fault if next(n) == at else None
        found.append(outcome(url, ["manifest.json", "train-00000"]))
    assert found.count("right") > len(found) // 2


@pytest.mark.gcs
def test_bytes_that_come_flipped_every_time_are_refused(proxied):
    url, proxy = proxied
    proxy.script = lambda seen: (
        Fault("flip", at=60) if is_media(seen) and "000001.tar" in seen.path else None
    )
    with pytest.raises(ShardsetError, match=rf"{SHARD}: sample 'train-0000\d\d' at byte \d+"):
        read(url)


@pytest.mark.gcs
def test_a_shard_replaced_while_it_is_read_is_refused(proxied):
    url, _ = proxied
    storage = open_storage(url)
    data = bytearray(storage.read(SHARD))
    data[2000] ^= 1
    batches = opened(url, **BYTES, block_size=1, window=0).epochs()
    next(batches)
    put(storage, SHARD, bytes(data))
    with pytest.raises(ShardsetError, match=SHARD):
        list(itertools.islice(batches, 1000))
