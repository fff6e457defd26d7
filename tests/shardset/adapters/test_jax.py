"""Global arrays over four devices of the CPU, in a separate process: JAX reads their number when
it starts.
"""

import sys

import pytest

from tests.makers import documented

START = """
import itertools, sys
import jax, numpy as np
from jax.sharding import PartitionSpec
from shardset import ImageSpec, PadCrop, Stream
from shardset.adapters.jax import GlobalBatches
from shardset.errors import ConfigError

def make(**options):
    image = ImageSpec(size=8, crop=PadCrop(1))
    options = {"batch_size": 8, "image": image, "num_threads": 1, **options}
    return Stream(sys.argv[1], "train", **options)

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType[sys.argv[2]],))
"""


def run(shards, code, axis_type="Auto"):
    """What Python prints in a process with four devices."""
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    words = [sys.executable, "-c", START + code, shards, axis_type]
    return documented.run(words, documented.REPOSITORY, **devices)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_the_batches_and_states_are_those_of_the_stream_over_all_devices(shards, axis_type):
    code = """
batches = GlobalBatches(make(), mesh)
for epoch in range(2):
    found = list(batches)
    assert len(found) == len(batches) == 7
    for batch, expected in zip(found, make().epoch(epoch), strict=True):
        assert batch.keys() == expected.keys()
        for name, array in batch.items():
            assert isinstance(array, jax.Array) and array.sharding.spec == PartitionSpec("data")
            assert [shard.data.shape[0] for shard in array.addressable_shards] == [2, 2, 2, 2]
            assert np.array_equal(array, expected[name])
mean = jax.jit(lambda batch: batch["image"].mean())(found[0])
print(round(float(mean), 3) == round(float(np.asarray(found[0]["image"]).mean()), 3))
iterator, again = iter(batches), GlobalBatches(make(), mesh)
next(iterator), next(iterator)
again.load_state_dict(batches.state_dict())
assert [batch["id"].tolist() for batch in iterator] == [batch["id"].tolist() for batch in again]
"""
    assert run(shards, code, axis_type) == "True\n"


def test_what_does_not_fit_the_mesh_is_refused(shards):
    code = """
try:
    GlobalBatches(make(rank=1, world_size=2), mesh)
except ConfigError as error:
    print(error)
for words in ((make(), mesh, "model"), (make(batch_size=6), mesh)):
    try:
        next(iter(GlobalBatches(*words)))
    except ValueError as error:
        print("model" in str(error), "evenly divide" in str(error))
"""
    rank, axis, size = run(shards, code).splitlines()
    assert "rank 1 of 2, but this is process 0 of 1 of JAX; pass rank=jax.process" in rank
    assert (axis, size) == ("True False", "False True")
