"""What every storage promises, then what only one kind of it can break."""

import errno
import functools
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import TransportError
from google.auth.transport.requests import AuthorizedSession
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError, NotFound, PreconditionFailed, ShardsetError, StorageError, TransientError
from shardset.storage import gcs_http
from shardset.storage.base import ABSENT
from shardset.storage.gcs import GcsLimits, GcsStorage, bucket_location
from shardset.storage.gcs_upload import Body
from shardset.storage.local import LocalStorage
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_file, open_storage
from shardset.storage.retry import RetryPolicy, while_someone_waits
from tests.faulty_proxy import Fault, FaultyProxy, in_turn, is_media, is_upload

HELLO = b"hello world"
BIG = bytes(range(256)) * 4096  # 1 MiB
ODD_NAMES = [
    "%41",
    "a b",
    "a#b?c&d=e",
    "a+b",
    "a-b",
    "a.b",
    "a/b",
    "a0",
    "ab",
    "a\\b",
    "b/c/d",
    "é/ß",
    "日本",
    "😀",
    "~",
]


def put(storage, name, data=HELLO, **options):
    with storage.writer(name, **options) as writer:
        writer.write(data)


def limited(storage, **limits):
    """The same `gs://` folder with other limits."""
    return replace(storage, limits=GcsLimits(**limits))


def write_and_raise(writer, data, error):
    writer.write(data)
    raise error


def names(storage, prefix=""):
    return [found.name for found in storage.list(prefix)]


# -- every storage ----------------------------------------------------------------------------------------------


def test_a_sweep_keeps_every_object(storage):
    put(storage, "a")
    put(storage, "train/b")
    storage.sweep()
    assert names(storage) == ["a", "train/b"]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, None), (0, 11), (0, 0), (3, 5), (5, None), (10, 11), (11, 11), (11, None), (4, 4)]
)
def test_a_range_is_read_exactly(storage, start, stop):
    put(storage, "train/a.tar")
    assert storage.read("train/a.tar", start, stop) == HELLO[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (5, 100), (12, None), (12, 12), (20, 30), (5, 3)])
def test_a_range_past_the_end_is_an_error_that_says_so(storage, start, stop):
    put(storage, "a")
    with pytest.raises(StorageError, match=r"a.*bytes \d+ to \d+ were asked for but it holds 11") as caught:
        storage.read("a", start, stop)
    assert not isinstance(caught.value, TransientError)


def test_bytes_come_back_from_any_number_of_writes(storage):
    with storage.writer("parts") as writer:
        for part in (b"", b"he", memoryview(b"llo"), memoryview(bytearray(b" world"))):
            writer.write(part)
    assert storage.read("parts") == HELLO


def test_an_empty_object_is_an_object(storage):
    put(storage, "empty", b"")
    assert storage.read("empty") == b""
    assert storage.stat("empty").num_bytes == 0
    assert names(storage) == ["empty"]


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 11), (3, 7), (4, None), (5, 5)])
def test_a_range_comes_with_the_facts_about_its_object(storage, start, stop):
    put(storage, "a", HELLO)
    assert storage.read_with_stat("a", start, stop) == (HELLO[start:stop], storage.stat("a"))
    put(storage, "empty", b"")
    assert storage.read_with_stat("empty") == (b"", storage.stat("empty"))
    with pytest.raises(NotFound, match="nothing is stored there"):
        storage.read_with_stat("b", start, stop)


def test_stat_tells_size_and_checksum_without_reading(storage):
    put(storage, "a")
    found = storage.stat("a")
    assert (found.name, found.num_bytes) == ("a", 11)
    assert found.crc32c == (None if isinstance(storage, LocalStorage) else "yZRlqg==")
    assert found.generation != ABSENT
    assert list(storage.list()) == [found]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_names(storage, name):
    put(storage, name)
    assert storage.read(name) == HELLO
    assert storage.stat(name).name == name
    storage.delete(name)
    assert names(storage) == []


def test_objects_are_listed_in_byte_order(storage):
    for name in reversed(ODD_NAMES):
        put(storage, name, b"")
    assert names(storage) == sorted(ODD_NAMES, key=str.encode)


@pytest.mark.parametrize("prefix", ["a", "a/", "a ", "b/c", "b/c/", "b/c/d", "b/c/d/", "é", "x", "x/y", "😀", "."])
def test_a_prefix_selects_by_name(storage, prefix):
    for name in ODD_NAMES:
        put(storage, name, b"")
    expected = [name for name in sorted(ODD_NAMES, key=str.encode) if name.startswith(prefix)]
    assert names(storage, prefix) == expected


def test_many_objects_are_all_listed(storage):
    storage = limited(storage, page_size=10) if isinstance(storage, GcsStorage) else storage
    wanted = [f"d{number % 7}/{number:05d}" for number in range(101)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(storage, name, b"x"), wanted))
    assert names(storage) == sorted(wanted)


def test_a_folder_that_does_not_exist_lists_nothing(storage):
    assert names(storage) == []
    assert names(storage, "train/") == []


@pytest.mark.parametrize("action", ["read", "read_range", "read_nothing", "stat"])
@pytest.mark.parametrize("name", ["absent", "train", "train/a/b"])
def test_what_is_not_stored_is_not_found(storage, action, name):
    put(storage, "train/a")
    actions = {
        "read": storage.read,
        "read_range": lambda name: storage.read(name, 2, 5),
        "read_nothing": lambda name: storage.read(name, 2, 2),
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


def test_deleting_what_is_not_there_is_no_error(storage):
    put(storage, "train/a")
    storage.delete("absent")
    storage.delete("train/a/b")
    storage.delete("train")
    assert names(storage) == ["train/a"]


def test_an_object_can_be_replaced(storage):
    put(storage, "a")
    before = storage.stat("a")
    put(storage, "a", b"other")
    assert storage.read("a") == b"other"
    assert storage.stat("a").generation != before.generation


def test_only_if_absent_refuses_to_replace(storage):
    put(storage, "a", if_generation=ABSENT)
    with pytest.raises(PreconditionFailed, match="a: something else stands there"):
        put(storage, "a", b"HELLO WORLD", if_generation=ABSENT)
    with pytest.raises(PreconditionFailed, match="a: something else stands there"):
        put(storage, "a", b"longer than before", if_generation=ABSENT)
    assert storage.read("a") == HELLO
    assert names(storage) == ["a"]


def test_a_twin_that_writes_the_same_bytes_succeeds(storage):
    put(storage, "a", if_generation=ABSENT)
    before = storage.stat("a")
    put(storage, "a", if_generation=ABSENT)
    assert storage.stat("a") == before


def test_a_known_generation_can_be_replaced_once(storage):
    put(storage, "a")
    first = storage.stat("a").generation
    put(storage, "a", b"second", if_generation=first)
    assert storage.read("a") == b"second"
    with pytest.raises(PreconditionFailed):
        put(storage, "a", b"third!", if_generation=first)
    assert storage.read("a") == b"second"


def test_replacing_what_is_gone_is_refused(storage):
    put(storage, "a")
    first = storage.stat("a").generation
    storage.delete("a")
    with pytest.raises(PreconditionFailed, match="nothing stands there"):
        put(storage, "a", if_generation=first)
    assert names(storage) == []


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_an_exception_publishes_nothing(storage, options):
    with pytest.raises(KeyError), storage.writer("train/a", **options) as writer:
        write_and_raise(writer, BIG, KeyError)
    assert names(storage) == []
    with pytest.raises(NotFound):
        storage.stat("train/a")


def test_an_exception_leaves_the_old_object(storage):
    put(storage, "a")
    before = storage.stat("a")
    with pytest.raises(KeyboardInterrupt), storage.writer("a") as writer:
        write_and_raise(writer, b"half of the n", KeyboardInterrupt)
    assert storage.stat("a") == before
    assert storage.read("a") == HELLO


def test_nothing_is_visible_before_the_end(storage):
    with storage.writer("a") as writer:
        writer.write(BIG)
        assert names(storage) == []
    assert names(storage) == ["a"]


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


@pytest.mark.parametrize("prefix", ["/", "/etc", "../", "a/../", "a//", "./a"])
def test_no_prefix_leaves_the_folder(storage, prefix):
    with pytest.raises(ConfigError, match="absolute, empty or climbs"):
        storage.list(prefix)


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


# -- what a URL may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s3://bucket/x", "http://host/x", "file:///tmp/x", "gcs://bucket/x", "://x"])
def test_an_unknown_scheme_is_refused_by_name(url):
    scheme = url.partition(":")[0]
    with pytest.raises(ConfigError, match=f"'{scheme}' is not known; use a local path, gs://bucket/prefix or memory"):
        open_storage(url)


@pytest.mark.parametrize("url", ["gs:/bucket/x", "gs:bucket", "memory:/name/x"])
def test_an_address_without_its_slashes_is_not_taken_for_a_folder_here(url):
    with pytest.raises(ConfigError, match=f"{url}: .* two slashes.*{url.partition(':')[0]}://"):
        open_storage(url)
    assert open_storage(f"./{url}").url.endswith(url)


def test_a_relative_folder_below_one_that_is_gone_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"^shards: the folder in which the command was started is gone"):
        open_storage("shards")
    assert open_storage(str(tmp_path)).url == str(tmp_path)


