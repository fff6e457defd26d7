import uuid

import numpy as np
import pytest

from pipelines.config import AdoptConfig
from pipelines.sets.adopt import adopt
from pipelines.sources.shardset import ExistingSet
from shardset.errors import SourceError
from shardset.format.manifest import load
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from tests.makers.built import HERE, built, config_of
from tests.makers.shardset import encode, new_set, png_samples, put, write_shard_set
from tests.makers.spools import read
from tests.makers.stored import samples_of
from tests.makers.tars import tar_bytes
from tests.makers.views import put_view

NOISE = [
    encode(image, "png")
    for image in np.random.default_rng(0).integers(256, size=(30, 60, 60, 3), dtype=np.uint8)
]


@pytest.fixture
def source(tmp_path) -> ExistingSet:
    samples = {name: png_samples(name, 5, size=8, num_classes=3) for name in ("train", "holdout")}
    write_shard_set(open_storage(str(tmp_path)), samples, num_classes=3)
    return ExistingSet(str(tmp_path), open_storage(str(tmp_path)))


def test_a_shard_set_keeps_its_splits_classes_and_samples(tmp_path, source):
    assert {(s.split, s.key, s.label) for s in read(source)} == {
        (split, f"{split}-{serial:06d}", serial % 3)
        for split in ("train", "holdout")
        for serial in range(5)
    }
    manifest = load(str(tmp_path)).manifest
    assert source.survey().classes == manifest.classes
    assert source.survey().objects == {shard.path: shard.num_bytes for shard in manifest.shards}


def test_a_shard_set_that_misses_or_exchanged_a_shard_is_an_error(tmp_path, source):
    first = tmp_path / source.survey().units[0]["tar"]["name"]
    first.write_bytes(first.read_bytes() + b"\0")
    with pytest.raises(SourceError, match=rf"{first.name}: \d+ bytes, its manifest says"):
        source.survey()
    first.unlink()
    with pytest.raises(SourceError, match=rf"1 of 4 tars are missing: .*{first.name}"):
        source.survey()


def odd_members(number, label=b"1"):
    """The members of a sample: in the order that tars of others have, at times without a label or
    an image.
    """
    orders = [("json", "png", "cls"), ("seg.txt", "png"), ("png", "cls", "txt"), ("txt", "cls")]
    contents = {"png": NOISE[number], "cls": label, "json": b'{"a": [1]}'}
    return {field: contents.get(field, b"text") for field in orders[number % 4]}


def a_set():
    samples = {f"s{number}": odd_members(number) for number in range(30)}
    stored = [
        StoredSample(
            key=key, fields=[*fields.items()], label=1 if "cls" in fields else -1, serial=serial
        )
        for serial, (key, fields) in enumerate(samples.items())
    ]
    return new_set(stored), samples


def adopted_tars():
    url = f"memory://{uuid.uuid4().hex}/set"
    for tar in range(2):
        names = {
            f"{number}.{field.upper()}": content
            for number in range(15 * tar, 15 * tar + 15)
            for field, content in odd_members(number, b" 01\n").items()
        }
        put(open_storage(url), f"train-{tar}.tar", tar_bytes(names))
    adopt(AdoptConfig(input=url), HERE)
    return url, {f"{number}": odd_members(number) for number in range(30)}


def a_view():
    url, samples = a_set()
    labels = [number % 3 - 1 for number in range(29)]
    for label, fields in zip(labels, samples.values(), strict=False):
        if "cls" in fields:
            fields |= {"cls": b"%d" % label}
        if label < 0:
            fields.pop("cls", None)
        elif "cls" not in fields:
            fields["cls"] = b"%d" % label
    samples.popitem()
    return put_view(url, load(url), id=[*range(29)], label=labels), samples


@pytest.mark.parametrize("made", [a_set, adopted_tars, a_view])
def test_a_build_copies_samples_as_they_are(made):
    url, expected = made()
    output = f"memory://{uuid.uuid4().hex}/out"
    manifest = built(config_of(url, output, source="shardset"))
    stored = samples_of(output, manifest, "train")
    assert {key: [*fields.items()] for key, fields in stored.items()} == {
        key: [*fields.items()] for key, fields in expected.items()
    }
    totals = np.bincount([int(fields["cls"]) for fields in expected.values() if "cls" in fields])
    assert manifest.split("train").class_totals[: len(totals)] == totals.tolist()
