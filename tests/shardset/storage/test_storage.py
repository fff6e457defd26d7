"""What every storage promises."""

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import ABSENT
from shardset.storage.gcs import GcsStorage
from shardset.storage.local import LocalStorage
from shardset.storage.open import open_file, open_storage
from tests.makers.objects import BIG, HELLO, limited, names, put, write_and_raise

ODD_NAMES = ["%41", "a b", "a#b?c&d=e", "a+b", "a-b", "a.b", "a/b", "a0", "a\\b", "b/c/d", "é/ß", "日本", "😀", "~"]


def test_a_range_is_read_exactly_and_comes_with_the_facts_about_its_object(storage):
    put(storage, "train/a.tar")
    for start, stop in [(0, None), (0, 11), (0, 0), (3, 5), (5, None), (10, 11), (11, 11), (11, None), (4, 4)]:
        assert storage.read("train/a.tar", start, stop) == HELLO[start:stop]
        assert storage.read_with_stat("train/a.tar", start, stop) == (HELLO[start:stop], storage.stat("train/a.tar"))


def test_an_empty_object_is_an_object(storage):
    put(storage, "empty", b"")
    assert storage.read("empty") == b""
    assert storage.read_with_stat("empty") == (b"", storage.stat("empty"))
    assert storage.stat("empty").num_bytes == 0
    assert names(storage) == ["empty"]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (5, 100), (12, None), (12, 12), (20, 30), (5, 3)])
def test_a_range_past_the_end_is_an_error_that_says_so(storage, start, stop):
    put(storage, "a")
    with pytest.raises(StorageError, match=r"a.*bytes \d+ to \d+ were asked for but it holds 11") as caught:
        storage.read("a", start, stop)
    assert not isinstance(caught.value, TransientError)


def test_bytes_come_back_from_any_number_of_writes_and_not_before_the_end(storage):
    with storage.writer("parts") as writer:
        for part in (b"", b"he", memoryview(b"llo"), memoryview(bytearray(b" world"))):
            writer.write(part)
        assert names(storage) == []
    assert names(storage) == ["parts"]
    assert storage.read("parts") == HELLO


def test_stat_tells_size_and_checksum_without_reading(storage):
    put(storage, "a")
    found = storage.stat("a")
    assert (found.name, found.num_bytes) == ("a", 11)
    assert found.crc32c == (None if isinstance(storage, LocalStorage) else "yZRlqg==")
    assert found.generation != ABSENT
    assert list(storage.list()) == [found]


def test_odd_names_are_names_and_are_listed_in_byte_order_and_by_prefix(storage):
    assert names(storage) == names(storage, "train/") == []
    for name in reversed(ODD_NAMES):
        put(storage, name, name.encode())
    storage.sweep()
    for prefix in ["", "a", "a/", "a ", "b/c", "b/c/", "b/c/d", "b/c/d/", "é", "x", "x/y", "😀", "."]:
        assert names(storage, prefix) == [name for name in sorted(ODD_NAMES, key=str.encode) if name.startswith(prefix)]
    for name in ODD_NAMES:
        assert storage.read(name) == name.encode()
        assert storage.stat(name).name == name
        storage.delete(name)
    assert names(storage) == []


def test_many_objects_are_all_listed(storage):
    storage = limited(storage, page_size=10) if isinstance(storage, GcsStorage) else storage
    wanted = [f"d{number % 7}/{number:05d}" for number in range(101)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(storage, name, b"x"), wanted))
    assert names(storage) == sorted(wanted)


@pytest.mark.parametrize("action", ["read", "read_range", "read_nothing", "read_with_stat", "stat"])
@pytest.mark.parametrize("name", ["absent", "train", "train/a/b"])
def test_what_is_not_stored_is_not_found(storage, action, name):
    put(storage, "train/a")
    actions = {
        "read": storage.read,
        "read_range": lambda name: storage.read(name, 2, 5),
        "read_nothing": lambda name: storage.read(name, 2, 2),
        "read_with_stat": lambda name: storage.read_with_stat(name, 2, 5),
        "stat": storage.stat,
    }
    with pytest.raises(NotFound, match=name):
        actions[action](name)


def test_only_the_generation_that_was_seen_is_deleted(storage):
    put(storage, "a", b"old")
    seen = storage.stat("a").generation
    put(storage, "a", b"newer")
    storage.delete("a", generation=seen)
    assert storage.read("a") == b"newer"
    storage.delete("a", generation=storage.stat("a").generation)
    assert list(storage.list()) == []
    storage.delete("a", generation=seen)
    put(storage, "train/a")
    for name in ("absent", "train/a/b", "train"):
        storage.delete(name)
    assert names(storage) == ["train/a"]