@pytest.mark.parametrize("url", ["~", "~/shards"])
def test_a_home_folder_that_no_shell_put_in_is_not_made_here(url):
    with pytest.raises(ConfigError, match=f"^{url}: ~ is not your home folder here"):
        open_storage(url)
    assert open_storage(f"./{url}").url.endswith(url)
    assert open_storage("~old/shards").url.endswith("~old/shards")


@pytest.mark.parametrize("url", ["", "gs://", "gs:///x", "memory://", "gs://bucket/../x", "memory://m//x", "gs://b//x"])
def test_a_url_that_names_no_folder_is_refused(url):
    with pytest.raises(ConfigError):
        open_storage(url)


@pytest.mark.parametrize("url", ["", "gs://bucket", "gs://bucket/", "memory://m", "folder/", "/", ".", "a/.", "/a/.."])
def test_a_url_that_names_no_file_is_refused(url):
    with pytest.raises(ConfigError, match=rf"^'{url}' names a folder, expected a file in it$"):
        open_file(url)


def test_a_relative_path_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage, name = open_file("manifest.json")
    deeper = open_storage("a/b")
    monkeypatch.chdir("/")
    put(storage, name)
    put(deeper, "c")
    assert (tmp_path / "manifest.json").read_bytes() == (tmp_path / "a/b/c").read_bytes() == HELLO


def test_the_root_folder_can_be_opened():
    assert open_file("/etc/hosts") == (LocalStorage("/etc"), "hosts")
    assert open_file("/hosts") == (LocalStorage("/"), "hosts")


def test_memories_of_different_names_are_apart():
    put(open_storage("memory://one/a"), "x")
    assert names(open_storage("memory://two/a")) == []
    assert names(MemoryStorage("one")) == ["a/x"]


# -- local disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    return open_storage(str(tmp_path / "disk"))


def all_files(folder):
    return sorted(os.path.relpath(path, folder) for path in Path(folder).rglob("*") if not path.is_dir())


def write_numbers(disk):
    os.makedirs(disk.root)
    for number in range(100):
        Path(disk.root, f"{number}").write_bytes(b"%03d" % number)


def test_a_replaced_file_is_not_read_as_the_old_one(disk):
    for number in range(30):
        put(disk, "a", b"%03d" % number)
        assert disk.read("a") == b"%03d" % number


@pytest.mark.parametrize("is_kept_open", [False, True])
@pytest.mark.parametrize("stop", [3, len(HELLO)])
def test_a_file_changed_in_place_is_another_generation(disk, stop, is_kept_open):
    put(disk, "a")
    generation = disk.stat("a").generation
    if is_kept_open:
        assert disk.read("a", 0, stop, generation=generation) == HELLO[:stop]
    os.truncate(os.path.join(disk.root, "a"), 5)
    with pytest.raises(PreconditionFailed, match="was replaced or changed"):
        disk.read("a", 0, stop, generation=generation)
    assert disk.read("a") == HELLO[:5]
    assert disk.read("a", generation=disk.stat("a").generation) == HELLO[:5]


def test_a_file_that_is_kept_open_and_removed_is_not_found(disk):
    put(disk, "a")
    generation = disk.stat("a").generation
    assert disk.read("a", generation=generation) == HELLO
    disk.delete("a")
    with pytest.raises(NotFound):
        disk.read("a", generation=generation)


def test_a_handle_that_fails_is_opened_again(disk):
    put(disk, "a")
    generation, other = disk.stat("a").generation, os.open(disk.root, os.O_RDONLY)
    disk.read("a", generation=generation)
    [kept] = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd) == os.path.join(disk.root, "a")]
    os.dup2(other, kept)
    os.close(other)
    with pytest.raises(StorageError):
        disk.read("a", generation=generation)
    assert disk.read("a", generation=generation) == HELLO


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing itself
        return ""


def test_more_files_can_be_read_than_are_kept_open(disk):
    write_numbers(disk)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(100):
        assert disk.read(f"{number}") == b"%03d" % number
    assert len(os.listdir("/proc/self/fd")) <= before + 64


def test_threads_can_read_while_open_files_are_dropped(disk):
    write_numbers(disk)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: disk.read(f"{number % 100}"), range(1000)))
    assert found == [b"%03d" % (number % 100) for number in range(1000)]


def test_a_writer_leaves_no_temporary(disk):
    put(disk, "train/a")
    put(disk, "train/a", if_generation=ABSENT)
    with pytest.raises(PreconditionFailed):
        put(disk, "train/a", b"other", if_generation=ABSENT)
    with pytest.raises(KeyError), disk.writer("train/b") as writer:
        write_and_raise(writer, BIG, KeyError)
    assert all_files(disk.root) == ["train/a"]


def test_a_killed_writer_leaves_nothing_that_is_listed(disk):
    def die():
        with disk.writer("train/a") as writer:
            writer.write(BIG * 3)
            os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()
    assert len(all_files(disk.root)) == 1
    assert names(disk) == names(disk, "train/") == names(disk, "train/.") == []
    disk.sweep()
    assert all_files(disk.root) == []


def test_a_sweep_leaves_what_is_being_written(disk):
    with disk.writer("train/a") as writer:
        writer.write(BIG)
        disk.sweep()
    assert disk.read("train/a") == BIG


def test_sweeping_all_the_time_disturbs_no_writer(disk):
    with ThreadPoolExecutor(5) as pool:
        writers = [pool.submit(put, disk, f"train/{number}", if_generation=ABSENT) for number in range(200)]
        while not all(writer.done() for writer in writers):
            disk.sweep()
        assert [writer.result() for writer in writers] == [None] * 200
    assert len(all_files(disk.root)) == len(names(disk)) == 200


def test_names_of_temporaries_are_not_for_objects(disk):
    with pytest.raises(ConfigError, match="kept for temporaries"):
        put(disk, "train/.shardset-tmp-1")


