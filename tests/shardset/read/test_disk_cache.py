"""What came from a bucket is kept on disk: nothing is read twice, nothing wrong is believed, the
budget holds.
"""

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardset.errors import ConfigError
from shardset.format.manifest import load
from shardset.read.disk_cache import BlockCache, DiskCache
from tests.makers.reading import BytesRead, stream_of
from tests.makers.shardset import new_set, png_samples

NUM_SAMPLES, NUM_SHARDS = 80, 4
SHOWN = Path(__file__).parents[3]


def shard_set(url=None):
    samples = png_samples("train", NUM_SAMPLES, size=8)
    return new_set(samples, url, num_shards=NUM_SHARDS)


@pytest.fixture(scope="module")
def url():
    return shard_set()


def opened(url, folder, num_bytes=1 << 20, **options):
    choices = {"global_batch_size": 10, "seed": 3, "block_size": 4, "window": 3}
    cache = DiskCache(folder=str(folder), num_bytes=num_bytes)
    return stream_of(url, image=None, fields=("png",), disk_cache=cache, **choices | options)


def read(stream, epoch=0):
    """(bytes of each sample by id, how many bytes were read for it)."""
    contents = {}
    with BytesRead() as count:
        for batch in stream.epoch(epoch):
            contents |= dict(zip(batch["id"].tolist(), batch["png"], strict=True))
    return contents, count.total


@pytest.fixture(scope="module")
def expected():
    """The bytes of each sample's image by id."""
    return {
        number: sample.fields[0][1]
        for number, sample in enumerate(png_samples("train", NUM_SAMPLES, size=8))
    }


def cached_shards(folder):
    return sorted(path for path in Path(folder).glob("*/*") if path.name.isdigit())


def shard_bytes(url):
    shard = load(url)[0].split("train").shards[0]
    return shard.num_bytes + shard.num_samples


def other_pictures(number):
    """The URL of a shard set of few samples that no other number has."""
    return new_set(png_samples("train", 20 + number, size=8), num_shards=1)


def test_the_second_epoch_and_a_new_run_read_nothing_from_the_bucket(url, tmp_path, expected):
    stream = opened(url, tmp_path)
    contents, num_bytes = read(stream)
    assert contents == expected
    assert 0 < num_bytes < stream.split.num_tar_bytes
    assert read(stream, 1) == (expected, 0)
    assert read(opened(url, tmp_path, seed=8, global_batch_size=20), 5) == (expected, 0)


