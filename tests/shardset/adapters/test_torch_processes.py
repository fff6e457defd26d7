"""Two real processes of torch.distributed or jax.distributed,
whose streams are the same or differ.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.makers.documented import run
from tests.makers.ports import free_port
from tests.makers.shardset import new_set, png_samples

TORCH = """
import os, sys
import torch.distributed as distributed
from shardset import Stream
from shardset.adapters.torch import BatchDataset

rank = int(sys.argv[2])
distributed.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
"""
JAX = """
import os, sys
import jax
rank = int(sys.argv[2])
jax.distributed.initialize(sys.argv[3].removeprefix("tcp://"), 2, rank)
from shardset import Stream
from shardset.adapters.grain import StreamIterDataset as BatchDataset
"""
MAKE = """
from shardset.errors import ConfigError
whole = Stream(sys.argv[1], "train", batch_size=8, image=None, rank=0, world_size=1)
if rank == 0:
    BatchDataset(whole)  # of one process, so nothing is compared
for second in ({}, {"seed": 8}, {"url": sys.argv[4]}, {"num_lanes": 2}):
    choice = {"url": sys.argv[1], **(second if rank else {})}
    try:
        choice = {"batch_size": 4, "image": None, "rank": rank, "world_size": 2, **choice}
        BatchDataset(Stream(choice.pop("url"), "train", **choice))
        print("same", flush=True)
    except ConfigError as error:
        print(error, flush=True)
os._exit(0)
"""
DIFFERENCES = (
    "seed=0 in process 0 and seed=8 in process 1; give all of them the same shard set",
    "manifest=",
    "num_lanes=2",
)


@pytest.mark.parametrize("library", [TORCH, JAX])
def test_processes_whose_streams_differ_are_told_what_differs(shards, tmp_path, library):
    new_set(png_samples("train", 48, size=8), tmp_path, num_shards=3)
    address = f"tcp://127.0.0.1:{free_port()}"

    def said_by(rank):
        words = [sys.executable, "-c", library + MAKE, shards, str(rank), address, str(tmp_path)]
        return run(words, tmp_path, JAX_PLATFORMS="cpu")

    with ThreadPoolExecutor() as both:
        said = list(both.map(said_by, range(2)))
    for text in said:
        lines = [line for line in text.splitlines() if line.startswith(("same", "processes read"))]
        assert [line == "same" for line in lines] == [True, False, False, False], said
    assert all(name in said[0] for name in DIFFERENCES), said
