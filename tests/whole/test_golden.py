"""What may never change: tars and indexes of three small builds, and the samples of a run that was
resumed.

The input is made without an image library (but for CIFAR, whose pixels are stored in PNGs without
compression), so no version of one decides the bytes. If a test fails, users' sets or runs change:
that is not a golden file to update.
"""

import base64
import hashlib
import itertools
import json
import struct
from pathlib import Path

import pytest
from pyarrow import parquet

from pipelines import cli
from shardset import Stream
from tests.makers import imagenet
from tests.makers.cifar import cifar10, python_files, write_archive
from tests.makers.golden import picture

_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAKBueIx4ZKCMgoy0qqC+8P//8Nzc8P//////////////////////////////"
    "////////////////////////////2wBDAaq0tPDS8P//////////////////////////////////////////////////"
    "////////////////////////////wAARCAAIAAgDASIAAhEBAxEB/8QAFAABAAAAAAAAAAAAAAAAAAAAAP/EABQQAQAA"
    "AAAAAAAAAAAAAAAAAAD/xAAVAQEBAAAAAAAAAAAAAAAAAAABAv/EABQRAQAAAAAAAAAAAAAAAAAAAAD/2gAMAwEAAhED"
    "EQA/AACg/9k="
)


def _jpeg(number: int) -> bytes:
    """The same picture each time, with a comment that makes the bytes differ."""
    return _JPEG[:2] + b"\xff\xfe" + struct.pack(">HI", 6, number) + _JPEG[2:]


def _cifar(folder: Path) -> None:
    write_archive(
        folder / "cifar-10-python.tar.gz",
        python_files(cifar10(rows=5)),
        folder="cifar-10-batches-py",
    )


def _folder(folder: Path) -> None:
    for number, name in enumerate(["cat", "dog", "Käuzchen"] * 7):
        path = folder / ("train", "val")[number % 5 == 0] / name / f"picture {number}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))


def _imagenet(folder: Path) -> None:
    images = [
        imagenet.Image(one.split, one.key, one.wnid, _jpeg(number))
        for number, one in enumerate(imagenet.images())
    ]
    for name, data in imagenet.archives(images).items():
        (folder / name).write_bytes(data)


BUILDS = {
    "cifar10": (_cifar, "--num-shards train=4 --num-shards test=2 --repeat train=3"),
    "folder": (_folder, "--num-shards 2"),
    "imagenet": (_imagenet, "--samples-per-shard 3 --seed 7"),
}
TARS = {
    "cifar10": "315b6db90068f621d5b890c82d4aa62c187885cbf525f5dbdb5b40dadd05e49a",
    "folder": "c9178bf2562b3500f5831a7fc5007664edc3518be3aa8bfd8b72de13935a5627",
    "imagenet": "e9b73e0a18474e7acd25e0b75a4ed4b3c234e07e114faa5b3845497b05c1bf73",
}
ROWS = {
    "cifar10": "8efc82835ef5596148c5dacbcd4b89a48747f402cede511c014f478ef5e92244",
    "folder": "043f45be7848a908dc67feaee3e75aeee2e5ac842c038daacbb1fcf43acc20c0",
    "imagenet": "ebee1bb12e4e3ece98a0c7ac9383159bcf671f24995881f831b2c4e546f4db8a",
}
"""Of the indexes what they say: other versions of Arrow write other bytes."""
TRACE = "7accdf85cb69d07a6dfa5f752b3a7213c5352fb1c696d9f667f8b63080939203"


@pytest.fixture(params=BUILDS)
def golden_set(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a build, and the folder of its shards."""
    make, options = BUILDS[request.param]
    (tmp_path / "raw").mkdir()
    make(tmp_path / "raw")
    places = f"--source {request.param} --input {tmp_path}/raw --output {tmp_path}/out"
    words = f"build {places} --no-report {options} --direct_running_mode=in_memory"
    assert cli.main(words.split()) == 0
    return request.param, tmp_path / "out"


def test_the_tars_of_a_build_keep_their_bytes_and_its_indexes_what_they_say(golden_set):
    name, output = golden_set
    tars, rows = hashlib.sha256(), hashlib.sha256()
    for path in sorted(output.glob("*/*.tar")):
        tars.update(path.relative_to(output).as_posix().encode() + path.read_bytes())
        index = parquet.read_table(path.with_suffix(".parquet")).drop_columns("generation")
        rows.update(repr(index.to_pylist()).encode())
    assert tars.hexdigest() == TARS[name]
    assert rows.hexdigest() == ROWS[name]


@pytest.mark.parametrize("golden_set", ["cifar10"], indirect=True)
def test_a_run_that_is_resumed_by_other_numbers_of_processes_keeps_its_samples(golden_set):
    # 75 samples, 8 a batch: 7 steps in one process, 6 in three, the rest of two epochs in two.
    output = str(golden_set[1])
    state, trace = None, []
    for world_size, num_steps in [(1, 7), (3, 6), (2, 7)]:
        options: dict = {"global_batch_size": 8, "image": None, "world_size": world_size}
        streams = [Stream(output, "train", rank=rank, **options) for rank in range(world_size)]
        for stream in streams:
            if state is not None:
                stream.load_state_dict(state)
        steps = [
            itertools.islice(itertools.chain.from_iterable(itertools.repeat(one)), num_steps)
            for one in streams
        ]
        for parts in zip(*steps, strict=True):
            trace.append([int(id) for part in parts for id in part["id"][part["weight"] > 0]])
        state = streams[0].state_dict()
    epochs = (itertools.chain.from_iterable(trace[start : start + 10]) for start in (0, 10))
    assert [sorted(epoch) for epoch in epochs] == [list(range(75))] * 2
    assert hashlib.sha256(json.dumps(trace).encode()).hexdigest() == TRACE
