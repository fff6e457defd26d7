"""Writes to a bucket over a network that breaks."""

import io
from dataclasses import replace

import pytest

from shardset.errors import StorageError, TransientError
from shardset.storage import gcs
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, in_turn, is_upload
from tests.makers.objects import BIG, Clock, file_size_limit, names, put

pytestmark = pytest.mark.gcs


@pytest.fixture
def scheme():
    return "gs"


def test_an_upload_that_trickles_is_given_up(behind_proxy, monkeypatch):
    policy = replace(
        behind_proxy.retry, clock=Clock(step_s=0.01), request_deadline_s=-100.0, give_up_after_s=1.0
    )
    with pytest.raises(TransientError, match="slower than 64 KiB/s"):
        put(replace(behind_proxy, retry=policy), "a", BIG)
    assert names(behind_proxy) == []


def test_an_upload_over_a_slow_line_has_the_time_it_takes():
    bytes_per_s = 100_000  # the share of each of eight workers of a build behind a line of 6 Mbit/s
    shard = io.BytesIO(bytes(96 << 20))
    policy = RetryPolicy(clock=lambda: shard.tell() / bytes_per_s)
    writer = gcs.GcsStorage("bucket", retry=policy).writer("a")
    writer.file = shard
    pieces = [len(piece) for piece in writer._body(b"head", b"tail")]
    assert sum(pieces) > 96 << 20
    assert max(pieces) / bytes_per_s < policy.connect_timeout_s  # in which a piece has to be taken


@pytest.mark.parametrize("at", [300, 100_000])
def test_an_upload_cut_on_its_way_is_never_visible(behind_proxy, proxy, at):
    proxy.script = lambda seen: Fault("cut_upload", at=at) if is_upload(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after"):
        put(behind_proxy, "a", BIG)
    assert names(behind_proxy) == []


def test_a_bit_flipped_on_its_way_up_is_sent_again(behind_proxy, proxy):
    proxy.script = in_turn(Fault("flip_upload", at=100_000), when=is_upload)
    put(behind_proxy, "a", BIG)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == BIG


def test_an_object_larger_than_the_memory_for_it_goes_through_a_file(gcs_root, monkeypatch):
    monkeypatch.setattr(gcs, "SPOOL_BYTES", 50_000)
    storage = open_storage(gcs_root)
    put(storage, "big", BIG, if_generation=ABSENT)
    assert storage.read("big") == BIG


@pytest.mark.parametrize("num_small", [1, 1000])
def test_a_temporary_folder_that_is_full_at_the_last_byte_is_said(gcs_root, num_small, monkeypatch):
    # Small writes wait in a buffer: the disk refuses them when that is full, when all is sent, or
    # when it is closed.
    monkeypatch.setattr(gcs, "SPOOL_BYTES", 50_000)
    storage = open_storage(gcs_root)

    def write():
        with storage.writer("a") as writer:
            writer.write(BIG[:98_000])
            for _ in range(num_small):
                writer.write(BIG[:3000])

    with (
        file_size_limit(100_000),
        pytest.raises(StorageError, match=r"a, in the temporary folder .*larger than the"),
    ):
        write()
    assert names(storage) == []