@contextmanager
def file_size_limit(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def little_room(folder):
    """256 KiB of room in `folder`, and what a writer says beyond: a small disk if we may mount one, else a limit."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        with file_size_limit(256 << 10):
            yield "larger than the system allows"
        return
    try:
        yield "the disk is full; free some space"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_said_to_be_one_and_nothing_is_left(disk, monkeypatch, code):
    def link(path: str, name: str) -> None:
        raise OSError(code, os.strerror(code), path, name)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match=r"train/a: the file system has no hard links.*; choose another folder"):
        put(disk, "train/a", if_generation=ABSENT)
    assert os.listdir(f"{disk.root}/train") == []


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, options):
    with little_room(tmp_path) as complaint:
        disk = open_storage(str(tmp_path))
        put(disk, "small")
        with pytest.raises(StorageError, match=f"{tmp_path}/train/a: .*{complaint}"):
            put(disk, "train/a", BIG, **options)
        assert all_files(tmp_path) == ["small"]


def test_a_file_larger_than_the_limit_is_said_and_leaves_nothing(disk):
    with file_size_limit(100_000), pytest.raises(StorageError, match="larger than the system allows"):
        put(disk, "a", BIG)
    assert all_files(disk.root) == []


def test_a_path_below_a_file_is_said(disk):
    put(disk, "a")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        put(disk, "a/b/c")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        names(open_storage(disk.root + "/a"))
    with pytest.raises(StorageError, match="a part of the path is a file"):
        names(open_storage(disk.root + "/a/b"))


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_an_object_in_a_folders_place_is_refused(disk, options):
    put(disk, "a/b")
    with pytest.raises(StorageError, match="a folder stands there"):
        put(disk, "a", **options)
    assert all_files(disk.root) == ["a/b"]


@pytest.mark.parametrize("through_link", [False, True])
def test_a_device_or_pipe_is_never_replaced(disk, through_link):
    os.makedirs(disk.root)
    os.mkfifo(f"{disk.root}/pipe")
    os.symlink("pipe", f"{disk.root}/link")
    name = "link" if through_link else "pipe"
    with pytest.raises(StorageError, match=f"{name}: a device, pipe or socket stands there, expected a file"):
        put(disk, name)
    assert stat.S_ISFIFO(os.stat(f"{disk.root}/{name}").st_mode)
    assert sorted(os.listdir(disk.root)) == ["link", "pipe"]


def test_a_name_too_long_is_said(disk):
    with pytest.raises(StorageError, match="name is too long"):
        put(disk, "x" * 300)


def give_up_root():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def in_child(prepare, action):
    """What `action` raises in a forked process, after `prepare()` there: (class name, text)."""

    def run(results):
        prepare()
        try:
            results.put(("nothing", repr(action())))
        except ShardsetError as error:
            results.put((type(error).__name__, str(error)))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=run, args=(results,))
    child.start()
    answer = results.get()
    child.join()
    return answer


@pytest.fixture
def closed():
    """A storage anybody may enter, with an unreadable folder, an unreadable file and nowhere to write."""
    with tempfile.TemporaryDirectory() as root:
        disk = open_storage(root)
        put(disk, "readable/a")
        put(disk, "unreadable/a")
        os.chmod(root, 0o755)
        os.chmod(f"{root}/unreadable", 0)
        os.chmod(f"{root}/readable/a", 0)
        yield disk
        os.chmod(f"{root}/unreadable", 0o700)


def test_a_missing_permission_is_said(closed):
    actions = {
        "unreadable": lambda: names(closed),
        "unreadable/a": lambda: closed.read("unreadable/a"),
        "readable/a": lambda: closed.read("readable/a"),
        "new": lambda: put(closed, "new"),
        "readable/b": lambda: put(closed, "readable/b"),
        "unreadable/b": lambda: put(closed, "unreadable/b"),
    }
    for name, action in actions.items():
        kind, text = in_child(give_up_root, action)
        assert (name, kind) == (name, "StorageError")
        assert text.startswith(f"{closed.root}/{name}: no permission; run as a user who may")


def test_a_list_of_what_is_readable_still_works(closed):
    assert in_child(give_up_root, lambda: names(closed, "readable/")) == ("nothing", "['readable/a']")


def test_links_to_files_and_folders_are_followed(disk, tmp_path):
    put(disk, "b/real")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c").write_bytes(HELLO)
    os.symlink("real", f"{disk.root}/b/link")
    os.symlink(tmp_path / "elsewhere", f"{disk.root}/a")
    assert names(disk) == ["a/c", "b/link", "b/real"]
    assert [found.num_bytes for found in disk.list()] == [11, 11, 11]
    assert disk.read("b/link") == disk.read("a/c") == HELLO


def test_a_link_to_nothing_is_an_error(disk):
    put(disk, "a")
    os.symlink("gone", f"{disk.root}/b")
    with pytest.raises(StorageError, match="b: a symbolic link to nothing"):
        names(disk)


def test_links_in_a_circle_are_an_error(disk):
    put(disk, "a/b/c")
    os.symlink(f"{disk.root}/a", f"{disk.root}/a/b/up")
    with pytest.raises(StorageError, match="leads back to a folder above"):
        names(disk)


def test_other_kinds_of_files_are_no_objects(disk):
    put(disk, "a")
    os.mkfifo(f"{disk.root}/pipe")
    assert names(disk) == ["a"]
    with pytest.raises(NotFound, match="expected a file"):
        disk.read("pipe")


def test_names_that_are_no_utf8_are_listed_in_byte_order(disk):
    put(disk, "é")
    for name in (b"\xff", b"\x80"):
        with open(os.path.join(os.fsencode(disk.root), name), "wb") as file:
            file.write(HELLO)
    found = names(disk)
    assert [os.fsencode(name) for name in found] == [b"\x80", "é".encode(), b"\xff"]
    assert disk.read(found[0]) == HELLO


PARTS = st.text("a.-0é ", min_size=1, max_size=3).filter(lambda part: part not in (".", ".."))
PATHS = st.lists(PARTS, min_size=1, max_size=3).map("/".join)


@settings(max_examples=30, deadline=None)
@given(st.sets(PATHS, max_size=12), st.text("a.-0é /", max_size=3))
def test_a_walk_over_folders_gives_the_order_of_full_names(paths, prefix):
    paths = {path for path in paths if not any(other.startswith(f"{path}/") for other in paths)}
    with tempfile.TemporaryDirectory() as root:
        for path in paths:
            Path(root, path).parent.mkdir(parents=True, exist_ok=True)
            Path(root, path).write_bytes(b"")
        try:
            found = names(LocalStorage(root), prefix)
        except ConfigError:
            return
        assert found == sorted((path for path in paths if path.startswith(prefix)), key=str.encode)


# -- Google Cloud Storage ---------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def proxy(gcs_emulator):
    with FaultyProxy(gcs_emulator) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(gcs_root, proxy, clock, monkeypatch):
    """A `gs://` folder behind the faulty proxy, with retries that cost no time."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    policy = RetryPolicy(stall_timeout_s=60.0, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)
    return replace(open_storage(gcs_root), retry=policy)


FAULTS = [
    Fault("status", status=408),
    Fault("status", status=429),
    Fault("status", status=500),
    Fault("status", status=502),
    Fault("status", status=503),
    Fault("status", status=504),
    Fault("reset"),
    Fault("lose"),
    Fault("truncate", at=0),
    Fault("truncate", at=100_000),
    Fault("reset_at", at=100_000),
    Fault("stall", at=0),
    Fault("stall", at=100_000),
]


def names_of_faults(fault):
    return f"{fault.kind}-{fault.status if fault.kind == 'status' else fault.at}"


@pytest.mark.gcs
@pytest.mark.parametrize("fault", FAULTS, ids=names_of_faults)
@pytest.mark.parametrize(("start", "stop"), [(0, None), (1000, 900_000)])
def test_a_read_survives_a_fault(behind_proxy, proxy, fault, start, stop):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(fault, fault, when=is_media)
    stall_timeout_s = 1.0 if fault.kind == "stall" else behind_proxy.retry.stall_timeout_s
    storage = replace(behind_proxy, retry=replace(behind_proxy.retry, stall_timeout_s=stall_timeout_s))
    assert storage.read("a", start, stop) == BIG[start:stop]
    assert sum(map(is_media, proxy.seen)) == 3


@pytest.mark.gcs
def test_a_read_goes_on_at_the_byte_reached(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("truncate", at=100_000), Fault("truncate", at=200_000), when=is_media)
    assert limited(behind_proxy, piece_bytes=1000).read("a", 50_000, 900_000) == BIG[50_000:900_000]
    ranges = [seen.headers["range"] for seen in proxy.seen if is_media(seen)]
    assert ranges == ["bytes=50000-899999", "bytes=150000-899999", "bytes=350000-899999"]


@pytest.mark.gcs
def test_an_answer_with_other_bytes_than_asked_for_is_not_taken(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("replace", find=b"bytes 50000-", put=b"bytes 40000-"), when=is_media)
    assert behind_proxy.read("a", 50_000, 60_000) == BIG[50_000:60_000]
    assert sum(map(is_media, proxy.seen)) == 2


@pytest.mark.gcs
@pytest.mark.parametrize("what", ["size", "generation"])
def test_wrong_facts_in_the_answer_to_a_range_are_not_final_unless_the_object_confirms_them(behind_proxy, proxy, what):
    put(behind_proxy, "a", BIG)
    generation = behind_proxy.stat("a").generation
    find, put_in = {"size": (b"/1048576", b"/0001000"), "generation": (generation.encode(), b"1" * len(generation))}[
        what
    ]
    proxy.script = in_turn(Fault("replace", find=find, put=put_in), when=is_media)
    assert behind_proxy.read("a", 50_000, 60_000, generation=generation) == BIG[50_000:60_000]
    assert sum(map(is_media, proxy.seen)) == 2
    proxy.script = lambda seen: Fault("replace", find=find, put=put_in)
    with pytest.raises(PreconditionFailed if what == "generation" else TransientError):
        behind_proxy.read("a", 50_000, 60_000, generation=generation)


@pytest.mark.gcs
@pytest.mark.parametrize("stop", [None, len(BIG)], ids=["no range", "a range that is all of it"])
def test_a_flipped_bit_in_a_whole_object_is_read_again(behind_proxy, proxy, stop):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("flip", at=1234), when=is_media)
    assert behind_proxy.read("a", 0, stop) == BIG
    assert sum(map(is_media, proxy.seen)) == 2


