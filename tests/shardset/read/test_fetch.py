import resource
import threading
import time
import uuid
from concurrent.futures import CancelledError, wait
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import DamagedShard, StorageError, TransientError
from shardset.format.manifest import load
from shardset.format.tar import StoredSample
from shardset.order.budget import INDEX_BYTES
from shardset.order.epoch import Order
from shardset.read.fetch import (
    SMALL_BYTES,
    BlockSampleReader,
    LocalSampleReader,
    RemoteReader,
    ShardTable,
    open_sample_reader,
)
from shardset.storage.base import Stat
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, put, write_shard_set

NUM_SAMPLES = 60


@dataclass
class WatchedStorage:
    """Another storage, with a list of what was read from it and a script that may hold or break a read."""

    inner: MemoryStorage
    reads: list = field(default_factory=list)
    before: object = lambda number, name: None
    looks: list = field(default_factory=list)
    before_look: object = lambda number: None

    @property
    def url(self):
        return self.inner.url

    @property
    def is_remote(self):
        return self.inner.is_remote

    def stat(self, name) -> Stat:
        self.looks.append(name)
        self.before_look(len(self.looks))
        return self.inner.stat(name)

    def read(self, name, start=0, stop=None, *, generation=None):
        number = len(self.reads)
        self.reads.append((name, start, stop, generation))
        self.before(number, name)
        return self.inner.read(name, start, stop, generation=generation)


@pytest.fixture
def watched():
    """A watched shard set of 60 samples in 3 shards, and its manifest's split."""
    url = f"memory://{uuid.uuid4().hex}/set"
    write_shard_set(open_storage(url), {"train": png_samples("train", NUM_SAMPLES, size=8)}, num_shards=3)
    manifest, storage = load(url)
    return WatchedStorage(storage), manifest.split("train")


def order_of(split, **options):
    choices = {"seed": 3, "global_batch_size": 6, "num_lanes": 3, "block_size": 5, "window": 4}
    return Order(shard_sizes=[shard.num_samples for shard in split.shards], **{**choices, **options})


def addresses_of(table, order, ids):
    shards = np.searchsorted(order.first_ids, ids, side="right") - 1
    return table.addresses(shards, ids - order.first_ids[shards])


def drain(reads, table, order, *, epoch=0, start=0, rank=0, world=1):
    """The fields of all samples of an epoch, by id."""
    found = {}
    for step in range(start, order.num_batches):
        slots = order.rank_slots(epoch, step, rank, world)
        tickets = reads.tickets(epoch, slots, addresses_of(table, order, slots.ids))
        found |= {id_: tickets.take(number) for number, id_ in enumerate(slots.ids.tolist())}
    return found


def test_a_table_knows_every_sample(watched):
    storage, split = watched
    found = ShardTable(storage, split, with_keys=True).addresses(np.array([1, 0]), np.array([4, 7]))
    assert (found.keys, found.labels.tolist()) == (["train-000024", "train-000007"], [4, 7])
    address = found[0]
    data = storage.read(split.shards[1].path, address.start, address.stop)
    assert data.startswith(b"\x89PNG")
    assert data.endswith(b"4")


