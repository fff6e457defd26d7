"""What processes say to each other, here between threads: `sum_hosts` of each is a sum over all of
them.
"""

import re
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardset.errors import ConfigError
from tests.makers.ports import free_port
from tests.makers.training import shard_set, tiny_config
from trainer.agreement import check_agreement
from trainer.data.splits import open_data
from trainer.errors import PeerLost
from trainer.plan import plan_of
from trainer.runtime import torchtpu, xla
from trainer.runtime.base import Single, replica_key
from trainer.runtime.distributed import Ddp
from trainer.runtime.launch import choose, launch, watched_launcher


class Threads(Single):
    """One of several hosts of this process; `table` is common to all of them."""

    def __init__(
        self, host: int, num_hosts: int, table: list[Any], barrier: threading.Barrier
    ) -> None:
        super().__init__("fp32")
        self.host, self.num_hosts = host, num_hosts
        self._table, self._barrier = table, barrier

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        self._table.append(list(values))
        self._barrier.wait(600)
        sums = [sum(column) for column in zip(*self._table, strict=True)]
        if self._barrier.wait(600) == 0:
            self._table.clear()
        self._barrier.wait(600)
        return sums


def over(hosts, call):
    """What the call returns on each of the hosts."""
    table: list[Any] = []
    barrier = threading.Barrier(len(hosts))
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(lambda host: call(Threads(host, len(hosts), table, barrier)), hosts))


@given(st.lists(st.text(), min_size=1, max_size=5))
@settings(max_examples=10)
def test_every_host_gets_the_text_of_the_first(texts):
    received = over(range(len(texts)), lambda one: one.text_of_master(texts[one.host]))
    assert received == texts[:1] * len(texts)


def test_hosts_that_differ_are_refused_with_both_values(tmp_path):
    url = shard_set(tmp_path / "set")
    configs = [tiny_config(url, tmp_path, seed=seed, window=4 + seed) for seed in range(2)]
    sets = [replace(open_data(one, 0, 1), manifest_digest=f"of {one.seed}") for one in configs]
    facts = [plan_of(*pair, Single("fp32")).facts for pair in zip(configs, sets, strict=True)]
    over(range(2), lambda one: check_agreement(one, facts[0], facts[0]))

    def refused(one: Threads) -> str:
        with pytest.raises(ConfigError) as error:
            check_agreement(one, facts[one.host], facts[0])
        return str(error.value)

    told, text = over(range(2), refused)
    assert "another host says how" in told
    for difference in (
        "manifest digest is 'of 0' on host 0 and 'of 1' on host 1",
        "seed is 0 on host 0 and 1 on host 1",
        r'order is .*"L":8,.*"w":4}. on host 0 and .*"L":8,.*"w":5}. on host 1',
    ):
        assert re.search(difference, text)


@pytest.mark.parametrize(
    ("world", "passes", "message"),
    [(9, 1, "9 devices; use at least 9"), (4, 4, "4 devices in each of 4 passes")],
)
def test_a_batch_without_a_sample_for_every_device_is_refused(world, passes, message):
    here = Single("fp32")
    here.num_hosts = world
    with pytest.raises(ConfigError, match=message):
        here.num_rows(8, passes)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4096))
def test_every_process_brings_the_fewest_rows_that_divide_over_its_devices_and_passes(
    hosts, local_devices, passes, batch
):
    assume(batch >= hosts * local_devices * passes)

    class Pod(Single):
        num_devices = hosts * local_devices

    here = Pod("fp32")
    here.num_hosts = hosts
    rows, unit = here.num_rows(batch, passes), local_devices * passes
    assert rows % unit == 0
    assert rows - unit < -(-batch // hosts) <= rows
    assert here.num_rows(hosts * unit * 3, passes) == 3 * unit


def never(runtime, config):
    pytest.fail("it was started")


def test_processes_that_would_know_nothing_of_each_other_are_refused(
    monkeypatch,
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes.*all of the data"):
        launch(tiny_config(None, "run", strategy="spmd"), never)


def test_a_process_of_replicas_that_is_lost_is_told_of(monkeypatch):
    monkeypatch.setenv(xla.HEARTBEAT_ADDRESS, "")
    with (
        pytest.raises(PeerLost, match="a process of this host ended; its error is above"),
        watched_launcher(["127.0.0.1"], 0),
    ):
        raise BrokenProcessPool


@pytest.fixture
def alone(monkeypatch):
    """A process of ddp that has joined no group."""
    names = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return Ddp("fp32")


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigError, match="RANK is first, expected a whole number"):
        Ddp("fp32")


@pytest.mark.parametrize(
    ("local", "master", "host"),
    [(2, "HOST", "127.0.0.1"), (1, "localhost", "127.0.0.1"), (1, "HOST", "HOST")],
)
@pytest.mark.usefixtures("alone")
def test_heartbeats_of_one_machine_stay_on_it(monkeypatch, local, master, host):
    names = {"HOST": socket.gethostname()}
    values = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": local, "MASTER_PORT": free_port()}
    for name, value in (values | {"MASTER_ADDR": names.get(master, master)}).items():
        monkeypatch.setenv(name, str(value))
    with ExitStack() as exits:
        address = Ddp("fp32").heartbeat_address(exits)
        assert address is not None
        assert (address.host, len(address.token)) == (names.get(host, host), 32)


def test_a_ddp_process_alone_asks_nobody_at_every_step(alone):
    # It would wait for its device each time.
    assert alone.sum_hosts([3, 2**40]) == [3, 2**40]
    assert alone.any_host(True)


def test_processes_of_ddp_wait_for_each_other_as_long_as_the_stall_timeout_says(alone, monkeypatch):
    options: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: options.update(given))
    monkeypatch.setattr(alone, "_store", dist.HashStore())
    alone.connect(900)
    assert options["timeout"] == options["store"].timeout == timedelta(seconds=900)


def test_what_a_strategy_can_not_do_on_cpus_is_refused(alone, monkeypatch):
    alone.num_hosts = 2
    with pytest.raises(ConfigError, match="BatchNorm for CUDA devices only"):
        alone.synchronize_norms(torch.nn.BatchNorm2d(3))
    monkeypatch.setattr(xla, "select_device", lambda: "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(ConfigError, match=r"several replicas on the CPU.* --strategy spmd"):
        launch(tiny_config(None, "run", strategy="replica"), never)


def test_a_process_of_torchtpu_s_launch_takes_part_in_it(monkeypatch):
    assert choose("auto") != "ddp"
    for name in (torchtpu.ADDRESSES, torchtpu.TOPOLOGY, "RANK"):
        monkeypatch.setenv(name, "1")
    assert choose("auto") == "ddp"
    assert choose("single") == "single"


def test_a_process_without_torchtpu_s_launch_is_told_how_to_start():
    with pytest.raises(
        ConfigError, match=r"ADDRESSES and .*TOPOLOGY not set.*python -m trainer.tpu.processes"
    ):
        torchtpu.check_environment({})
    with pytest.raises(ConfigError, match=r"TorchTPU: TORCH_TPU_TOPOLOGY not set"):
        torchtpu.check_environment({torchtpu.ADDRESSES: "localhost:1"})


@given(st.integers(0, 2**64 - 1))
def test_the_key_of_a_replica_fits_what_takes_it_and_is_nobody_elses(key):
    keys = {replica_key(key, replica) for replica in range(8)}
    assert len(keys) == 8
    assert all(0 <= found < 2**63 for found in keys)
    # of every checkpoint that a run on one host goes on from
    assert replica_key(key, 0) == key >> 1