@pytest.mark.gcs
def test_a_whole_object_in_a_range_that_was_resumed_is_compared_too(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("truncate", at=100_000), Fault("flip", at=1234), when=is_media)
    assert behind_proxy.read("a", 0, len(BIG)) == BIG
    assert sum(map(is_media, proxy.seen)) == 3


@pytest.mark.gcs
def test_a_whole_object_that_never_fits_its_checksum_is_an_error(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = lambda seen: Fault("flip", at=3) if is_media(seen) else None
    with pytest.raises(TransientError, match=r"/a: what arrived does not have the CRC32C .* gave up after"):
        behind_proxy.read("a")


def replacing(storage, name, data):
    """The same storage, except that it replaces an object whenever it pauses."""
    return replace(storage, retry=replace(storage.retry, sleep=lambda _: put(storage, name, data)))


@pytest.mark.gcs
def test_an_object_replaced_in_the_middle_of_a_read_is_read_from_the_start(behind_proxy, proxy):
    put(behind_proxy, "a", b"1" * 1000)
    proxy.script = in_turn(Fault("truncate", at=300), when=is_media)
    assert replacing(behind_proxy, "a", b"2" * 1000).read("a") == b"2" * 1000


@pytest.mark.gcs
def test_a_pinned_read_never_mixes_generations(behind_proxy, proxy):
    put(behind_proxy, "a", b"1" * 1000)
    generation = behind_proxy.stat("a").generation
    proxy.script = in_turn(Fault("truncate", at=300), when=is_media)
    with pytest.raises(PreconditionFailed, match="was replaced"):
        replacing(behind_proxy, "a", b"2" * 1000).read("a", generation=generation)


class SlowClock:
    """Time of which 10 ms pass whenever somebody looks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


@pytest.mark.gcs
def test_a_read_that_trickles_is_asked_for_again_at_the_byte_reached(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    policy = replace(behind_proxy.retry, clock=SlowClock(), request_deadline_s=0.51)
    assert limited(replace(behind_proxy, retry=policy), piece_bytes=10_000).read("a") == BIG
    firsts = [
        seen.headers.get("range", "bytes=0-").split("=")[1].split("-")[0] for seen in proxy.seen if is_media(seen)
    ]
    assert firsts == ["0", "500000", "1000000"]


@pytest.mark.gcs
def test_an_upload_that_trickles_is_given_up(behind_proxy, monkeypatch):
    policy = replace(behind_proxy.retry, clock=SlowClock(), request_deadline_s=-100.0, give_up_after_s=1.0)
    with pytest.raises(TransientError, match="slower than 64 KiB/s"):
        put(replace(behind_proxy, retry=policy), "a", BIG)
    assert names(behind_proxy) == []


@pytest.mark.parametrize("bytes_per_s", [100_000, 300_000])
def test_an_upload_over_a_slow_line_has_the_time_it_takes(bytes_per_s):
    # The share of each of eight workers of a build behind a line of 6 or 20 Mbit/s.
    shard = io.BytesIO(bytes(96 << 20))
    policy = RetryPolicy(clock=lambda: shard.tell() / bytes_per_s)
    pieces = [len(piece) for piece in Body(b"head", shard, 96 << 20, policy, b"tail")]
    assert sum(pieces) > 96 << 20
    assert max(pieces) / bytes_per_s < policy.connect_timeout_s  # in which a piece has to be taken


@pytest.mark.gcs
@pytest.mark.parametrize(("status", "patience_s"), [(500, 180), (429, 1200), (503, 1200)])
def test_pauses_grow_and_then_it_gives_up_naming_object_and_range(
    behind_proxy, proxy, clock, caplog, status, patience_s
):
    put(behind_proxy, "a", BIG)
    proxy.script = lambda seen: Fault("status", status=status)
    with pytest.raises(TransientError) as caught:
        behind_proxy.read("a", 10, 20)
    text = str(caught.value)
    assert f"{behind_proxy.url}/a bytes 10 to 20: the server answered {status}" in text
    assert f"gave up after {sum(map(is_media, proxy.seen))} tries in {sum(clock.pauses):.0f} s" in text
    assert clock.pauses[:6] == [0.1875, 0.375, 0.75, 1.5, 3.0, 6.0]
    assert patience_s - 32 < clock.now <= patience_s
    [said] = caplog.records
    assert f"bytes 10 to 20: the server answered {status}" in said.getMessage()
    assert said.getMessage().endswith(f"; trying again for {patience_s} s in all")


@pytest.mark.gcs
def test_a_link_that_breaks_now_and_then_does_not_end_the_patience_for_a_bucket_that_refuses(
    behind_proxy, proxy, clock
):
    put(behind_proxy, "a", BIG)
    faults = [*[Fault("status", status=503)] * 20, *[Fault("reset")] * 3, *[Fault("status", status=503)] * 5]
    proxy.script = in_turn(*faults, when=is_media)
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert 180 < clock.now < 1200


@pytest.mark.gcs
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("kind", ["seconds", "date", "neither"])
def test_all_wait_for_as_long_as_a_refusal_asks_for(behind_proxy, proxy, clock, status, kind):
    asks = {"seconds": "90", "date": formatdate(time.time() + 90, usegmt=True), "neither": "-90 s"}[kind]
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("status", status=status, headers=(("Retry-After", asks),)), when=is_media)
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert clock.now == pytest.approx(0.2 if kind == "neither" else 90, abs=2)
    assert behind_proxy.is_throttled
    clock.now += 3600
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert not behind_proxy.is_throttled


@pytest.mark.gcs
def test_as_long_as_bytes_arrive_it_does_not_give_up(behind_proxy, proxy, clock):
    put(behind_proxy, "a", BIG)
    impatient = replace(behind_proxy, retry=replace(behind_proxy.retry, give_up_after_s=1.0))
    proxy.script = in_turn(*[Fault("truncate", at=50_000)] * 15, when=is_media)
    assert impatient.read("a") == BIG
    assert sum(clock.pauses) > 1.0


@pytest.mark.gcs
@pytest.mark.parametrize("fault", FAULTS[:8], ids=names_of_faults)
@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_a_write_survives_a_fault(behind_proxy, proxy, fault, options):
    proxy.script = in_turn(fault, fault, when=is_upload)
    put(behind_proxy, "train/a", BIG, **options)
    proxy.script = lambda seen: None
    assert behind_proxy.read("train/a") == BIG


@pytest.mark.gcs
def test_a_lost_answer_to_a_commit_is_no_failure(behind_proxy, proxy):
    proxy.script = in_turn(Fault("lose"), when=is_upload)
    put(behind_proxy, "a", BIG, if_generation=ABSENT)
    assert sum(map(is_upload, proxy.seen)) == 2  # the second was refused, and what stood there was our own
    assert behind_proxy.read("a") == BIG


@pytest.mark.gcs
def test_a_lost_answer_to_a_replacement_is_no_failure(behind_proxy, proxy):
    put(behind_proxy, "a")
    generation = behind_proxy.stat("a").generation
    proxy.script = in_turn(Fault("lose"), when=is_upload)
    put(behind_proxy, "a", BIG, if_generation=generation)
    assert behind_proxy.read("a") == BIG


@pytest.mark.gcs
@pytest.mark.parametrize("at", [0, 10, 300, 100_000])
def test_an_upload_cut_on_its_way_is_never_visible(behind_proxy, proxy, at):
    proxy.script = lambda seen: Fault("cut_upload", at=at) if is_upload(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after"):
        put(behind_proxy, "a", BIG)
    assert names(behind_proxy) == []


@pytest.mark.gcs
def test_a_bit_flipped_on_its_way_up_is_sent_again(behind_proxy, proxy):
    proxy.script = in_turn(Fault("flip_upload", at=100_000), when=is_upload)
    put(behind_proxy, "a", BIG)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == BIG


@pytest.mark.gcs
def test_what_the_server_stored_wrongly_is_deleted_and_said(behind_proxy, proxy):
    proxy.script = in_turn(Fault("replace", find=b"yZRlqg==", put=b"AAAAAA=="), when=is_upload)
    with pytest.raises(StorageError, match=r"/a: stored as 11 bytes with CRC32C AAAAAA==, expected 11 bytes, yZRlqg=="):
        put(behind_proxy, "a")
    assert names(behind_proxy) == []


@pytest.mark.gcs
def test_an_aborted_write_sends_nothing(behind_proxy, proxy):
    with pytest.raises(KeyError), behind_proxy.writer("a") as writer:
        write_and_raise(writer, BIG * 20, KeyError)
    assert proxy.seen == []


@pytest.mark.gcs
def test_an_object_larger_than_the_memory_for_it_goes_through_a_file(gcs_root):
    storage = open_storage(gcs_root)
    piece = bytes(range(251)) * 10_000
    with storage.writer("big", if_generation=ABSENT) as writer:
        for _ in range(10):
            writer.write(piece)
    assert storage.stat("big").num_bytes == 25_100_000
    assert storage.read("big") == piece * 10
    assert storage.read("big", 20_000_001, 25_000_000) == (piece * 10)[20_000_001:25_000_000]


PIECE = bytes(range(251)) * 1000
MANY_PIECES = PIECE * 8


def streaming(storage):
    """The same folder, from which objects of more than a megabyte are sent in parts of half a megabyte."""
    return limited(storage, stream_bytes=1 << 20, part_bytes=1 << 19)


def put_pieces(storage, name="big", **options):
    with storage.writer(name, **options) as writer:
        for _ in range(8):
            writer.write(PIECE)


def is_part(seen):
    return seen.method == "PUT"


@pytest.mark.gcs
@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_a_large_object_is_sent_while_it_is_written(behind_proxy, proxy, options):
    with streaming(behind_proxy).writer("big", **options) as writer:
        for number in range(8):
            writer.write(PIECE)
            assert (number < 4) == (not any(map(is_part, proxy.seen)))
        assert names(behind_proxy) == []
    parts = [seen for seen in proxy.seen if is_part(seen)]
    assert [seen.headers["content-range"] for seen in parts] == [
        "bytes 0-524287/*", "bytes 524288-1048575/*", "bytes 1048576-1572863/*", "bytes 1572864-2007999/2008000",
    ]  # fmt: skip
    assert parts[-1].headers["x-goog-hash"] == f"crc32c={behind_proxy.stat('big').crc32c}"
    assert behind_proxy.read("big") == MANY_PIECES


@pytest.mark.gcs
def test_an_object_up_to_the_limit_is_sent_whole(behind_proxy, proxy):
    put(limited(behind_proxy, stream_bytes=len(BIG)), "a", BIG)
    assert not any(map(is_part, proxy.seen))


@pytest.mark.gcs
def test_what_is_streamed_needs_no_disk(gcs_root):
    storage = limited(open_storage(gcs_root), spool_bytes=50_000, stream_bytes=90_000, part_bytes=1 << 18)
    with file_size_limit(100_000), storage.writer("big") as writer:
        for _ in range(300):
            writer.write(bytes(10_000))
    assert storage.stat("big").num_bytes == 3_000_000


@pytest.mark.gcs
@pytest.mark.parametrize("number", range(5), ids=["begin", "first", "second", "third", "last"])
@pytest.mark.parametrize("fault", [Fault("status", status=503), Fault("reset")], ids=lambda fault: fault.kind)
def test_an_upload_in_parts_survives_a_fault(behind_proxy, proxy, number, fault):
    proxy.script = in_turn(*[None] * number, fault, fault, when=is_upload)
    put_pieces(streaming(behind_proxy), if_generation=ABSENT)
    assert behind_proxy.read("big") == MANY_PIECES


@pytest.mark.gcs
@pytest.mark.parametrize("gone", [404, 410])
@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_a_lost_answer_to_the_last_part_is_no_failure(behind_proxy, proxy, options, gone):
    proxy.script = in_turn(*[None] * 4, Fault("lose"), Fault("status", status=gone), when=is_upload)
    put_pieces(streaming(behind_proxy), **options)
    assert behind_proxy.read("big") == MANY_PIECES


@pytest.mark.gcs
def test_what_a_server_has_only_in_part_is_sent_from_there(behind_proxy, proxy):
    half = Fault("replace", find=b"bytes=0-524287", put=b"bytes=0-000000")
    proxy.script = in_turn(None, half, when=is_upload)
    with pytest.raises(StorageError, match=r"/big: stored as .*expected 2008000 bytes.*; that generation was deleted"):
        put_pieces(streaming(behind_proxy))  # the emulator has it twice now; Google ignores what it has already
    parts = [seen.headers["content-range"] for seen in proxy.seen if is_part(seen)]
    assert parts[:3] == ["bytes 0-524287/*", "bytes 1-524288/*", "bytes 524289-1048576/*"]
    assert names(behind_proxy) == []


@pytest.mark.gcs
def test_a_flipped_bit_in_a_part_is_found_at_the_end_and_nothing_stays(behind_proxy, proxy):
    proxy.script = in_turn(None, Fault("flip_upload", at=100_000), when=is_upload)
    with pytest.raises(StorageError, match=r"/big: stored as 2008000 bytes with CRC32C .*that generation was deleted"):
        put_pieces(streaming(behind_proxy))
    assert names(behind_proxy) == []


@pytest.mark.gcs
@pytest.mark.parametrize("num_pieces", [1, 6])
def test_a_large_object_that_is_aborted_is_never_visible(behind_proxy, proxy, num_pieces):
    with pytest.raises(KeyError), streaming(behind_proxy).writer("big") as writer:
        write_and_raise(writer, PIECE * num_pieces, KeyError)
    assert names(behind_proxy) == []
    assert [seen.method for seen in proxy.seen if seen.method == "DELETE"] == ["DELETE"] * (num_pieces == 6)


@pytest.mark.gcs
def test_a_large_object_never_replaces_another_one_and_the_same_one_is_success(gcs_root):
    storage = streaming(open_storage(gcs_root))
    put_pieces(storage, if_generation=ABSENT)
    generation = storage.stat("big").generation
    put_pieces(storage, if_generation=ABSENT)
    assert storage.stat("big").generation == generation
    put(storage, "big", HELLO)
    with pytest.raises(PreconditionFailed, match="something else stands there: 11 bytes"):
        put_pieces(storage, if_generation=ABSENT)
    with pytest.raises(PreconditionFailed, match="something else stands there: 11 bytes"):
        put_pieces(storage, if_generation=generation)
    assert storage.read("big") == HELLO


@pytest.mark.gcs
def test_an_object_that_another_writes_during_an_upload_stays(gcs_root):
    storage = streaming(open_storage(gcs_root))

    def write():
        with storage.writer("big", if_generation=ABSENT) as writer:
            writer.write(MANY_PIECES)
            put(storage, "big", HELLO)

    with pytest.raises(PreconditionFailed, match="something else stands there: 11 bytes"):
        write()
    assert storage.read("big") == HELLO


@pytest.mark.gcs
def test_a_full_temporary_folder_is_said(gcs_root, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match="in the temporary folder"), open_storage(gcs_root).writer("big") as writer:
        writer.write(BIG * 20)


@pytest.mark.gcs
@pytest.mark.parametrize("num_small", [1, 1000])
def test_a_temporary_folder_that_is_full_at_the_last_byte_is_said(gcs_root, num_small):
    # Small writes wait in a buffer: the disk refuses them when that is full, when all is sent, or when it is closed.
    storage = limited(open_storage(gcs_root), spool_bytes=50_000)

    def write():
        with storage.writer("a") as writer:
            writer.write(BIG[:98_000])
            for _ in range(num_small):
                writer.write(BIG[:3000])

    with file_size_limit(100_000), pytest.raises(StorageError, match=r"a, in the temporary folder .*larger than the"):
        write()
    assert names(storage) == []


@pytest.mark.gcs
@pytest.mark.parametrize("action", [lambda s: names(s), lambda s: s.stat("a"), lambda s: put(s, "a")])
def test_a_missing_bucket_is_said(gcs_root, action):
    with pytest.raises(NotFound, match="no such bucket"):
        action(open_storage("gs://no-such-bucket/x"))


@pytest.mark.gcs
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_says_which_permission_is_needed(behind_proxy, proxy, status, clock):
    proxy.script = lambda seen: Fault("status", status=status)
    for action in (lambda: behind_proxy.stat("a"), lambda: behind_proxy.read("a"), lambda: put(behind_proxy, "a")):
        with pytest.raises(StorageError, match=rf"/a: .*{status}.*storage\.objects\.get.*application-default login"):
            action()
    assert clock.pauses == []


RETENTION = "Object 'bucket/a' is subject to bucket's retention policy and cannot be deleted or overwritten until 2027."


@pytest.mark.gcs
@pytest.mark.parametrize(
    "body", [RETENTION, json.dumps({"error": {"errors": [{"message": "x" * 500}], "code": 403, "message": RETENTION}})]
)
def test_a_refusal_says_what_the_server_says(behind_proxy, proxy, body):
    # Not only permissions: a retention policy, a closed billing account, a perimeter around the project.
    proxy.script = lambda seen: Fault("status", status=403, put=body.encode())
    for action in (lambda: behind_proxy.stat("a"), lambda: behind_proxy.read("a"), lambda: put(behind_proxy, "a")):
        with pytest.raises(StorageError) as caught:
            action()
        assert f"may not do this ({RETENTION}); if a permission is missing, " in str(caught.value)


@pytest.mark.gcs
@pytest.mark.parametrize("body", [b" ", b"[]", b'{"error": "x"}', b'{"error": {}}', b"<html>\n no </html>", b"\xff"])
def test_a_refusal_in_other_words_is_one_too(behind_proxy, proxy, body):
    proxy.script = lambda seen: Fault("status", status=403, put=body)
    with pytest.raises(
        StorageError, match=r"403: the emulator at .* may not do this.* if a permission .*application-default login"
    ):
        behind_proxy.stat("a")


@pytest.mark.gcs
def test_another_refusal_is_passed_on_at_once(behind_proxy, proxy, clock):
    proxy.script = lambda seen: Fault("status", status=418)
    with pytest.raises(StorageError, match="/a: the server answered 418"):
        behind_proxy.read("a")
    assert clock.pauses == []


@pytest.mark.gcs
def test_a_list_survives_faults_on_any_page(behind_proxy, proxy, monkeypatch):
    for number in range(10):
        put(behind_proxy, f"{number}", b"")
    first = len(proxy.seen)
    proxy.script = lambda seen: Fault("status", status=503) if (seen.number - first) % 2 == 0 else None
    assert names(behind_proxy) == [f"{number}" for number in range(10)]


NO_ANSWERS = {
    "empty": Fault("answer", status=200),
    "empty chunked": Fault("chunked", status=200),
    "cut": Fault("shorten", at=60),
    "416": Fault("answer", status=416, put=b"<html>the range is not satisfiable</html>"),
    "[]": Fault("answer", status=200, put=b"[]"),
    "null": Fault("answer", status=200, put=b"null"),
    "{}": Fault("answer", status=200, put=b"{}"),
    "{} in chunks": Fault("chunked", status=200, put=b"{}"),
    "another kind": Fault("answer", status=200, put=b'{"kind": "storage#buckets", "items": []}'),
    "items that are none": Fault("answer", status=200, put=b'{"kind": "storage#objects", "items": {"name": "a"}}'),
    "an item without a name": Fault("answer", status=200, put=b'{"kind": "storage#objects", "items": [{}]}'),
    "a token that is none": Fault("answer", status=200, put=b'{"kind": "storage#objects", "nextPageToken": 7}'),
    "another object": Fault("answer", status=200, put=b'{"kind":"storage#object","name":"x","generation":"1"}'),
    "deep": Fault("answer", status=200, put=b"[" * 100_000),
    "HTML": Fault("answer", status=200, put=b"<html>please log in</html>"),
    "nothing more": Fault("answer", status=204),
}
"""What may come in place of the answer to a request for JSON."""


def is_listing(seen):
    return seen.method == "GET" and seen.path.partition("?")[0].endswith("/o")


def is_stat(seen):
    return seen.method == "GET" and "/o/" in seen.path and not is_media(seen)


@pytest.fixture
def pages_of_three(behind_proxy):
    """Ten objects, listed in four pages."""
    for number in range(10):
        put(behind_proxy, f"{number}")
    return limited(behind_proxy, page_size=3)


@pytest.mark.gcs
@pytest.mark.parametrize("page", [0, 3])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_page_of_a_list_that_is_none_is_asked_for_again_and_never_taken_for_its_end(
    pages_of_three, proxy, answer, page
):
    proxy.script = in_turn(*[None] * page, NO_ANSWERS[answer], when=is_listing)
    assert names(pages_of_three) == [f"{number}" for number in range(10)]
    assert sum(map(is_listing, proxy.seen)) == 5
    proxy.script = in_turn(*[None] * page, *[NO_ANSWERS[answer]] * 1000, when=is_listing)
    with pytest.raises(TransientError, match=r"gs://bucket/folder.*gave up after \d+ tries"):
        names(pages_of_three)


@pytest.mark.gcs
@pytest.mark.parametrize("start", [b"", b"other/"])
def test_another_page_of_a_list_is_not_taken(pages_of_three, proxy, start):
    # A cache on the way that does not look at the page token: the first page comes again and again.
    listed = [
        {"name": f"{start.decode() or pages_of_three.prefix + '/'}{number}", "generation": "1"} for number in (0, 1)
    ]
    first = json.dumps({"kind": "storage#objects", "items": listed, "nextPageToken": "again"}).encode()
    proxy.script = in_turn(None, Fault("answer", status=200, put=first), when=is_listing)
    assert names(pages_of_three) == [f"{number}" for number in range(10)]
    proxy.script = in_turn(None, *[Fault("answer", status=200, put=first)] * 1000, when=is_listing)
    with pytest.raises(TransientError, match="another page of the list, by its object"):
        names(pages_of_three)


@pytest.mark.gcs
def test_a_list_that_leads_to_its_own_page_for_ever_is_an_error(pages_of_three, proxy):
    page = Fault("answer", status=200, put=b'{"kind": "storage#objects", "nextPageToken": "again"}')
    proxy.script = lambda seen: page if is_listing(seen) else None
    with pytest.raises(TransientError, match="another page of the list, by its page token"):
        names(pages_of_three)


@pytest.mark.gcs
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_stat_that_is_none_is_asked_for_again_and_then_named(behind_proxy, proxy, answer):
    put(behind_proxy, "a")
    proxy.script = in_turn(NO_ANSWERS[answer], when=is_stat)
    assert behind_proxy.stat("a").num_bytes == 11
    assert sum(map(is_stat, proxy.seen)) == 2
    proxy.script = lambda seen: NO_ANSWERS[answer] if is_stat(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after \d+ tries"):
        behind_proxy.stat("a")


@pytest.mark.gcs
@pytest.mark.parametrize(("is_stored", "options"), [(False, {}), (True, {"if_generation": ABSENT})])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_upload_whose_answer_is_none_is_sent_again(behind_proxy, proxy, answer, is_stored, options):
    fault = NO_ANSWERS[answer]
    fault = replace(fault, kind="instead") if is_stored and fault.kind in ("answer", "chunked") else fault
    proxy.script = in_turn(fault, when=is_upload)
    put(behind_proxy, "a", **options)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == HELLO
    proxy.script = lambda seen: NO_ANSWERS[answer] if is_upload(seen) else None
    with pytest.raises(TransientError, match=r"/b: .*gave up after \d+ tries"):
        put(behind_proxy, "b")


@pytest.mark.gcs
@pytest.mark.parametrize("answer", ["416", "{}", "HTML", "deep"])
def test_a_deletion_whose_answer_is_none_is_asked_for_again(behind_proxy, proxy, answer):
    put(behind_proxy, "a")
    proxy.script = in_turn(NO_ANSWERS[answer], when=lambda seen: seen.method == "DELETE")
    behind_proxy.delete("a")
    assert names(behind_proxy) == []


def is_deletion(seen):
    return seen.method == "DELETE"


@pytest.mark.gcs
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=404),
        Fault("status", status=410),
        Fault("status", status=412),
        Fault("answer", status=200),
    ],
    ids=lambda fault: str(fault.status),
)
def test_a_deletion_counts_only_once_the_object_is_gone(behind_proxy, proxy, fault, is_pinned):
    put(behind_proxy, "a")
    generation = behind_proxy.stat("a").generation if is_pinned else None
    proxy.script = in_turn(fault, when=is_deletion)
    behind_proxy.delete("a", generation=generation)
    assert names(behind_proxy) == []
    assert sum(map(is_deletion, proxy.seen)) == 2
    put(behind_proxy, "a")
    generation = behind_proxy.stat("a").generation if is_pinned else None
    proxy.script = lambda seen: fault if is_deletion(seen) else None
    with pytest.raises(TransientError, match=r"/a: it is still stored after its deletion was answered with: .*gave up"):
        behind_proxy.delete("a", generation=generation)


@pytest.mark.gcs
def test_a_deletion_whose_answer_was_lost_is_done_and_a_newer_object_stays(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = in_turn(Fault("lose"), when=is_deletion)
    behind_proxy.delete("a")
    assert sum(map(is_deletion, proxy.seen)) == 2
    assert names(behind_proxy) == []
    put(behind_proxy, "a")
    seen = behind_proxy.stat("a").generation
    put(behind_proxy, "a", BIG)
    behind_proxy.delete("a", generation=seen)
    assert behind_proxy.read("a") == BIG


@pytest.mark.gcs
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, 5)])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_bytes_that_are_not_from_the_bucket_are_not_taken(behind_proxy, proxy, answer, start, stop):
    put(behind_proxy, "a")
    proxy.script = in_turn(replace(NO_ANSWERS[answer], at=1), when=is_media)
    assert behind_proxy.read("a", start, stop) == HELLO[start:stop]
    assert sum(map(is_media, proxy.seen)) == 2
    proxy.script = lambda seen: replace(NO_ANSWERS[answer], at=0) if is_media(seen) else None
    with pytest.raises(TransientError, match=r"/a.*gave up after \d+ tries"):
        behind_proxy.read("a", start, stop)


@pytest.mark.gcs
def test_a_location_that_is_none_is_asked_for_again(behind_proxy, proxy):
    proxy.script = in_turn(NO_ANSWERS["{}"], NO_ANSWERS["empty"])
    assert bucket_location("bucket", behind_proxy.retry) == bucket_location("bucket", RetryPolicy())


def without_size(seen):
    """What Google's test bench answers: an empty object has no size."""
    return None if is_media(seen) else Fault("replace", find=b'"size":"0",', put=b"")


@pytest.mark.gcs
def test_an_object_without_a_size_is_an_empty_one(behind_proxy, proxy):
    proxy.script = without_size
    put(behind_proxy, "a", b"", if_generation=ABSENT)
    put(behind_proxy, "a", b"")
    assert behind_proxy.stat("a").num_bytes == 0
    assert [(found.name, found.num_bytes) for found in behind_proxy.list()] == [("a", 0)]
    assert behind_proxy.read("a") == b""
    behind_proxy.delete("a")


@pytest.mark.gcs
@pytest.mark.parametrize("is_asked", [is_stat, is_listing, is_upload])
def test_a_size_that_is_missing_from_an_object_with_content_is_asked_for_again(behind_proxy, proxy, is_asked):
    proxy.script = in_turn(Fault("replace", find=b'"size":"11",', put=b""), when=is_asked)
    put(behind_proxy, "a")
    assert behind_proxy.stat("a").num_bytes == 11
    assert [found.num_bytes for found in behind_proxy.list()] == [11]
    assert sum(map(is_asked, proxy.seen)) == 2


@pytest.mark.gcs
def test_a_page_in_no_order_is_put_in_order(pages_of_three, proxy):
    # Google's test bench lists objects as they were written, all on one page.
    listed = [{"name": f"{pages_of_three.prefix}/{name}", "generation": "1", "size": "1"} for name in "cab"]
    page = json.dumps({"kind": "storage#objects", "items": listed}).encode()
    proxy.script = in_turn(Fault("answer", status=200, put=page), when=is_listing)
    assert names(pages_of_three) == ["a", "b", "c"]


@pytest.mark.gcs
def test_the_size_in_a_416_is_compared_with_the_object(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = lambda seen: Fault("replace", find=b"bytes */11", put=b"bytes */99")
    with pytest.raises(StorageError, match="bytes 12 to 15 were asked for but it holds 11"):
        behind_proxy.read("a", 12, 15)


@pytest.mark.gcs
def test_content_may_hold_what_parts_another_upload(behind_proxy, proxy):
    boundaries = set()

    def boundary_of(seen):
        boundaries.add(seen.headers["content-type"].partition("boundary=")[2])

    proxy.script = lambda seen: boundary_of(seen) if is_upload(seen) else None
    content = b"a\r\n--shardset-2f9f6e0b8f5c4d6c\r\nb\r\n--shardset-2f9f6e0b8f5c4d6c--\r\n"
    put(behind_proxy, "a", content)
    content += b"".join(f"\r\n--{found}--\r\n".encode() for found in boundaries)
    put(behind_proxy, "a", content)
    assert behind_proxy.read("a") == content
    assert len(boundaries) == 2


@pytest.mark.gcs
def test_folders_drawn_by_consoles_are_not_listed(gcs_root, gcs_emulator):
    storage = open_storage(gcs_root)
    put(storage, "train/a")
    url = f"{gcs_emulator}/upload/storage/v1/b/bucket/o?uploadType=media&name={storage.prefix}/train/"
    subprocess.run(["curl", "-sf", "-XPOST", url, "-d", ""], check=True, stdout=subprocess.DEVNULL)
    assert names(storage) == ["train/a"]


@pytest.mark.gcs
def test_an_emulator_may_be_named_without_a_scheme(gcs_root, gcs_emulator, monkeypatch):
    put(open_storage(gcs_root), "a")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_emulator.removeprefix("http://"))
    assert open_storage(gcs_root).read("a") == HELLO


@pytest.mark.gcs
def test_connections_are_kept_for_32_threads(behind_proxy, proxy, caplog):
    put(behind_proxy, "a", BIG)
    proxy.delay_s = 0.02
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda start: behind_proxy.read("a", start, start + 10), range(200)))
    assert "pool is full" not in caplog.text
    assert proxy.num_connections <= 34


