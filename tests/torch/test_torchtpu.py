"""What the trainer relies on of TorchTPU, compared with the real package on a machine without a
TPU.
"""

import json
import re
import subprocess
from typing import Any

import pytest

from scripts import venvs
from shardset.program import OK, USAGE
from tests.makers.training import clean_environment, finish, tiny_config, trainer

pytestmark = pytest.mark.nightly

LAUNCHED = {"TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "TORCH_TPU_XPROF_SESSION_ID"}
"""What TorchTPU's launcher documents that every process needs."""
RENDEZVOUS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}


@pytest.fixture(scope="module")
def python():
    """The Python of the environment with TorchTPU."""
    assert venvs.is_current(venvs.TORCHTPU, venvs.TORCHTPU_PACKAGES), "run `make torchtpu` first"
    return str(venvs.python_of(venvs.TORCHTPU))


def facts(python, name, **environment: str):
    done = subprocess.run(
        [python, "-m", "tests.makers.torchtpu_facts", name],
        capture_output=True, text=True, timeout=600, env=clean_environment() | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_torch_loads_torchtpu_by_itself_and_finds_no_tpu_here(python):
    assert facts(python, "loading") == {
        "entry points": ["torch_tpu._loader:load"],
        "is loaded": True,
        "is available": False,
        "auto": "single",
        "device": "cpu",
    }


def test_torchtpu_has_the_names_that_the_trainer_calls(python):
    found = facts(python, "names")
    assert (
        found["set_tpu_launch_env"]
        == "(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None"
    )
    assert found["spmd_safe"] == ["func"]
    # The trainer asks torch.accelerator, because TorchTPU refuses this call to programs.
    assert "torch.accelerator.is_available" in found["is_available"]


def test_torchtpu_registers_the_device_and_the_back_ends_that_the_trainer_names(
    python,
):
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    assert facts(python, "device", **environment) == {
        "device": "tpu",
        "backends": {"cpu": "gloo", "tpu": "tpu_dist"},
        "is known": [True, True],
        "compile": True,
        "precisions": ["high", "highest"],
        "autocast": True,
        "seeds": True,
        "is cloud": True,
        "step": [2.0],
    }


def test_each_process_of_all_machines_gets_what_the_launcher_of_torchtpu_documents(
    python,
):
    # Without a TPU, what TorchTPU would detect is given; it sets the rest.
    detected = {
        "TORCH_TPU_TOPOLOGY": "2,2,1",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:1,localhost:2",
    }
    told = facts(python, "environment", WORKERS="[]", **detected)["told"]
    assert [set(one) | set(detected) for one in told] == [LAUNCHED | RENDEZVOUS] * 2
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in told} == {("2", "127.0.0.1")}
    assert len({one["MASTER_PORT"] for one in told}) == 1
    slice_of = {
        "WORKERS": '["10.0.0.1", "10.0.0.2"]',
        "TORCH_TPU_DEVICES_PER_HOST": "4",
        "TORCH_TPU_TOPOLOGY": "2x4",
    }
    told = facts(python, "environment", NUMBER="1", **slice_of)["told"]
    names = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    assert [[one[name] for name in names] for one in told] == [
        [str(rank), "8", "1", "10.0.0.1"] for rank in range(4, 8)
    ]
    assert len(set(told[0]["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(","))) == 8


@pytest.mark.parametrize(
    ("workers", "message"),
    [("[]", "TorchTPU can't tell how the chips of this machine are wired: .*got none"),
     ('["10.0.0.1", "10.0.0.2"]', "2 machines, .*--env TORCH_TPU_TOPOLOGY=")],
)  # fmt: skip
def test_a_machine_whose_chips_are_not_known_is_refused(python, workers, message):
    assert re.search(message, facts(python, "environment", WORKERS=workers)["error"])


def test_without_a_tpu_a_run_is_refused_until_torchtpu_is_left_out(python, tmp_path):
    # TorchTPU's first backward pass waits for a TPU, also that of a model on a CPU.
    config = tiny_config(None, tmp_path, fake_data=True, max_steps=2)
    code, output = finish(trainer(config, python=python))
    assert (code, "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in output) == (USAGE, True), output
    code, output = finish(
        trainer(config, python=python, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    )
    assert code == OK, output
