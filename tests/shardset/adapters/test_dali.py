"""The protocol of DALI's external source, and a pipeline of DALI itself on the CPU, in the peers' environment."""

import hashlib
import io
import json
import subprocess

import numpy as np
import pytest
from PIL import Image

from scripts import venvs
from shardset.adapters.dali import ExternalSource
from shardset.decode.crops import PadCrop
from shardset.decode.image import ImageSpec
from shardset.errors import ConfigError
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import write_shard_set
from tests.shardset.adapters.conftest import RAW


def as_dali_reads(source, num_epochs):
    """What `external_source(source, batch=True, cycle="raise")` takes: `iter` at each reset, `next` until the end."""
    for _ in range(num_epochs):
        iterator = iter(source)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            yield batch


def test_the_outputs_are_those_of_the_stream_epoch_after_epoch(make):
    source = ExternalSource(make(), ("image", "label", "weight"))
    expected = [batch for epoch in range(2) for batch in make().epoch(epoch)]
    assert len(source) == 7
    for outputs, batch in zip(as_dali_reads(source, 2), expected, strict=True):
        assert isinstance(outputs, tuple)
        for output, name in zip(outputs, ("image", "label", "weight"), strict=True):
            assert np.array_equal(output, batch[name])


PIPELINE = """
import hashlib, json, sys
from nvidia.dali import fn, pipeline_def
from shardset import Stream
from shardset.adapters.dali import ExternalSource

stream = Stream(sys.argv[1], "train", batch_size=8, image=None, fields=("png",), seed=7, num_threads=1)
source = ExternalSource(stream, ("png", "label", "id"))

@pipeline_def(batch_size=stream.batch_size, num_threads=1, device_id=None)
def decoded():
    encoded, labels, ids = fn.external_source(source, num_outputs=3, batch=True, cycle="raise")
    return fn.decoders.image(encoded, device="cpu"), labels, ids

batches = decoded()
batches.build()
for epoch in range(2):
    for _ in range(len(source)):
        images, labels, ids = batches.run()
        rows = [hashlib.sha256(images.at(slot).tobytes()).hexdigest() for slot in range(stream.batch_size)]
        print(json.dumps([rows, labels.as_array().tolist(), ids.as_array().tolist()]))
    try:
        batches.run()
    except StopIteration:
        batches.reset()
"""


@pytest.mark.nightly
def test_a_pipeline_of_dali_gives_the_batches_of_the_stream_epoch_after_epoch(make, shards):
    assert venvs.is_current(venvs.PEERS, venvs.REQUIREMENTS), "run `make peers` first"
    words = [str(venvs.python_of(venvs.PEERS)), "-c", PIPELINE, shards]
    environment = {"PYTHONPATH": str(venvs.REPOSITORY), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    expected = [batch for epoch in range(2) for batch in make(**RAW).epoch(epoch)]
    for (rows, labels, ids), batch in zip(found, expected, strict=True):
        assert (labels, ids) == (batch["label"].tolist(), batch["id"].tolist())
        decoded = [np.asarray(Image.open(io.BytesIO(each)).convert("RGB")).tobytes() for each in batch["png"]]
        assert rows == [hashlib.sha256(pixels).hexdigest() for pixels in decoded]


def test_encoded_images_come_as_one_array_of_bytes_for_each_sample(make):
    outputs = list(as_dali_reads(ExternalSource(make(**RAW), ("png", "label")), 1))
    for (encoded, labels), batch in zip(outputs, make(**RAW).epoch(0), strict=True):
        assert [(each.dtype, each.ndim) for each in encoded] == [(np.dtype(np.uint8), 1)] * 8
        assert [each.tobytes() for each in encoded] == batch["png"]
        assert np.array_equal(labels, batch["label"])
        assert Image.open(io.BytesIO(encoded[0].tobytes())).size == (8, 8)


def test_a_name_that_batches_do_not_have_is_refused(make):
    with pytest.raises(ConfigError, match="no 'jpg'; they have image, label, weight, id"):
        ExternalSource(make(), ("jpg", "label"))


@pytest.mark.parametrize("flip", [True, "alternating"])
def test_flips_that_are_left_to_the_device_may_be_taken(make, flip):
    image = ImageSpec(size=8, crop=PadCrop(1), flip=flip)
    source = ExternalSource(make(image=image), ("flip",))
    assert next(iter(source))[0].tolist() == next(make(image=image).epoch(0))["flip"].tolist()


def test_what_a_transform_makes_may_be_taken(make):
    source = ExternalSource(make(transform=lambda row, rng: {"double": 2 * row["label"]}), ("double",))
    assert next(iter(source))[0].tolist() == (2 * next(make().epoch(0))["label"]).tolist()


def test_the_state_of_a_step_goes_on_there(make):
    stream, again = make(), make()
    again.load_state_dict(json.loads(stream.state(2, 5).to_json()))
    rest = list(as_dali_reads(ExternalSource(again, ("id",)), 1))
    assert [ids.tolist() for (ids,) in rest] == [batch["id"].tolist() for batch in stream.epoch(2, 5)]


def test_a_sample_without_the_field_is_named(tmp_path):
    samples = [
        StoredSample(key="a", fields=(("png", b"x"), ("json", b"{}")), label=-1, source=0),
        StoredSample(key="b", fields=(("png", b"y"),), label=-1, source=1),
    ]
    write_shard_set(open_storage(str(tmp_path)), {"all": samples}, num_shards=1, num_classes=0)
    stream = Stream(tmp_path, "all", batch_size=2, image=None, fields=("json",))
    with pytest.raises(ConfigError, match="has no field 'json'"):
        next(iter(ExternalSource(stream, ("json",))))