class Google:
    """Credentials as Google's machines give them out: a metadata server that never answers, a token server."""

    def __init__(self, folder, emulator):
        self.silent = socket.create_server(("127.0.0.1", 0))
        self.environment = {
            "API_ENDPOINT_OVERRIDE": emulator,  # the emulator, but without its leave to come anonymously
            "GCE_METADATA_IP": f"127.0.0.1:{self.silent.getsockname()[1]}",
            "CLOUDSDK_CONFIG": str(folder),
        }

    def prepare(self, **more):
        """In a child: this environment and no other credentials."""
        for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
            os.environ.pop(name, None)
        os.environ.update(self.environment, **more)

    def num_probes(self):
        """How often the metadata server was asked."""
        self.silent.settimeout(0.0)
        for number in itertools.count():
            try:
                self.silent.accept()[0].close()
            except BlockingIOError:
                return number


@pytest.fixture
def google(tmp_path, proxy):
    google = Google(tmp_path, proxy.url)
    yield google
    google.silent.close()


@pytest.mark.gcs
def test_without_credentials_it_is_anonymous_after_one_short_look(gcs_root, google, proxy):
    put(open_storage(gcs_root), "a")
    assert in_child(google.prepare, lambda: open_storage(gcs_root).read("a")) == ("nothing", repr(HELLO))
    assert google.num_probes() == 1
    assert "authorization" not in proxy.seen[-1].headers


