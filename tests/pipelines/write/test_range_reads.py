"""Many readers of one object: few reads at first, more after each, fewer when the server refuses."""

import uuid
from dataclasses import replace
from itertools import pairwise

import pytest

from pipelines.sources.base import UNREAD, Extent
from pipelines.write.range_reads import FIRST_IN_FLIGHT, MOST_IN_FLIGHT, Window, fetch
from shardset.errors import ChangedInput
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media
from tests.makers.doors import changing

NUM_READS = 48
NOWHERE = MemoryStorage("no-spool-is-read")


@pytest.fixture
def archive(gcs_root):
    """A folder with one object, whose byte number i is i mod 251."""
    storage = open_storage(gcs_root)
    with storage.writer("all.tar") as out:
        out.write(bytes(i % 251 for i in range(NUM_READS * 10)))
    return replace(storage, retry=RetryPolicy(first_pause_s=0.01))


class NotingWindow(Window):
    """Remembers its size after each refusal."""

    def __init__(self):
        super().__init__()
        self.shrunk_to = []

    def shrink(self):
        super().shrink()
        self.shrunk_to.append(self.size)


def extents(archive):
    generation = archive.stat("all.tar").generation
    return [[Extent("all.tar", generation, 10 * i, 10)] for i in range(NUM_READS)]


def contents():
    return [[bytes(j % 251 for j in range(10 * i, 10 * i + 10))] for i in range(NUM_READS)]


def test_the_first_reads_are_few_and_each_that_is_done_allows_one_more():
    window = Window()
    sizes = [window.size]
    for _ in range(MOST_IN_FLIGHT):
        window.grow()
        sizes.append(window.size)
    assert sizes[0] == FIRST_IN_FLIGHT
    assert sizes == sorted(sizes)
    assert sizes[-1] == MOST_IN_FLIGHT


def test_a_window_never_closes():
    window = Window()
    for _ in range(10):
        window.shrink()
    assert window.size == 1


@pytest.mark.gcs
def test_only_the_reads_in_the_window_are_asked_for(archive):
    asked = []
    groups = (asked.append(group) or group for group in extents(archive))
    contents_in_order = fetch(groups, archive, NOWHERE, Window())
    first = next(contents_in_order)
    assert len(asked) == FIRST_IN_FLIGHT
    assert [first, *contents_in_order] == contents()


@pytest.mark.gcs
@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_halves_the_reads_on_their_way_and_loses_nothing(archive, gcs_emulator, monkeypatch, status):
    window = NotingWindow()
    assert list(fetch(extents(archive), archive, NOWHERE, window)) == contents()
    assert (window.size, window.shrunk_to) == (MOST_IN_FLIGHT, [])
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = in_turn(Fault("status", status=status), Fault("status", status=status), when=is_media)
        assert list(fetch(extents(archive), archive, NOWHERE, window)) == contents()
    assert window.shrunk_to[0] == MOST_IN_FLIGHT // 2
    assert len(window.shrunk_to) == 2


@pytest.mark.parametrize("starts", [[3], [0, 3]], ids=["alone", "with a neighbour"])
def test_bytes_without_a_checksum_are_read_again_where_they_come_short(starts):
    storage, key = MemoryStorage(uuid.uuid4().hex), uuid.uuid4().hex
    with storage.writer("a.jpg") as out:
        out.write(b"0123456789")
    generation = storage.stat("a.jpg").generation
    group = [Extent("a.jpg", generation, start, stop - start) for start, stop in pairwise([*starts, 10])]
    assert {extent.crc32c for extent in group} == {UNREAD}
    cuts = iter([1])
    once_short = changing(storage, key, lambda _, data: data[: len(data) - next(cuts, 0)])
    assert list(fetch([group], once_short, NOWHERE)) == list(fetch([group], storage, NOWHERE))
    always_short = changing(storage, key, lambda _, data: data[:-1])
    with pytest.raises(ChangedInput, match=r"a\.jpg, 7 bytes at 3: its bytes changed .*6 bytes, read twice"):
        list(fetch([group], always_short, NOWHERE))
