"""What a build, the other verbs and a stream ask of a bucket: requests and bytes.

Each number is a limit. A change that asks for less lowers it.
"""

import gzip
import io
import json
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardset
from pipelines import cli
from pipelines.write.set_files import is_plan
from shardset.storage.open import open_storage
from tests.makers import cifar, imagenet
from tests.makers.built import built, config_of
from tests.makers.counted import counted
from tests.makers.imagenet import WNIDS, Image
from tests.makers.shardset import encode
from tests.makers.tars import tar_bytes

BYTES_READ = {
    "cifar10": 1.00,
    "cifar10 tgz": 2.00,
    "coco": 1.98,
    "folder": 2.00,
    "hf": 1.28,
    "imagenet": 1.84,
    "listing csv": 2.00,
    "listing jsonl": 1.99,
    "listing parquet": 2.00,
    "shardset": 1.47,
    "webdataset": 1.73,
}
"""By a build, for each byte of its input. The aim is 2.05 for every source.

An archive of CIFAR is read up to each of its six batches, so small a one to the end.
"""

REQUESTS_PER_SHARD = 5
"""Of a build, to its output."""

VERBS = {
    "inspect {set}": (3, 3),
    "inspect {set} --key cat/002": (11, 30),
    "inspect {set} --name cat/002.png": (12, 40),
    "inspect {set} --shard 3": (4, 10),
    "verify {set}": (28, 6),
    "verify {set} --deep": (28, 1640),
    "report {set}": (34, 2600),
    "export {set} --to wids,hf": (6, 4),
    "diff {set} {set}": (4, 5),
    "view {set}-view.parquet --of {set} --per-class 5": (11, 29),
    "append {set} --source folder --input {raw} --num-shards 1": (64, 106),
    "compact {set} --grace 0 --drop-keys {keys}": (104, 500),
}
"""The requests of each verb for a set of 8 shards and 1,606 kB, and the kB, read and written."""

EPOCH = (26, 1670)
"""The same for one epoch of a stream."""

NUM_IMAGES, NUM_SHARDS = 240, 8
CLASSES = ["ant", "bee", "cat", "dog"]


def pictures():
    """Noise of about 5 KB each."""
    draw = np.random.default_rng(0)
    noise = draw.integers(256, size=(NUM_IMAGES, 40, 40, 3), dtype=np.uint8)
    return [encode(image, "PNG") for image in noise]


PICTURES = pictures()
ROWS = [
    {"path": f"{CLASSES[number % 4]}/{number:03d}.png", "label": CLASSES[number % 4]}
    for number in range(NUM_IMAGES)
]


LINES = ["path,label", *(f"{row['path']},{row['label']}" for row in ROWS)]
FOLDER = {row["path"]: content for row, content in zip(ROWS, PICTURES, strict=True)}


def hugging_face():
    rows = [
        {"image": {"bytes": content, "path": path}, "label": number % 4}
        for number, (path, content) in enumerate(FOLDER.items())
    ]
    return {"train-00000-of-00001.parquet": parquet_of(rows)}


def coco():
    images = [{"id": number, "file_name": row["path"]} for number, row in enumerate(ROWS)]
    boxes = [
        {"id": number, "image_id": number, "category_id": 1, "bbox": [1, 2, 3, 4]}
        for number in range(NUM_IMAGES)
    ]
    found = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    return FOLDER | {"boxes.json": json.dumps(found).encode()}


def web_dataset():
    pairs = [
        (f"{number:03d}.{field}", content)
        for number, picture in enumerate(PICTURES)
        for field, content in (("png", picture), ("cls", b"%d" % (number % 4)))
    ]
    return {"train-000.tar": tar_bytes(pairs[::2]), "train-001.tar": tar_bytes(pairs[1::2])}


def image_net():
    wnids = [WNIDS[number % len(WNIDS)] for number in range(NUM_IMAGES)]
    return imagenet.archives(
        [
            Image("train", f"{wnid}_{number}", wnid, content)
            for number, (wnid, content) in enumerate(zip(wnids, PICTURES, strict=True))
        ]
    )


def parquet_of(rows):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=60)
    return buffer.getvalue()