def test_a_table_names_a_sample_though_it_keeps_no_keys(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    found = table.addresses(np.array([1]), np.array([4]))
    assert found.keys is None
    assert (
        table.named(found[0]) == f"{storage.url}/train/train-000001.tar: sample 'train-000024' at byte {found[0].start}"
    )


def test_an_index_holds_four_bytes_a_number_and_eight_where_they_are_needed(watched):
    storage, split = watched
    small = ShardTable(storage, split).index(0)
    assert small.num_bytes == INDEX_BYTES * 20
    large = msgspec.structs.replace(split.shards[0], num_bytes=1 << 40)
    wide = ShardTable(storage, msgspec.structs.replace(split, shards=(large, *split.shards[1:]))).index(0)
    assert wide.num_bytes == 2 * small.num_bytes
    assert wide.rows.tolist() == small.rows.tolist()


def test_members_may_stand_in_another_order_than_the_columns_of_the_split(tmp_path):
    samples = [
        StoredSample(key="a", fields=(("jpg", b"A"), ("cls", b"1")), label=1, source=0),
        StoredSample(key="b", fields=(("png", b"BB"), ("cls", b"2")), label=2, source=1),
    ]
    write_shard_set(open_storage(str(tmp_path)), {"train": samples}, num_shards=1)
    manifest, storage = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    assert table.split.fields == ["jpg", "cls", "png"]
    tickets = LocalSampleReader(table).alone(table.addresses(np.array([0, 0]), np.array([1, 0])))
    assert [tickets.take(0), tickets.take(1)] == [[None, b"2", b"BB"], [b"A", b"1", None]]


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES // 2, 2 * SMALL_BYTES])
def test_each_field_of_a_small_and_of_a_large_sample_is_what_was_stored(tmp_path, num_bytes):
    content = bytes(range(256)) * (num_bytes // 256)
    sample = StoredSample(key="a", fields=(("jpg", content), ("json", b""), ("cls", b"1")), label=1, source=0)
    write_shard_set(open_storage(str(tmp_path)), {"train": [sample]}, num_shards=1)
    manifest, storage = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    assert LocalSampleReader(table).alone(table.addresses(np.array([0]), np.array([0]))).take(0) == [content, b"", b"1"]
    path = tmp_path / "train" / "train-000000.tar"
    path.write_bytes(path.read_bytes().replace(content[-9:], b"different"))
    with pytest.raises(DamagedShard, match="sample 'a' at byte 512: crc32c is"):
        LocalSampleReader(table).alone(table.addresses(np.array([0]), np.array([0]))).take(0)


def test_an_index_is_read_once_while_it_fits_its_budget(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    for _ in range(3):
        for shard in range(3):
            table.index(shard)
    assert len(storage.reads) == 3
    small = ShardTable(storage, split, budget_bytes=1)
    for shard in (0, 0, 1, 0):
        small.index(shard)
    assert len(storage.reads) == 6


def test_samples_that_are_asked_for_together_need_each_index_once(watched):
    storage, split = watched
    table = ShardTable(storage, split, budget_bytes=1)
    found = table.addresses(np.arange(60) % 3, np.arange(60) // 3)
    assert len(storage.reads) == 3
    assert [address[:2] for address in found] == [(number % 3, number // 3) for number in range(60)]
    assert found.labels.tolist() == [(20 * (number % 3) + number // 3) % 10 for number in range(60)]


def test_indexes_that_are_missing_are_asked_for_at_the_same_time(watched):
    storage, split = watched
    together = threading.Barrier(3)
    storage.before = lambda number, name: together.wait(30)
    table = ShardTable(storage, split)
    found = table.addresses(np.arange(60) % 3, np.arange(60) // 3)
    assert found.labels.tolist() == [(20 * (number % 3) + number // 3) % 10 for number in range(60)]
    assert table.num_bytes_read == sum(shard.index.num_bytes for shard in split.shards)


def test_indexes_that_are_large_together_are_read_one_after_the_other(watched, monkeypatch):
    storage, split = watched
    monkeypatch.setattr("shardset.read.fetch.INDEX_BYTES_AT_ONCE", 2 * split.shards[0].index.num_bytes - 1)
    threads = set()
    storage.before = lambda number, name: threads.add(threading.get_ident())
    ShardTable(storage, split).addresses(np.array([2, 0, 1]), np.array([0, 0, 0]))
    assert len(threads) == 1
    assert len(storage.reads) == 3


def test_of_several_indexes_the_damaged_one_is_named_and_no_thread_is_left(watched):
    storage, split = watched
    name = split.shards[1].index.path
    put(storage.inner, name, storage.inner.read(name)[:-1] + b"x")
    table = ShardTable(storage, split)
    with pytest.raises(
        DamagedShard, match=r"train-000001.idx.npy: .* the index of shard train/train-000001.tar is damaged"
    ):
        table.addresses(np.array([0, 1, 2]), np.array([0, 0, 0]))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardset-index")]
    assert len(storage.reads) == 4  # the damaged one a second time


@pytest.mark.parametrize("lanes", [1, 2, 6])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_blocks_bring_every_sample_and_end_up_empty(watched, lanes, world):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split, num_lanes=lanes)
    found = {}
    for rank in range(world):
        reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
        found |= drain(reads, table, order, rank=rank, world=world)
        reads._close_passed(1, 0)
        assert reads.held_bytes == 0
        assert not reads._open
        reads.close()
    assert sorted(found) == list(range(NUM_SAMPLES))
    assert all(
        image.startswith(b"\x89PNG") and label == str(id_ % 10).encode() for id_, (image, label) in found.items()
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(0, 40), st.integers(0, 9), st.integers(0, 3))
def test_any_order_can_be_read_from_any_step(block_size, window, start, epoch):
    url = f"memory://{uuid.uuid4().hex}/set"
    write_shard_set(open_storage(url), {"train": png_samples("train", 30, size=2)}, num_shards=2)
    manifest, storage = load(url)
    table, split = ShardTable(storage, manifest.split("train")), manifest.split("train")
    order = order_of(split, block_size=block_size, window=window)
    reads = BlockSampleReader(order, table, RemoteReader(table, 2), 1 << 20)
    start = min(start, order.num_batches)
    found = drain(reads, table, order, epoch=epoch, start=start)
    reads._close_passed(epoch + 1, 0)
    assert reads.held_bytes == 0
    reads.close()
    wanted = {int(id_) for step in range(start, order.num_batches) for id_ in order.batch(epoch, step).ids}
    assert set(found) == wanted


def test_an_epoch_reads_little_more_than_what_is_stored(watched):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    drain(reads, table, order)
    first = sum(address.stop - address.start for address in addresses_of(table, order, order.batch(0, 0).ids))
    stored = sum(shard.num_bytes for shard in split.shards)
    assert reads.num_bytes_read <= stored + first
    reads.close()


def test_before_a_readers_first_batch_only_its_own_samples_and_the_indexes_of_their_shards_are_read(watched):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    slots = order.rank_slots(0, 0, 0, 3)
    addresses = addresses_of(table, order, slots.ids)
    tickets = reads.tickets(0, slots, addresses)
    assert len(list(tickets.contents(0, len(slots.ids)))) == len(slots.ids)
    touched = {address.shard for address in addresses}
    assert 0 < len(touched) < len(split.shards)
    assert table.num_bytes_read == sum(split.shards[shard].index.num_bytes for shard in touched)
    assert reads.num_bytes_read == sum(address.stop - address.start for address in addresses)
    reads.close()


def test_what_blocks_hold_is_counted_against_the_budget(watched):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1)
    assert reads.has_room()
    slots = order.batch(0, 0)
    tickets = reads.tickets(0, slots, addresses_of(table, order, slots.ids))
    assert not reads.has_room()
    assert len(list(tickets.contents(0, len(slots.ids)))) == len(slots.ids)
    assert reads.has_room()
    reads.close()


def test_reads_are_pinned_to_the_generation_that_was_checked(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    reader = RemoteReader(table)
    before = reader.submit(0, 0, 100).result()
    assert storage.reads[-1][3] == storage.stat(split.shards[0].path).generation
    put(storage.inner, split.shards[0].path, storage.inner.read(split.shards[0].path)[:-1] + b"x")
    with pytest.raises(DamagedShard, match=r"train-000000.tar: crc32c is .*, expected"):
        reader.submit(0, 0, 100).result()
    assert len(before) == 100
    reader.close()


def test_a_shard_that_is_written_again_with_its_own_bytes_is_read_on(watched):
    storage, split = watched
    reader, path = RemoteReader(ShardTable(storage, split)), split.shards[0].path
    before = reader.submit(0, 0, 100).result()
    put(storage.inner, path, storage.inner.read(path))
    for _ in range(2):
        assert reader.submit(0, 0, 100).result() == before
    assert storage.looks == [path] * 2
    assert storage.reads[-1][3] == storage.inner.stat(path).generation
    reader.close()


def test_a_shard_that_goes_while_it_is_read_is_damage(watched):
    storage, split = watched
    reader = RemoteReader(ShardTable(storage, split))
    reader.submit(0, 0, 100).result()
    storage.inner.delete(split.shards[0].path)
    with pytest.raises(DamagedShard, match=r"train-000000.tar: the shard can't be opened \(nothing is stored there\)"):
        reader.submit(0, 0, 100).result()
    reader.close()


def test_a_shard_that_the_system_does_not_open_is_no_damage(tmp_path):
    write_shard_set(open_storage(str(tmp_path)), {"train": png_samples("train", 6, size=8)}, num_shards=3)
    manifest, storage = load(str(tmp_path))
    table = ShardTable(storage, manifest.split("train"))
    tickets = LocalSampleReader(table).alone(table.addresses(np.array([1]), np.array([0])))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (tmp_path / "manifest.json").open() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno(), hard))
        try:
            with pytest.raises(StorageError, match=r"train-000001.tar: too many open files; raise the limit") as raised:
                tickets.take(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(raised.value, DamagedShard)
    assert tickets.take(0)


@pytest.mark.parametrize("block_size", [2, 5, 20])
def test_steps_may_be_asked_for_again(watched, block_size):
    storage, split = watched
    table = ShardTable(storage, split)
    order = order_of(split, block_size=block_size, window=2, num_lanes=1)
    reads, found = BlockSampleReader(order, table, RemoteReader(table), 1 << 20), []
    for step in (0, 1, 2, 1, 1, 0, 2):
        slots = order.batch(0, step)
        tickets = reads.tickets(0, slots, addresses_of(table, order, slots.ids))
        found.append([tickets.addresses.label(number) for number in range(len(slots.ids))])
        read = threading.Thread(target=lambda tickets=tickets: list(tickets.contents(0, 6)), daemon=True)
        read.start()
        read.join(300)
        assert not read.is_alive()
    assert found[1] == found[3] == found[4]
    reads.close()


def test_samples_that_are_named_one_after_the_other_need_their_index_once(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    found = table.addresses(np.array([1] * 20), np.arange(20))
    before = len(storage.reads)
    names = [table.named(address) for address in found]
    assert (len(set(names)), len(storage.reads) - before) == (20, 1)


def test_a_sample_whose_index_is_gone_is_named_by_its_number(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    [address] = table.addresses(np.array([1]), np.array([4]))
    storage.inner.delete(split.shards[1].index.path)
    assert table.named(address).endswith(f"train-000001.tar: sample number 4 at byte {address.start}")


def test_another_object_under_a_shards_name_is_refused_before_it_is_read(watched):
    storage, split = watched
    whole = storage.inner.read(split.shards[0].path)
    put(storage.inner, split.shards[0].path, whole[:-1] + b"x")
    reader = RemoteReader(ShardTable(storage, split))
    with pytest.raises(DamagedShard, match=r"train-000000.tar: crc32c is .*, expected"):
        reader.submit(0, 0, 100).result()
    reader.close()


def test_reads_that_begin_together_look_at_their_shard_once(watched):
    storage, split = watched
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()
    storage.before_look = lambda number: held.wait(600)
    reads = [reader.submit(0, 0, 100) for _ in range(20)]
    held.set()
    assert {read.result(timeout=300) for read in reads} == {storage.inner.read(split.shards[0].path, 0, 100)}
    assert storage.looks == [split.shards[0].path]
    reader.close()


def test_a_look_that_fails_is_raised_to_all_that_wait_and_the_next_read_looks_again(watched):
    storage, split = watched
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()

    def fail(number):
        held.wait(600)
        raise TransientError("no answer")

    storage.before_look = fail
    reads = [reader.submit(0, 0, 100) for _ in range(20)]
    held.set()
    assert {str(read.exception(timeout=300)) for read in reads} == {"no answer"}
    storage.before_look = lambda number: None
    assert len(reader.submit(0, 0, 100).result(timeout=300)) == 100
    reader.close()


def test_a_hedge_does_not_wait_for_a_look_that_stalls(watched):
    storage, split = watched
    reader, held = RemoteReader(ShardTable(storage, split), 8), threading.Event()
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    storage.before_look = lambda number: held.wait(600) if number == 2 else None
    assert len(reader.submit(1, 0, 1000).result(timeout=300)) == 1000
    assert [name == split.shards[1].path for name in storage.looks] == [False, True, True]
    held.set()
    reader.close()


def test_what_a_part_of_a_step_took_from_its_blocks_counts_and_the_rest_does_not(watched):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split)
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    slots = order.batch(0, 0)
    addresses = addresses_of(table, order, slots.ids)
    sizes = [address.stop - address.start for address in addresses]
    tickets = reads.tickets(0, slots, addresses)
    assert list(tickets.contents(2, 2)) == []
    assert reads.held_bytes == sum(sizes)
    part = tickets.contents(0, 4)
    next(part), next(part)
    part.close()
    assert reads.held_bytes == sum(sizes[2:])
    reads.close()


def test_an_error_of_storage_is_raised_with_shard_key_and_offset(watched):
    storage, split = watched
    table, order = ShardTable(storage, split), order_of(split)

    def fail(number, name):
        if name.endswith(".tar"):
            raise TransientError("no answer after 5 tries")

    storage.before = fail
    reads = BlockSampleReader(order, table, RemoteReader(table), 1 << 20)
    with pytest.raises(TransientError, match=r"train-00000\d.tar: sample 'train-0000\d\d' at byte \d+: no answer"):
        drain(reads, table, order)
    reads.close()


def test_a_late_read_is_asked_for_again_and_the_first_answer_counts(watched):
    storage, split = watched
    table = ShardTable(storage, split)
    reader = RemoteReader(table, 8)
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    held = threading.Event()
    asked = len(storage.reads)

    def hold(number, name):
        if number == asked:
            held.wait(600)

    storage.before = hold
    assert len(reader.submit(0, 0, 1000).result(timeout=300)) == 1000
    assert reader.num_hedges.total() >= 1
    held.set()
    reader.close()


def test_a_read_fails_only_when_its_hedge_failed_too(watched):
    storage, split = watched
    reader = RemoteReader(ShardTable(storage, split), 8)
    wait([reader.submit(0, 0, 1000) for _ in range(100)])
    asked, held = len(storage.reads), threading.Event()

    def break_first(number, name):
        if number == asked:
            held.wait(600)
            raise TransientError("reset")
        held.set()
        time.sleep(0.05)

    storage.before = break_first
    assert len(reader.submit(0, 0, 1000).result(timeout=300)) == 1000
    reader.close()


def test_closing_cancels_what_has_not_been_read(watched):
    storage, split = watched
    reader = RemoteReader(ShardTable(storage, split), 1)
    reader.submit(0, 0, 10).result()
    held = threading.Event()
    storage.before = lambda number, name: held.wait(600)
    waiting = [reader.submit(0, 0, 10) for _ in range(5)]
    reader.close()
    assert all(isinstance(future.exception(timeout=300), CancelledError) for future in waiting)
    held.set()


def test_local_files_are_opened_once_and_not_too_many_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("shardset.read.fetch.MAX_OPEN_FILES", 2)
    write_shard_set(open_storage(str(tmp_path)), {"train": png_samples("train", 60, size=8)}, num_shards=6)
    manifest, storage = load(str(tmp_path))
    split = manifest.split("train")
    table, order = ShardTable(storage, split), order_of(split)
    reads = open_sample_reader(order, table, 1 << 20)
    assert isinstance(reads, LocalSampleReader)
    found = {}
    for step in range(order.num_batches):
        slots = order.batch(0, step)
        tickets = reads.tickets(0, slots, addresses_of(table, order, slots.ids))
        found |= {id_: tickets.take(number) for number, id_ in enumerate(slots.ids.tolist())}
        assert len(reads.files) <= 2
    assert sorted(found) == list(range(60))
    reads.close()
