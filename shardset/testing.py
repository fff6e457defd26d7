"""Test classes for whoever implements a protocol of shardset; nothing else here imports them."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ClassVar

import pytest

from shardset.checksum import crc32c_of, crc32c_text
from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError, TransientError
from shardset.storage.base import ABSENT, Storage

HELLO = b"hello world"
_RANGES = [(0, None), (0, 11), (0, 0), (3, 5), (5, None), (11, 11), (11, None)]
_PREFIXES = ["", "a", "a/", "a ", "b/c", "b/c/", "b/c/d", "b/c/d/", "é", "x", "x/y", "😀", "."]


def put(
    storage: Storage, name: str, data: bytes = HELLO, *, if_generation: str | None = None
) -> None:
    storage.write(name, data, if_generation=if_generation)


def names(storage: Storage, prefix: str = "") -> list[str]:
    return [stat.name for stat in storage.list(prefix)]


class ReadOnlyStorageTests:
    """What storages promise readers.

    `origin`, a fixture, stores what `storage` reads, where that can't write.
    """

    odd_names: ClassVar = [
        "%41",
        "a b",
        "a#b?c&d=e",
        "a+b",
        "a-b",
        "a.b",
        "a/b",
        "a0",
        "a\\b",
        "b/c/d",
        "é/ß",
        "日本",
        "😀",
        "~",
    ]
    """In no order; a storage that refuses one of them leaves it out."""

    @pytest.fixture
    def origin(self, storage: Storage) -> Storage:
        return storage

    def test_ranges_are_exact_and_come_with_the_facts(
        self, storage: Storage, origin: Storage
    ) -> None:
        for name, data, ranges in [
            ("train/a.tar", HELLO, _RANGES),
            ("empty", b"", [(0, None), (0, 0)]),
        ]:
            put(origin, name, data)
            stat, crc32c = storage.stat(name), crc32c_text(crc32c_of(data))
            assert (stat.name, stat.num_bytes, stat.crc32c or crc32c) == (
                name,
                len(data),
                crc32c,
            )
            assert stat.generation != ABSENT
            for start, stop in ranges:
                assert storage.read(name, start, stop) == data[start:stop]
                assert storage.read_with_stat(name, start, stop) == (data[start:stop], stat)

    def test_a_range_past_the_end_is_refused(self, storage: Storage, origin: Storage) -> None:
        put(origin, "a")
        for start, stop in [(0, 12), (12, None), (12, 12), (20, 30), (5, 3)]:
            with pytest.raises(
                StorageError, match=r"a.*bytes \d+ to \d+ were asked for but it holds 11"
            ) as caught:
                storage.read("a", start, stop)
            assert not isinstance(caught.value, TransientError)  # asking again does not help

    def test_what_is_not_stored_is_not_found(self, storage: Storage, origin: Storage) -> None:
        put(origin, "train/a")
        for name in ("absent", "train", "train/a/b"):
            for call in (storage.stat, storage.read, storage.read_with_stat):
                with pytest.raises(NotFound, match=name):
                    call(name)

    def test_a_changed_generation_is_seen(self, storage: Storage, origin: Storage) -> None:
        put(origin, "a")
        generation = storage.stat("a").generation
        assert storage.read("a", 2, 5, generation=generation) == HELLO[2:5]
        put(origin, "a", b"HELLO WORLD")
        for start, stop in [(0, None), (2, 5), (4, 4)]:
            with pytest.raises((PreconditionFailed, NotFound)):
                storage.read("a", start, stop, generation=generation)

    def test_odd_names_are_names(self, storage: Storage, origin: Storage) -> None:
        for name in self.odd_names:
            put(origin, name, name.encode())
        assert [storage.read(name) for name in self.odd_names] == [
            name.encode() for name in self.odd_names
        ]

    @pytest.mark.parametrize(
        "name", ["", "/etc/passwd", "../a", "a/../b", "a/..", "./a", "a//b", "a/", ".", "a\0b"]
    )
    def test_no_name_leaves_the_folder(self, storage: Storage, name: str) -> None:
        for call in (storage.read, storage.stat, storage.delete, storage.writer):
            with pytest.raises(ConfigError, match=r"absolute, empty or climbs|is only read"):
                call(name)

    def test_a_pickled_copy_reads_the_same_bytes(self, storage: Storage, origin: Storage) -> None:
        put(origin, "a")
        copy = pickle.loads(pickle.dumps(storage))
        assert (copy, copy.read("a", 2, 5)) == (storage, HELLO[2:5])


class StorageTests(ReadOnlyStorageTests):
    """The tests of a storage that can be read, listed and written; subclass it to test yours.

    It needs pytest and a fixture `storage`, which gives an empty storage for each test:

    ```py
    class TestMyStorage(StorageTests):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)
    ```
    """

    def test_bytes_appear_at_the_end_from_any_number_of_writes(self, storage: Storage) -> None:
        with storage.writer("parts") as writer:
            for part in (b"", b"he", memoryview(b"llo"), memoryview(bytearray(b" world"))):
                writer.write(part)
            assert names(storage) == []
        [listed], stat = storage.list(), storage.stat("parts")
        assert (listed.name, listed.num_bytes, listed.generation) == ("parts", 11, stat.generation)
        assert listed.crc32c in (None, stat.crc32c)
        assert storage.read("parts") == HELLO

    def test_names_are_listed_in_byte_order_and_by_prefix(self, storage: Storage) -> None:
        assert names(storage) == names(storage, "train/") == []
        for name in reversed(self.odd_names):
            put(storage, name)
        storage.sweep()
        for prefix in _PREFIXES:
            expected = sorted(
                (name for name in self.odd_names if name.startswith(prefix)), key=str.encode
            )
            assert names(storage, prefix) == expected

    def test_only_the_generation_that_was_seen_is_deleted(self, storage: Storage) -> None:
        put(storage, "a", b"old")
        seen = storage.stat("a").generation
        put(storage, "a", b"newer")
        storage.delete("a", generation=seen)
        assert storage.read("a") == b"newer"
        storage.delete("a", generation=storage.stat("a").generation)
        assert names(storage) == []
        storage.delete("a", generation=seen)

    def test_only_if_absent_refuses_to_replace(self, storage: Storage) -> None:
        put(storage, "a", if_generation=ABSENT)
        before = storage.stat("a")
        put(storage, "a", if_generation=ABSENT)  # by another writer of the same bytes
        for data in (b"HELLO WORLD", b"longer than before"):
            with pytest.raises(PreconditionFailed, match="a: a different object exists"):
                put(storage, "a", data, if_generation=ABSENT)
        assert storage.read_with_stat("a") == (HELLO, before)

    def test_a_known_generation_can_be_replaced_once(self, storage: Storage) -> None:
        put(storage, "a")
        first = storage.stat("a").generation
        put(storage, "a", b"second", if_generation=first)
        with pytest.raises(PreconditionFailed):
            put(storage, "a", b"third!", if_generation=first)
        assert storage.read("a") == b"second"
        storage.delete("a")
        with pytest.raises(PreconditionFailed, match="it no longer exists"):
            put(storage, "a", if_generation=first)

    @pytest.mark.parametrize("if_generation", [None, ABSENT])
    def test_an_exception_publishes_nothing(
        self, storage: Storage, if_generation: str | None
    ) -> None:
        def fail(name: str, error: type[BaseException]) -> None:
            with storage.writer(name, if_generation=if_generation) as writer:
                writer.write(bytes(1 << 20))
                raise error

        put(storage, "a")
        for name, error in [("train/b", KeyError), ("a", KeyboardInterrupt)]:
            with pytest.raises(error):
                fail(name, error)
        assert (names(storage), storage.read("a")) == (["a"], HELLO)

    def test_of_many_writers_at_once_one_wins(self, storage: Storage) -> None:
        barrier = threading.Barrier(8)

        def write(number: int) -> bytes:
            data = b"%d" % number * 1000
            with suppress(PreconditionFailed):
                with storage.writer("a", if_generation=ABSENT) as writer:
                    writer.write(data)
                    barrier.wait()
                return data
            return b""

        with ThreadPoolExecutor(8) as pool:
            assert [data for data in pool.map(write, range(8)) if data] == [storage.read("a")]
