"""Objects that their server keeps compressed: one sentence for whatever is read of them."""

import gzip
import json
import os
import urllib.request

import obstore
import pytest

from shardset.storage.open import open_storage
from tests.conftest import BUCKET
from tests.makers.built import HERE
from tests.makers.images import image_bytes
from tests.makers.shardset import png_samples, write_shard_set

SAID = "is stored with `Content-Encoding: gzip`, so it is not the file itself; upload it"


@pytest.fixture(params=[pytest.param("gcs", marks=pytest.mark.gcs), "s3"])
def root(request):
    """The URL of an empty folder in a bucket."""
    return request.getfixturevalue(f"{request.param}_root")


def compress(storage, name):
    """Stores an object again as `gcloud storage cp --gzip-local-all` does."""
    data = gzip.compress(storage.read(name))
    if storage.scheme == "s3":
        encoding = {"Content-Encoding": "gzip"}
        obstore.put(storage._client(len(data)), storage._full(name), data, attributes=encoding)
        return
    about = json.dumps({"name": storage._full(name), "contentEncoding": "gzip"}).encode()
    kinds = b"application/json", b"application/octet-stream"
    pieces = zip(kinds, (about, data), strict=True)
    body = b"".join(b"--x\r\nContent-Type: %s\r\n\r\n%s\r\n" % piece for piece in pieces)
    uploads = f"{os.environ['STORAGE_EMULATOR_HOST']}/upload/storage/v1/b/{BUCKET}/o"
    asked = urllib.request.Request(
        f"{uploads}?uploadType=multipart",
        data=body + b"--x--",
        headers={"Content-Type": "multipart/related; boundary=x"},
    )
    urllib.request.urlopen(asked).close()


READ = {
    "image": ("raw/cat/a.png", ("build", "--source=folder", "--input={root}/raw")),
    "tar": ("tars/a.tar", ("build", "--source=webdataset", "--input={root}/tars")),
    "listing": ("list.csv", ("build", "--source=listing", "--input={root}/list.csv")),
    "manifest": ("set/manifest.json", ("verify", "{root}/set")),
}
"""The object that is compressed, and a command that reads it."""


@pytest.mark.parametrize("kind", READ)
def test_a_compressed_object_is_named_as_that(kind, root, tmp_path, said):
    storage, (name, words) = open_storage(root), READ[kind]
    storage.write("raw/cat/a.png", image_bytes(0))
    storage.write("list.csv", b"path,label\na.png,x\n")
    write_shard_set(open_storage(f"{root}/set"), {"train": png_samples("train", 4, size=8)})
    storage.write("tars/a.tar", storage.read("set/train/train-000000.tar"))
    compress(storage, name)
    asked = [word.format(root=root) for word in words]
    text = said(
        *asked, *([f"--output={tmp_path / 'out'}", *HERE] if len(words) > 2 else []), code=1
    )
    assert f"{root}/{name}" in text
    assert SAID in text
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("name", ["list.csv.gz", "cifar.tgz"])
def test_a_file_that_is_compressed_by_its_name_is_read(name, root):
    storage = open_storage(root)
    storage.write(name, b"label\n")
    compress(storage, name)
    assert gzip.decompress(storage.read(name)) == b"label\n"
