"""Two real processes of torch.distributed or jax.distributed, whose streams are the same or differ."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, write_shard_set

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
choice = eval(sys.argv[4])[rank]
url = choice.pop("url", sys.argv[1])
whole = Stream(url, "train", batch_size=8, image=None, rank=0, world_size=1)
if rank == 0:
    BatchDataset(whole)  # of one process, so nothing is compared
try:
    BatchDataset(Stream(url, "train", **{"batch_size": 4, "image": None, "rank": rank, "world_size": 2, **choice}))
    print("same", flush=True)
except ConfigError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("other"))
    write_shard_set(open_storage(url), {"train": png_samples("train", 48, size=8)}, num_shards=3)
    return url


@pytest.mark.parametrize(
    ("library", "choice", "message"),
    [
        (TORCH, {}, "same"),
        (TORCH, {"url": None}, "processes read differently: manifest="),
        (TORCH, {"num_lanes": 2}, "num_lanes=2 in process 1"),
        (JAX, {"seed": 8}, "seed=0 in process 0 and seed=8 in process 1; give all of them the same shard set"),
    ],
)
def test_processes_whose_streams_differ_are_told_what_differs(shards, other, library, choice, message):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    choices = [{}, {**choice, "url": other} if "url" in choice else choice]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", library + MAKE, shards]
    running = [
        subprocess.Popen(
            [*words, str(rank), address, repr(choices)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    done = [process.communicate(timeout=240) for process in running]
    assert message in done[0][0], done
    assert ("same" if message == "same" else "processes read differently") in done[1][0], done
