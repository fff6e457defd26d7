"""What only a local disk can break."""

import errno
import multiprocessing
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardset.errors import ConfigError, NotFound, PreconditionFailed, StorageError
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from tests.makers.objects import (
    BIG,
    HELLO,
    file_size_limit,
    give_up_root,
    in_child,
    names,
    put,
)


@pytest.fixture
def disk(tmp_path):
    return open_storage(str(tmp_path / "disk"))


def all_files(folder):
    return sorted(
        os.path.relpath(path, folder) for path in Path(folder).rglob("*") if not path.is_dir()
    )


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
    put(disk, "a")
    assert disk.read("a") == HELLO
    generation = disk.stat("a").generation
    disk.delete("a")
    with pytest.raises(NotFound):
        disk.read("a", generation=generation)


def test_a_handle_that_fails_is_opened_again(disk, monkeypatch):
    put(disk, "a")
    generation, opened = disk.stat("a").generation, []
    real_open, read = os.open, os.pread
    monkeypatch.setattr(
        os, "open", lambda *options: opened.append(real_open(*options)) or opened[-1]
    )
    monkeypatch.setattr(os, "pread", lambda fd, *place: read(fd if len(opened) > 1 else -1, *place))
    with pytest.raises(StorageError):
        disk.read("a", generation=generation)
    assert disk.read("a", generation=generation) == HELLO


def test_threads_can_read_more_files_than_are_kept_open(disk):
    os.makedirs(disk.root)
    for number in range(100):
        Path(disk.root, f"{number}").write_bytes(b"%03d" % number)
    generations = [disk.stat(f"{number}").generation for number in range(100)]
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        found = list(
            pool.map(
                lambda number: disk.read(f"{number % 100}", generation=generations[number % 100]),
                range(1000),
            )
        )
    assert found == [b"%03d" % (number % 100) for number in range(1000)]
    assert len(os.listdir("/proc/self/fd")) <= before + 64


def test_the_disk_begins_with_a_large_object_before_it_ends(disk, monkeypatch):
    begun = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *range_: begun.append(range_))
    piece = bytes(3 << 20)
    with disk.writer("large") as out:
        for number in range(23):
            out.write(piece)
            assert number < 21 or len(begun) == 2
    assert begun == [
        (0, 33 << 20, os.POSIX_FADV_DONTNEED),
        (33 << 20, 33 << 20, os.POSIX_FADV_DONTNEED),
    ]
    assert disk.read("large") == 23 * piece


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


def test_sweeping_all_the_time_disturbs_no_writer(disk):
    with ThreadPoolExecutor(5) as pool:
        writers = [
            pool.submit(put, disk, f"train/{number}", if_generation=ABSENT) for number in range(50)
        ]
        while not all(writer.done() for writer in writers):
            disk.sweep()
        assert [writer.result() for writer in writers] == [None] * 50
    assert len(all_files(disk.root)) == len(names(disk)) == 50


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_is_said_to_be_one_and_nothing_is_left(
    disk, monkeypatch, code
):
    def link(path: str, name: str) -> None:
        raise OSError(code, os.strerror(code), path, name)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(
        StorageError, match=r"train/a: .*file system has no hard links.* choose another folder"
    ):
        put(disk, "train/a", if_generation=ABSENT)
    assert os.listdir(f"{disk.root}/train") == []


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
def test_a_full_disk_or_a_limit_is_said_and_leaves_nothing(disk, monkeypatch, options):
    put(disk, "small")
    with (
        file_size_limit(100_000),
        pytest.raises(StorageError, match=r"/a: .* larger than the system allows"),
    ):
        put(disk, "a", BIG, **options)

    def fill(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(StorageError, match="/a: the disk is full; free some space"):
        put(disk, "a", BIG, **options)
    assert all_files(disk.root) == ["small"]


@pytest.mark.parametrize("options", [{}, {"if_generation": ABSENT}])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("file/b/c", "a part of the path is a file"),
        ("folder", "this is a folder"),
        ("x" * 300, "name is too long"),
        ("folder/.shardset-tmp-1", "kept for temporaries"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(disk, name, complaint, options):
    put(disk, "file")
    put(disk, "folder/b")
    with pytest.raises((StorageError, ConfigError), match=complaint):
        put(disk, name, **options)
    assert all_files(disk.root) == ["file", "folder/b"]


@pytest.mark.parametrize("folder", ["a", "a/b"])
def test_a_folder_that_is_a_file_is_said(disk, folder):
    put(disk, "a")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        names(open_storage(f"{disk.root}/{folder}"))


def test_a_device_or_pipe_is_no_object_and_never_replaced(disk):
    put(disk, "a")
    os.mkfifo(f"{disk.root}/pipe")
    os.symlink("pipe", f"{disk.root}/link")
    assert names(disk) == ["a"]
    for name in ("pipe", "link"):
        with pytest.raises(NotFound, match="expected a file"):
            disk.read(name)
        with pytest.raises(StorageError, match=f"{name}: this is a device, pipe or socket"):
            put(disk, name)
        assert stat.S_ISFIFO(os.stat(f"{disk.root}/{name}").st_mode)
    assert sorted(os.listdir(disk.root)) == ["a", "link", "pipe"]


@pytest.fixture
def closed():
    """A storage anybody may enter, with an unreadable folder, an unreadable file and nowhere to
    write.
    """
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
    assert in_child(give_up_root, lambda: names(closed, "readable/")) == (
        "nothing",
        "['readable/a']",
    )


def test_links_to_files_and_folders_are_followed(disk, tmp_path):
    put(disk, "b/real")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c").write_bytes(HELLO)
    os.symlink("real", f"{disk.root}/b/link")
    os.symlink(tmp_path / "elsewhere", f"{disk.root}/a")
    assert names(disk) == ["a/c", "b/link", "b/real"]
    assert [found.num_bytes for found in disk.list()] == [11, 11, 11]
    assert disk.read("b/link") == disk.read("a/c") == HELLO


@pytest.mark.parametrize(
    ("target", "complaint"),
    [("gone", "link: a symbolic link to nothing"), ("..", "symbolic links run in a circle")],
)
def test_a_link_to_nothing_or_in_a_circle_is_an_error(disk, target, complaint):
    put(disk, "a/b")
    os.symlink(target, f"{disk.root}/a/link")
    with pytest.raises(StorageError, match=complaint):
        names(disk)


def test_names_that_are_no_utf8_are_listed_in_byte_order(disk):
    put(disk, "é")
    for name in (b"\xff", b"\x80"):
        with open(os.path.join(os.fsencode(disk.root), name), "wb") as file:
            file.write(HELLO)
    found = names(disk)
    assert [os.fsencode(name) for name in found] == [b"\x80", "é".encode(), b"\xff"]
    assert disk.read(found[0]) == HELLO