def test_only_what_is_missing_is_read(url, tmp_path, expected):
    half = opened(url, tmp_path, rank=1, world_size=2)
    _, num_bytes = read(half)
    contents, rest = read(opened(url, tmp_path))
    assert contents == expected
    assert 0 < rest < 1.5 * num_bytes


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_a_miss_and_is_repaired(url, tmp_path, expected, damage):
    read(opened(url, tmp_path))
    path = cached_shards(tmp_path)[2]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[600] ^= 1
    elif damage == "cut":
        del data[len(data) // 2 :]
    path.unlink()
    if damage != "remove":
        path.write_bytes(data)
    contents, num_bytes = read(opened(url, tmp_path))
    assert contents == expected
    assert num_bytes > 0
    assert read(opened(url, tmp_path), 1) == (expected, 0)


def test_a_cache_that_is_damaged_while_it_is_read_is_a_miss(url, tmp_path, expected):
    stream = opened(url, tmp_path)
    read(stream)
    for path in cached_shards(tmp_path):
        with path.open("r+b") as file:
            file.truncate(700)
    assert read(stream, 1)[0] == expected


def test_the_budget_is_kept_and_what_came_first_stays(url, tmp_path, expected):
    budget = 2 * shard_bytes(url) + 100
    stream = opened(url, tmp_path, budget)
    contents, first = read(stream)
    assert contents == expected
    assert sum(path.stat().st_size for path in cached_shards(tmp_path)) <= budget
    assert len(cached_shards(tmp_path)) == 2
    contents, num_bytes = read(stream, 1)
    assert contents == expected
    assert num_bytes == pytest.approx(first / 2, rel=0.2)


def test_a_set_that_nobody_reads_makes_room_and_one_in_use_does_not(url, tmp_path):
    budget = 4 * shard_bytes(url) + 400
    in_use = opened(url, tmp_path, budget)
    read(in_use)
    kept, other = cached_shards(tmp_path), other_pictures(5)
    read(opened(other, tmp_path, budget))
    assert cached_shards(tmp_path) == kept
    del in_use
    read(opened(other, tmp_path, budget), 1)
    assert not any(path.exists() for path in kept)
    assert cached_shards(tmp_path)


def test_files_that_are_not_ours_stay(url, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "000000").write_bytes(b"mine" * 10_000)
    budget = shard_bytes(url) + 100
    read(opened(url, tmp_path, budget))
    assert (tmp_path / "notes" / "000000").read_bytes() == b"mine" * 10_000


def test_a_disk_that_takes_no_more_costs_the_cache_and_not_the_run(
    url, tmp_path, expected, monkeypatch, caplog
):
    write, stream = os.pwrite, opened(url, tmp_path)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[: len(data) // 2], at))
    assert read(stream)[0] == read(stream, 1)[0] == expected

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert read(stream, 2)[0] == expected
    for number in range(NUM_SHARDS):
        assert (
            f"No space left on device; shard {number} is read from its storage from now on"
            in caplog.text
        )


@pytest.mark.parametrize(
    ("folder", "num_bytes", "message"),
    [
        ("cache", 1000, "holds not one shard"),
        ("cache", 1 << 60, r"bytes are free for the cache, \d+ were asked for"),
        ("gs://bucket/cache", 1 << 20, "expected a local folder"),
        ("~/cache", 1 << 20, "~ is not your home folder"),
        ("file/cache", 1 << 20, "can't be the folder of a cache"),
    ],
)
def test_a_cache_that_can_not_be_is_refused(url, tmp_path, monkeypatch, folder, num_bytes, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        opened(url, folder, num_bytes)


def test_caches_open_while_others_make_room(tmp_path):
    urls, failures = [other_pictures(number) for number in range(4)], []
    splits = [load(url)[0].split("train") for url in urls]
    spec = DiskCache(folder=str(tmp_path), num_bytes=2 * max(map(shard_bytes, urls)))

    def open_and_evict(split):
        try:
            for _ in range(100):
                cache = BlockCache(spec, split)
                cache.file_of(0)
        except (ConfigError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=open_and_evict, args=[split]) for split in splits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_shards_on_a_local_disk_need_no_cache(tmp_path):
    with pytest.raises(ConfigError, match="lies on a local disk already"):
        opened(shard_set(str(tmp_path / "set")), tmp_path / "cache")


def test_a_cache_travels_between_processes(url, tmp_path, expected):
    stream = opened(url, tmp_path)
    read(stream)
    again = pickle.loads(pickle.dumps(BlockCache(stream.source.disk_cache.spec, stream.split)))
    assert again.file_of(0).missing(0, 20) is None


READER = """
import sys
from tests.shardset.read.test_disk_cache import opened, read
stream = opened(sys.argv[1], sys.argv[2])
for epoch in range(int(sys.argv[3])):
    contents, num_bytes = read(stream, epoch)
print(len(contents), num_bytes)
"""


def start(url, folder, epochs):
    words = [sys.executable, "-c", READER, url, str(folder), str(epochs)]
    return subprocess.Popen(words, cwd=SHOWN, stdout=subprocess.PIPE, text=True)


@pytest.mark.gcs
def test_two_processes_share_a_cache(gcs_root, tmp_path, expected):
    url = shard_set(f"{gcs_root}/set")
    both = [start(url, tmp_path, 2) for _ in range(2)]
    outcomes = [tuple(map(int, process.communicate(timeout=600)[0].split())) for process in both]
    assert outcomes == [(NUM_SAMPLES, 0)] * 2
    assert len(cached_shards(tmp_path)) == NUM_SHARDS
    assert read(opened(url, tmp_path), 7) == (expected, 0)


@pytest.mark.gcs
@pytest.mark.slow
def test_a_process_killed_in_the_middle_leaves_a_cache_that_serves(gcs_root, tmp_path, expected):
    url = shard_set(f"{gcs_root}/set")
    process = start(url, tmp_path, 1000)
    deadline = time.monotonic() + 600
    while len(cached_shards(tmp_path)) <= 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    stream = opened(url, tmp_path)
    assert read(stream)[0] == expected
    assert read(stream, 1) == (expected, 0)