def test_only_if_absent_refuses_to_replace(storage):
    put(storage, "a", if_generation=ABSENT)
    before = storage.stat("a")
    put(storage, "a", if_generation=ABSENT)  # by another writer of the same bytes
    for data in (b"HELLO WORLD", b"longer than before"):
        with pytest.raises(PreconditionFailed, match="a: a different object exists"):
            put(storage, "a", data, if_generation=ABSENT)
    assert storage.stat("a") == before
    assert storage.read("a") == HELLO
    assert names(storage) == ["a"]


def test_a_known_generation_can_be_replaced_once(storage):
    put(storage, "a")
    first = storage.stat("a").generation
    put(storage, "a", b"second", if_generation=first)
    assert storage.read("a") == b"second"
    with pytest.raises(PreconditionFailed):
        put(storage, "a", b"third!", if_generation=first)
    assert storage.read("a") == b"second"
    storage.delete("a")
    with pytest.raises(PreconditionFailed, match="it no longer exists"):
        put(storage, "a", if_generation=first)
    assert names(storage) == []


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_an_exception_publishes_nothing(storage, options):
    with pytest.raises(KeyError), storage.writer("train/a", **options) as writer:
        write_and_raise(writer, BIG, KeyError)
    assert names(storage) == []
    put(storage, "a")
    before = storage.stat("a")
    with pytest.raises(KeyboardInterrupt), storage.writer("a", **options) as writer:
        write_and_raise(writer, b"half of the n", KeyboardInterrupt)
    assert storage.stat("a") == before
    assert storage.read("a") == HELLO


@pytest.mark.parametrize(("start", "stop"), [(0, None), (2, 5), (4, 4)])
def test_a_changed_generation_is_seen(storage, start, stop):
    put(storage, "a")
    generation = storage.stat("a").generation
    assert storage.read("a", start, stop, generation=generation) == HELLO[start:stop]
    put(storage, "a", b"HELLO WORLD")
    with pytest.raises((PreconditionFailed, NotFound)):
        storage.read("a", start, stop, generation=generation)
    assert storage.read("a", start, stop) == b"HELLO WORLD"[start:stop]
    storage.delete("a")
    with pytest.raises((PreconditionFailed, NotFound)):
        storage.read("a", start, stop, generation=generation)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "a/../b", "a/..", "./a", "a//b", "a/", ".", "..", "a\0b"])
def test_no_name_leaves_the_folder(storage, name):
    for action in (storage.read, storage.stat, storage.delete, storage.writer):
        with pytest.raises(ConfigError, match="absolute, empty or climbs"):
            action(name)
    if name not in ("", ".", "..", "a/.."):  # which may begin a name
        with pytest.raises(ConfigError, match="absolute, empty or climbs"):
            storage.list(f"{name}/")


def test_its_url_opens_it_again(storage):
    put(storage, "train/a")
    assert open_storage(storage.url) == storage
    assert open_storage(storage.url + "/") == storage
    assert names(open_storage(f"{storage.url}/train")) == ["a"]
    folder, name = open_file(f"{storage.url}/train/a")
    assert folder.read(name) == HELLO


def test_a_pickled_copy_reads_the_same_bytes(storage):
    put(storage, "a")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy == storage
    assert copy.read("a", 2, 5) == HELLO[2:5]


def test_a_forked_process_reads_while_its_parent_does(storage):
    put(storage, "a", BIG)
    assert storage.read("a", 1, 100) == BIG[1:100]
    results = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: results.put([storage.read("a", start, start + 50_000) for start in range(0, 1_000_000, 50_000)])
    )
    child.start()
    ours = [storage.read("a", start, start + 50_000) for start in range(0, 1_000_000, 50_000)]
    assert results.get() == ours == [BIG[start : start + 50_000] for start in range(0, 1_000_000, 50_000)]
    child.join()


def test_many_threads_read_their_own_ranges(storage):
    put(storage, "a", BIG)
    starts = [number * 7919 % 900_000 for number in range(320)]
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda start: storage.read("a", start, start + 1000), starts))
    assert found == [BIG[start : start + 1000] for start in starts]


@pytest.mark.parametrize("same", [True, False])
def test_of_many_writers_at_once_one_wins(storage, same):
    barrier = threading.Barrier(8)

    def write(number):
        data = b"%d" % (0 if same else number) * 1000
        try:
            with storage.writer("a", if_generation=ABSENT) as writer:
                writer.write(data)
                barrier.wait()
        except PreconditionFailed:
            return None
        return data

    with ThreadPoolExecutor(8) as pool:
        winners = [data for data in pool.map(write, range(8)) if data is not None]
    assert winners == [storage.read("a")] * (8 if same else 1)
