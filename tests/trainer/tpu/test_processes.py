"""The processes of one machine with TorchTPU: what each is told, how they end, and a real training
by them.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardset.program import OK, PREEMPTED, USAGE
from tests.makers.training import (
    arguments,
    clean_environment,
    finish,
    largest_difference,
    losses,
    shard_set,
    tiny_config,
    trainer,
)
from trainer.config import ModelConfig, OptimizerConfig
from trainer.runtime import torchtpu
from trainer.tpu import processes

# Ends with the code in its list for this process; or tells that it waits, and ends with 3 when it
# is told to.
STAND_IN = """\
import os, signal, sys, time
from pathlib import Path
code = sys.argv[1].split(",")[int(os.environ["RANK"])]
if code != "wait":
    sys.exit(int(code))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
Path(f"waits-{os.environ['RANK']}").touch()
time.sleep(600)
"""
RUN = """\
import os, sys
from trainer.tpu import processes
told = processes.environments_of(dict(os.environ), 2)
sys.exit(processes.run([sys.executable, *sys.argv[1:]], told))
"""


def start(folder, *words: str):
    """Two processes of a command, under the launcher."""
    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words],
        cwd=folder, env=clean_environment() | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_processes_are_numbered_over_all_machines_and_meet_at_the_first():
    base = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OTHER": "kept",
    }
    told = processes.environments_of(base, 4)
    assert [one["RANK"] for one in told] == ["4", "5", "6", "7"]
    assert [one["LOCAL_RANK"] for one in told] == ["0", "1", "2", "3"]
    shared = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert all(one.items() >= (base | shared).items() for one in told)


def test_a_machine_has_its_share_of_all_processes():
    environment = {torchtpu.ADDRESSES: "a:1,a:2,b:1,b:2", "NNODES": "2"}
    assert torchtpu.num_local_processes(environment) == 2


@pytest.mark.parametrize(("codes", "expected"), [("0,0", 0), ("0,3", 3)])
def test_the_launcher_ends_with_the_code_of_a_process_that_failed(tmp_path, codes, expected):
    process = start(tmp_path, "-c", STAND_IN, codes)
    assert finish(process)[0] == expected


@pytest.mark.slow
def test_a_process_that_is_killed_counts_as_in_a_shell(tmp_path):
    process = start(tmp_path, "-c", "import os; os.kill(os.getpid(), 9)")
    assert finish(process)[0] == 128 + signal.SIGKILL


@pytest.mark.slow
def test_sigterm_reaches_every_process_and_their_code_comes_back(tmp_path):
    process = start(tmp_path, "-c", STAND_IN, "wait,wait")
    while len(list(tmp_path.glob("waits-*"))) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == PREEMPTED


def test_without_torchtpu_the_launcher_says_what_to_install(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainer.tpu.processes", "--epochs=1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == USAGE
    assert "pip install 'shardset[trainer,torchtpu]'" in done.stderr


@pytest.mark.nightly
def test_processes_of_the_launcher_train_as_one_device_does(tmp_path):
    config = tiny_config(
        shard_set(tmp_path / "set"),
        tmp_path / "single",
        model=ModelConfig(name="trainer.model:tiny_resnet", norm="group"),
        optimizer=OptimizerConfig(learning_rate=0.001),  # a larger one amplifies roundings
    )
    code, output = finish(trainer(config))
    assert code == OK, output
    words = [*arguments(config), "--set=strategy=ddp", f"--set=run_dir={tmp_path / 'two'}"]
    code, output = finish(start(tmp_path, *words))
    assert code == OK, output
    assert largest_difference(losses(tmp_path / "two"), losses(tmp_path / "single")) < 1e-5