@pytest.mark.gcs
def test_an_anonymous_user_who_is_refused_is_told_so(gcs_root, google, proxy):
    proxy.script = lambda seen: Fault("status", status=401)
    kind, text = in_child(google.prepare, lambda: open_storage(gcs_root).read("a"))
    assert kind == "StorageError"
    assert "401: an anonymous user (no Google credentials were found) may not do this" in text


@pytest.mark.gcs
@pytest.mark.parametrize("content", [None, "not json", '{"type": "unheard of"}'])
def test_broken_credentials_are_an_error_and_not_anonymous(gcs_root, google, proxy, tmp_path, content):
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    prepare = functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=str(path))
    kind, text = in_child(prepare, lambda: open_storage(gcs_root).read("a"))
    assert kind == "StorageError"
    assert "Google credentials are broken" in text
    assert proxy.seen == []


def service_account(path, token_uri):
    """Writes a service account's key file as Google's console does."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    facts = {"type": "service_account", "client_email": "me@project.iam.gserviceaccount.com", "token_uri": token_uri}
    path.write_text(json.dumps({**facts, "private_key": pem, "private_key_id": "1", "project_id": "project"}))


class TokenServer(BaseHTTPRequestHandler):
    def do_POST(self):
        body = b'{"access_token": "secret", "expires_in": 3600, "token_type": "Bearer"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.gcs
def test_application_default_credentials_are_used(gcs_root, google, proxy, tmp_path):
    put(open_storage(gcs_root), "a")
    with HTTPServer(("127.0.0.1", 0), TokenServer) as tokens:
        threading.Thread(target=tokens.serve_forever, args=(0.02,), daemon=True).start()
        service_account(tmp_path / "key.json", f"http://127.0.0.1:{tokens.server_port}/token")
        prepare = functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path / "key.json"))
        assert in_child(prepare, lambda: open_storage(gcs_root).read("a")) == ("nothing", repr(HELLO))
        proxy.script = lambda seen: Fault("status", status=403)
        kind, text = in_child(prepare, lambda: open_storage(gcs_root).read("a"))
        tokens.shutdown()
    assert {seen.headers["authorization"] for seen in proxy.seen} == {"Bearer secret"}
    assert kind == "StorageError"
    assert "403: me@project.iam.gserviceaccount.com may not do this" in text
    assert google.num_probes() == 0


@pytest.mark.gcs
def test_a_read_whose_token_was_refused_goes_on_with_a_new_one(gcs_root, google, proxy, tmp_path):
    put(open_storage(gcs_root), "a")
    with HTTPServer(("127.0.0.1", 0), TokenServer) as tokens:
        threading.Thread(target=tokens.serve_forever, args=(0.02,), daemon=True).start()
        service_account(tmp_path / "key.json", f"http://127.0.0.1:{tokens.server_port}/token")
        prepare = functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path / "key.json"))
        proxy.script = in_turn(*[Fault("status", status=401)] * 2, when=is_media)
        assert in_child(prepare, lambda: open_storage(gcs_root).read("a")) == ("nothing", repr(HELLO))
        tokens.shutdown()
    assert sum(map(is_media, proxy.seen)) == 3


NO_TOKENS = [b"", b"{}", b"[]", b"<html>", b'{"access_token": 1}', b'{"access_token": "a", "expires_in": "soon"}']


class ForgetfulTokenServer(TokenServer):
    """Answers each request by the next of `server.first`, and by a token when there are none left."""

    def do_POST(self):
        if not self.server.first:
            super().do_POST()
            return
        body = self.server.first.pop()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.do_POST()


@contextmanager
def token_server(answers):
    with HTTPServer(("127.0.0.1", 0), ForgetfulTokenServer) as server:
        server.first = list(answers)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.gcs
def test_a_token_that_is_none_is_asked_for_again(gcs_root, google, proxy, tmp_path):
    put(open_storage(gcs_root), "a")
    with token_server(NO_TOKENS) as url:
        service_account(tmp_path / "key.json", f"{url}/token")
        prepare = functools.partial(google.prepare, GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path / "key.json"))
        assert in_child(prepare, lambda: open_storage(gcs_root).read("a")) == ("nothing", repr(HELLO))
    assert {seen.headers["authorization"] for seen in proxy.seen} == {"Bearer secret"}


@pytest.mark.parametrize("body", [*NO_TOKENS, b'{"access_token": "a"}'])
@pytest.mark.parametrize("path", ["token", "?recursive=true"])
def test_what_a_metadata_server_says_is_looked_at(body, path):
    with token_server([body]) as url, pytest.raises(TransportError, match="answered with no token"):
        gcs_http._TokenRequest()(f"{url}/computeMetadata/v1/instance/service-accounts/default/{path}")


@pytest.mark.gcs
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_password_of_an_emulator_is_never_shown(behind_proxy, proxy, monkeypatch, caplog, scheme):
    host = proxy.url.removeprefix("http://")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"{scheme}user:s3cret@{host}")
    proxy.script = in_turn(Fault("status", status=403), *[Fault("reset")] * 1000)
    with pytest.raises(StorageError, match=rf"403: the emulator at http://\*\*\*@{host} may not") as refused:
        behind_proxy.stat("a")
    with pytest.raises(TransientError, match="gave up after") as lost:
        behind_proxy.stat("a")
    assert "s3cret" not in f"{refused.value} {lost.value} {caplog.text}"


@pytest.mark.parametrize(
    "environment",
    [
        {"STORAGE_EMULATOR_HOST": "http://user:s3cret@host:port"},
        {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1", "http_proxy": "http://user:s3cret@host:port"},
        {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1", "http_proxy": "http://user:s3cret@/x"},
    ],
)
def test_an_address_of_a_server_that_is_none_is_named_without_its_password(environment):
    policy = RetryPolicy(give_up_after_s=0.0)

    def stat():
        replace(open_storage("gs://bucket/x"), retry=policy).stat("a")

    kind, text = in_child(lambda: os.environ.update(environment, no_proxy=""), stat)
    assert kind in ("ConfigError", "TransientError")
    assert "s3cret" not in text
    assert "host" in text


@pytest.mark.parametrize("scheme", ["gs", "memory", "http", "https", "s3"])
@pytest.mark.parametrize("password", ["s3cret", "s3/cret", "s3@cret"])
def test_an_address_with_a_password_is_refused_without_it(scheme, password):
    with pytest.raises(ConfigError) as caught:
        open_storage(f"{scheme}://user:{password}@bucket/x")
    assert "cret" not in str(caught.value)


@pytest.mark.gcs
def test_objects_are_read_through_the_proxy_that_the_environment_names(gcs_root, gcs_emulator, proxy):
    put(open_storage(gcs_root), "a")

    def prepare():
        os.environ.update(http_proxy=proxy.url, no_proxy="")

    assert in_child(prepare, lambda: open_storage(gcs_root).read("a")) == ("nothing", repr(HELLO))
    assert [seen.path.startswith(gcs_emulator) for seen in proxy.seen if is_media(seen)] == [True]


def test_ranges_are_read_over_connections_that_check_certificates_as_requests_does(monkeypatch, tmp_path):
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    session = AuthorizedSession(AnonymousCredentials())
    pool = gcs_http._pool(session, "https://storage.googleapis.com")
    assert (pool.cert_reqs, pool.ca_certs) == ("CERT_REQUIRED", requests.certs.where())
    (tmp_path / "own.pem").write_text("")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "own.pem"))
    assert gcs_http._pool(session, "https://storage.googleapis.com").ca_certs == str(tmp_path / "own.pem")


@pytest.fixture
def black_hole(monkeypatch):
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.mark.parametrize(
    "verb", [["pipelines", "inspect"], ["pipelines", "estimate"], ["trainer", "explain", "--step", "3"]]
)
@pytest.mark.slow
def test_who_waits_for_a_server_that_never_answers_is_told_so_and_then_gets_an_error(black_hole, verb):
    address = ["--manifest", "gs://bucket/set"] if verb[0] == "trainer" else ["gs://bucket/set"]
    run = subprocess.run([sys.executable, "-m", *verb, *address], capture_output=True, text=True, timeout=600)
    assert run.returncode == 1
    assert (
        len(re.findall(r"no answer from gs://bucket/set/manifest.json yet; trying until \d\d:\d\d:\d\d", run.stderr))
        == 1
    )
    assert re.search(r"TransientError: gs://bucket/set/manifest.json: .*gave up after 3 tries in 3\d s", run.stderr)


@pytest.mark.parametrize("is_listening", [True, False])
def test_an_operation_ends_at_its_deadline_and_says_before_that_nothing_answers(
    black_hole, monkeypatch, caplog, is_listening
):
    if not is_listening:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    policy = RetryPolicy(stall_timeout_s=0.3, deadline_s=1.0, notice_after_s=0.2, warn_after_s=float("inf"))
    with pytest.raises(TransientError, match=r"gs://bucket/a: .*gave up after [234] tries in [012] s"):
        replace(open_storage("gs://bucket"), retry=policy).stat("a")
    [said] = [record.getMessage() for record in caplog.records if record.name.startswith("shardset")]
    assert said.startswith("no answer from gs://bucket/a yet; trying until ")


def test_storages_are_patient_unless_someone_waits():
    with while_someone_waits():
        assert open_storage("gs://bucket").retry.deadline_s == 30
    assert open_storage("gs://bucket").retry == RetryPolicy()


def test_pauses_of_two_readers_differ():
    policy = RetryPolicy()
    assert len({policy.pause_s(3) for _ in range(20)}) == 20
    assert all(0.5 <= policy.pause_s(3) <= 1.0 for _ in range(100))
    assert RetryPolicy(jitter=lambda: 0.0).pause_s(1000) == 16.0


def test_a_storage_with_its_policy_pickles():
    storage = open_storage("gs://bucket/a")
    assert pickle.loads(pickle.dumps(storage)) == storage
