"""Many readers of one object: few reads at first, more after each, fewer when the server refuses."""

from dataclasses import replace

import pytest

from pipelines.sources.base import Extent
from pipelines.write.range_reads import FIRST_IN_FLIGHT, MOST_IN_FLIGHT, Window, fetch
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media

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