def cifar_archive():
    files = cifar.python_files(cifar.cifar10(40))
    return {"all.tgz": gzip.compress(cifar.tar_of(files, "cifar-10-batches-py"), mtime=0)}


def tar_set():
    url, _ = stored(FOLDER)
    built(config_in(url, "folder"))
    storage = open_storage(f"{url}/out")
    names = [stat.name for stat in storage.list()]
    return {name: storage.read(name) for name in names if not is_plan(name)}


SOURCES = {
    "cifar10": lambda: cifar.python_files(cifar.cifar10(40)),
    "cifar10 tgz": cifar_archive,
    "coco": coco,
    "folder": lambda: FOLDER,
    "hf": hugging_face,
    "imagenet": image_net,
    "listing csv": lambda: FOLDER | {"all.csv": "\n".join(LINES).encode()},
    "listing jsonl": lambda: FOLDER | {"all.jsonl": "\n".join(map(json.dumps, ROWS)).encode()},
    "listing parquet": lambda: FOLDER | {"all.parquet": parquet_of(ROWS)},
    "shardset": tar_set,
    "webdataset": web_dataset,
}


def stored(files):
    """The address of a new bucket with these files below `raw`, and their size."""
    url = f"memory://{uuid.uuid4().hex}"
    storage = open_storage(f"{url}/raw")
    for name, content in files.items():
        storage.write(name, content)
    return url, sum(map(len, files.values()))


def config_in(url, kind, **options):
    """A build of that source, from `raw` to `out`."""
    source, _, extension = kind.partition(" ")
    if source == "coco":
        options["annotations"] = {"": f"{url}/raw/boxes.json"}
    file = f"/all.{extension}" if extension else ""
    return config_of(f"{url}/raw{file}", f"{url}/out", source=source, **options)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_build_reads_its_input_about_twice(kind):
    url, num_bytes = stored(SOURCES[kind]())
    with counted() as asked:
        built(config_in(url, kind))
        num_read = sum(each.num_bytes for each in asked if each.url.startswith(f"{url}/raw"))
    assert round(num_read / num_bytes, 2) <= BYTES_READ[kind]


def num_requests(num_shards):
    """Of a build to its output."""
    url, _ = stored(FOLDER)
    with counted() as asked:
        built(config_in(url, "folder", num_shards={"": num_shards}))
        return sum(each.url.startswith(f"{url}/out") for each in asked)


def test_a_build_makes_few_requests_for_a_shard():
    more = num_requests(2 * NUM_SHARDS) - num_requests(NUM_SHARDS)
    assert more / NUM_SHARDS <= REQUESTS_PER_SHARD


@pytest.fixture(scope="module")
def original():
    url, _ = stored(FOLDER)
    built(config_in(url, "folder", num_shards={"": NUM_SHARDS}))
    return url


@pytest.fixture
def url(original):
    """A bucket of its own with a set of 8 shards and its input."""
    storage, url = open_storage(original), f"memory://{uuid.uuid4().hex}"
    copy = open_storage(url)
    for stat in storage.list():
        copy.write(stat.name, storage.read(stat.name))
    return url


def check(asked, limits):
    """Compares the requests and their kB with the limits of both."""
    found = len(asked), sum(each.num_bytes for each in asked) / 1000
    assert (found[0] <= limits[0], found[1] <= limits[1]) == (True, True), found


@pytest.mark.parametrize("words", VERBS)
def test_a_verb_asks_for_no_more_than_its_limit(words, url, tmp_path, capsys):
    (tmp_path / "keys").write_text("cat/002")
    places = {"set": f"{url}/out", "raw": f"{url}/raw", "keys": tmp_path / "keys"}
    with counted() as asked:
        code = cli.main(words.format(**places).split())
        check(asked, VERBS[words])
    said = capsys.readouterr().err
    assert code == 0 or "nothing to append" in said, said


def test_an_epoch_reads_the_tars_once(url):
    with counted() as asked:
        for _ in shardset.Stream(f"{url}/out", "train", batch_size=8, image_size=32).epoch(0):
            pass
        check(asked, EPOCH)
