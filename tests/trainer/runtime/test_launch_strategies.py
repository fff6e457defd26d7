"""The same run under every strategy and through interruptions.

Each process starts torch anew: minutes in all.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.optim._optim_factory import get_optimizer_info, list_optimizers
from torch import nn

from shardset.program import FAILED, OK, PREEMPTED, USAGE
from shardset.storage.open import open_storage
from tests.makers.models import FLAT
from tests.makers.ports import free_port
from tests.makers.training import (
    NUM_EVAL,
    NUM_TRAIN,
    STEPS,
    clean_environment,
    finish,
    largest_difference,
    losses,
    read_records,
    tiny_config,
    trainer,
    when,
)
from tests.makers.xla_facts import WAYS
from trainer import config as configs
from trainer.config import (
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    Strategy,
)
from trainer.run_folder import checkpoint
from trainer.telemetry.sample_losses import read_losses

pytestmark = pytest.mark.slow

PLACE = "tests.trainer.runtime.test_launch_strategies"

CALM = OptimizerConfig(learning_rate=0.01)
"""At 0.05 the tiny net turns a rounding of 1e-7 into 1e-3 within 20 steps, on one device too:
nothing to compare.
"""

TOLERANCE = 1e-5
"""Between strategies over 21 steps: they add up in another order."""

ROUNDING = 1e-5
"""Between XLA and torch over seven steps, as a share of the weights: what Adam, AdaBelief and LAMB
make of small gradients is 3e-6.
"""

ROUNDINGS = {"nadam": 1e-4}
"""The same where powers of beta are float32."""

BF16 = 5e-2
"""The same where moments are bfloat16."""

READING_BACK = {
    *("adamp", "cadamp", "sgdp", "csgdp", "muon", "nmuon", "adamuon", "nadamuon"),
    *("kron", "kronc", "kronw", "novograd", "novogradc", "novogradw"),
}
"""The optimizers of timm whose steps depend on a number of the device."""

MORE_GRAPHS = {"adopt": 3, "radam": 4, "radabelief": 4, "adafactorbv": 4}
"""Graphs of those whose names have such a part, more than 2: ADOPT only notes the gradient in its
first step, the rectified ones divide by their moments from the sixth step on, and the decay of
adafactorbv begins at 0.
"""

START_S = 300
"""What a busy machine may take to import torch: a process waits for the others from then on."""


def succeed(config, **how: Any):
    """Runs the trainer in a separate process; returns its output."""
    code, output = finish(trainer(config, **how))
    assert code == OK, output
    return output


def in_json(config):
    return json.dumps(configs.to_dict(config))


def script(name, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        capture_output=True, text=True, timeout=900, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the same numbers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(manifest, tmp_path_factory):
    """The folders of three epochs on one device in plain torch, with each norm."""
    folders = {norm: tmp_path_factory.mktemp(norm) for norm in ("batch", "group")}
    for norm, folder in folders.items():
        succeed(calm(manifest, folder, norm))
    return folders


def calm(manifest, folder, norm="group", **changes: Any):
    model = ModelConfig(name="trainer.model:tiny_resnet", norm=norm)
    return tiny_config(
        manifest, folder, epochs=3, model=model, optimizer=CALM, record_losses=True, **changes
    )


def has_the_losses_of(folder, plain):
    """Whether a run of three epochs has recorded every sample of another one, once, with its loss
    up to rounding.
    """
    found, wanted = (
        [sorted(zip(*epoch[:2], strict=True)) for epoch in read_losses(open_storage(str(one)))]
        for one in (folder, plain)
    )
    return all(
        [sample_id for sample_id, _ in one] == list(range(NUM_TRAIN))
        and largest_difference([loss for _, loss in one], [loss for _, loss in other])
        < 10 * TOLERANCE
        for one, other in zip(found, wanted, strict=True)
    )


def train(config, how):
    if "replicas" in how:
        script("tests.makers.replicas", str(how["replicas"]), in_json(config))
    else:
        succeed(config, **how)


@pytest.mark.parametrize(
    ("strategy", "how", "norm"),
    [
        ("spmd", {"devices": 4}, "batch"),
        ("ddp", {"processes": 3}, "group"),  # shares of 2, 3 and 3 samples, and one row of weight 0
        ("replica", {"replicas": 2}, "group"),
    ],
)
def test_a_strategy_equals_one_device(
    manifest,
    tmp_path,
    plain,
    strategy,
    how,
    norm,
):
    train(calm(manifest, tmp_path, norm, strategy=strategy), how)
    assert len(losses(tmp_path)) == 3 * STEPS
    assert largest_difference(losses(tmp_path), losses(plain[norm])) < TOLERANCE
    assert {record["samples"] for record in read_records(tmp_path, "eval")} == {NUM_EVAL}
    assert has_the_losses_of(tmp_path, plain[norm])
    if strategy == "spmd":
        # Two graphs for the train step, a third when its rate equals another number, and one for
        # the evaluation step.
        counts = [record["compilations"] for record in read_records(tmp_path, "epoch")]
        assert counts[-2] == counts[-1] <= 4
    if strategy == "ddp":
        assert len(list((tmp_path / "logs").iterdir())) == 3


def test_a_run_moves_between_strategies_and_world_sizes_in_mid_epoch(manifest, tmp_path, plain):
    lives: list[tuple[Strategy, dict[str, int], int | None]] = [
        ("spmd", {"devices": 3}, 5),
        ("ddp", {"processes": 2}, 11),
        ("replica", {}, 16),
        ("single", {}, None),
    ]
    for strategy, how, stop in lives:
        succeed(calm(manifest, tmp_path, strategy=strategy, max_steps=stop), **how)
    assert largest_difference(losses(tmp_path), losses(plain["group"])) < TOLERANCE
    assert has_the_losses_of(tmp_path, plain["group"])
    digests = [record["key_digest"] for record in read_records(tmp_path, "epoch")]
    assert len(digests) == 3
    assert len(set(digests)) == 1
    alone, together = (
        succeed(calm(manifest, tmp_path, strategy=strategy), verb="evaluate", processes=processes)
        for strategy, processes in (("single", 0), ("ddp", 2))
    )
    evaluated = re.findall(r"val accuracy .* loss [0-9.]+", alone)[-1]
    assert evaluated in together
    assert alone.partition("class: mistakes")[2] in together


@pytest.mark.nightly
def test_images_are_mixed_without_moving_between_devices(manifest, tmp_path):
    model, regularize = ModelConfig(name=FLAT), RegularizeConfig(mixup=0.4, cutmix=1.0)
    config = tiny_config(
        manifest, tmp_path / "run", epochs=1, model=model, regularize=regularize, strategy="spmd"
    )
    dump = {"XLA_FLAGS": f"--xla_dump_to={tmp_path / 'graphs'} --xla_dump_hlo_as_text"}
    succeed(config, devices=4, environment=dump)
    graphs = [path.read_text() for path in (tmp_path / "graphs").glob("*after_optimizations.txt")]
    # Gradients and sums are added up; no image goes from one device to another.
    exchanges = (
        "all-reduce|all-gather|reduce-scatter|collective-permute|collective-broadcast|all-to-all"
    )
    exchanged = {
        found for graph in graphs for found in re.findall(rf"= (\S+) ({exchanges})", graph)
    }
    assert exchanged == {
        (shape, "all-reduce") for shape in ("f32[192,10]{1,0}", "f32[10]{0}", "f32[]")
    }


# --- traps of torch_xla ---------------------------------------------------------------------------


@pytest.mark.nightly
def test_facts_of_spmd_on_four_devices():
    facts = json.loads(script("tests.makers.xla_facts").splitlines()[-1])
    # Labels are cut like images: one spec for both would leave them whole without a word.
    assert "devices=[4]" in facts["shardings"]["label"]
    assert "devices=[4,1,1,1]" in facts["shardings"]["image"]
    assert facts["label"] == list(range(8))
    assert facts["part"] == [0, 1, 4]
    # Rank and world size of torch_xla are 0 and 1 on every host: a pod that reads by them trains on
    # the same data.
    assert facts["part of a pod"] == [3, 4, 0, 1, 0]
    assert facts["alone"] == facts["over the mesh"] == facts["values"]
    assert facts["answers"] == [True, False, True, False]
    assert "BatchNorm with momentum=None" in facts["refusal"]
    for way, (graphs, far) in facts["steps"].items():
        assert graphs <= 2, way  # the first step has no moments
        assert far < ROUNDING, way


def test_spmd_takes_the_steps_of_one_device_at_a_rate_that_changes():
    found = json.loads(script("tests.makers.xla_facts", *WAYS).splitlines()[-1])
    assert found.keys() == WAYS.keys()
    for way, (graphs, far) in found.items():
        assert graphs <= 2, way
        assert far < ROUNDING, way


@pytest.mark.nightly
def test_every_optimizer_takes_the_steps_of_one_device_or_is_refused_in_a_sentence():
    # Those that a CPU can run; one process for each few, as a compiled graph keeps its memory.
    names = [
        name
        for name in map(str, list_optimizers())
        if not get_optimizer_info(name).second_order and not name.startswith(("bnb", "fused"))
    ]
    found = {}
    for start in range(0, len(names), 12):
        lines = script("tests.makers.xla_facts", *names[start : start + 12]).splitlines()
        found |= json.loads(lines[-1])
    refused = {name for name, result in found.items() if isinstance(result, str)}
    assert refused == READING_BACK
    assert all("reads a number back from the device" in found[name] for name in refused)
    for name in found.keys() - refused:
        graphs, far = found[name]
        most = max([2, *(most for part, most in MORE_GRAPHS.items() if part in name)])
        assert graphs <= most, name
        assert far < (BF16 if "factorbv" in name else ROUNDINGS.get(name, ROUNDING)), name


def test_the_hosts_of_a_slice_go_on_together_as_one_device_would(manifest, tmp_path, plain):
    # Three hosts of two devices share eight samples: rows of 4, of which two hosts have 3 and one
    # has 2.
    exchange = tmp_path / "exchange"
    homes = [tmp_path / f"home-{host}" for host in range(3)]
    config = calm(manifest, homes[0] / "run")
    succeed(replace(config, max_steps=3))
    for home in homes[1:]:
        shutil.copytree(homes[0], home)
    before = contents(homes[1])
    # Host 1 is asked to stop when it has sent the images of step 12, up to three steps ahead. A
    # step sends four fields.
    stop = f"1-{4 * (12 - 3)}"
    config = replace(config, run_dir="run", strategy="spmd")
    exchange.mkdir()
    port = free_port()
    words = [
        (host, 3, 2, port, exchange, home, stop if host == 1 else "")
        for host, home in enumerate(homes)
    ]
    ended = [
        finish(one)
        for one in [python("tests.makers.pod", *map(str, own), in_json(config)) for own in words]
    ]
    assert {code for code, _ in ended} == {PREEMPTED}, ended
    outputs = [output for _, output in ended]

    saved = {int(step) for output in outputs for step in re.findall(r"saved at step (\d+)", output)}
    (last,) = [commit.step for commit in checkpoint.commits(open_storage(str(homes[0] / "run")))][
        -1:
    ]
    assert saved == {last}
    assert STEPS < last <= 2 * STEPS
    assert largest_difference(losses(homes[0] / "run"), losses(plain["group"])[:last]) < TOLERANCE
    assert {record["samples"] for record in read_records(homes[0] / "run", "eval")} == {NUM_EVAL}
    # Each host writes its log; host 0 writes all else.
    for host, home in enumerate(homes[1:], 1):
        log = f"run/logs/host-{host:03d}.log"
        assert "resumed at step 3" in (home / log).read_text()
        assert {name: data for name, data in contents(home).items() if name != log} == before


def contents(folder):
    """The files below a folder by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def shared_model(num_classes):
    """A model whose second and third layer have the same weights."""
    layers = [
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.Linear(16, 16),
        nn.Linear(16, 16),
        nn.BatchNorm1d(16),
    ]
    net = nn.Sequential(*layers, nn.Linear(16, num_classes))
    net[3].weight = net[2].weight
    return net


@pytest.mark.nightly
def test_a_replica_keeps_shared_weights_and_goes_on_from_its_checkpoint_with_one_graph(
    manifest, tmp_path
):
    # Equal numbers that were sent to the device, such as counts of steps, were one input of the
    # first step's graph.
    config = tiny_config(
        manifest, tmp_path / "single", model=ModelConfig(name=f"{PLACE}:shared_model"),
        optimizer=replace(CALM, name="adamw", learning_rate=0.001, kwargs={"eps": 0.001}),
    )  # fmt: skip
    succeed(config)
    replica = replace(config, strategy="replica", run_dir=str(tmp_path / "replica"))
    succeed(replace(replica, max_steps=3))
    succeed(replica)
    assert largest_difference(losses(tmp_path / "replica"), losses(tmp_path / "single")) < TOLERANCE
    found = checkpoint.newest(open_storage(replica.run_dir), pytest.fail)
    assert found is not None
    assert torch.equal(found[1]["model"]["2.weight"], found[1]["model"]["3.weight"])


def changing_model(num_classes):
    """A model whose output has another shape in each step."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.calls = nn.Linear(192, num_classes + 2 * STEPS), 0

        def forward(self, images_NCHW: Any) -> Any:
            self.calls += 1
            return self.head(images_NCHW.flatten(1)).repeat(1, 1)[:, : num_classes + self.calls]

    return Changing()


@pytest.mark.nightly
def test_a_model_that_would_compile_in_every_step_is_refused(manifest, tmp_path):
    model = ModelConfig(name=f"{PLACE}:changing_model")
    code, output = finish(trainer(tiny_config(manifest, tmp_path, strategy="replica", model=model)))
    assert code == USAGE, output
    assert "train step compiled 9 graphs, expected at most 8" in output


# --- interruptions --------------------------------------------------------------------------------


def test_a_process_whose_peer_dies_says_so_in_one_line(manifest, tmp_path):
    # Without torchrun, which would end the others itself.
    config = tiny_config(manifest, tmp_path, epochs=500, strategy="ddp")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    left, right = (
        trainer(config, environment={"RANK": rank, "LOCAL_RANK": rank, **shared}) for rank in "01"
    )
    when(tmp_path / "metrics.jsonl", lambda found: len(found) > 3, left)
    right.kill()
    assert finish(right)[0] == -signal.SIGKILL
    code, output = finish(left, timeout_s=60 + START_S)
    assert code == FAILED, output
    assert (
        f"PeerLost: another process of this run died: process 1 (pid {right.pid} on"
        in output.splitlines()[-1]
    )
    assert "another process of this run died" in (tmp_path / "logs/host-000.log").read_text()


def mortal_model(num_classes):
    """A model that kills the first life of process 0 once a checkpoint is committed."""

    class Mortal(nn.Linear):
        calls = 0

        def forward(self, images_NCHW: Any) -> Any:
            self.calls += 1
            life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
            if self.calls == 4 and life == ("0", "0"):
                while not list(Path(os.environ["OF_RUN"]).glob("checkpoints/*/commit.json")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(images_NCHW.flatten(1))

    return Mortal(192, num_classes)


def test_torchrun_starts_killed_processes_again_and_the_run_goes_on_to_its_end(manifest, tmp_path):
    # The second process 0 comes late, so the others find the addresses of the first one in the
    # store, which torchrun keeps.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "late = os.environ.get('RANK') == '0' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '1'\n"
        "time.sleep(10 if late else 0)\n"
    )
    config = tiny_config(
        manifest, tmp_path / "run", strategy="ddp", checkpoint_every_steps=1,
        model=ModelConfig(name=f"{PLACE}:mortal_model"),
    )  # fmt: skip
    environment = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PET_MAX_RESTARTS": "1", "OF_RUN": config.run_dir,
    }  # fmt: skip
    output = succeed(config, processes=2, environment=environment)
    assert "resumed at step" in output
    assert len(losses(tmp_path / "run")) == 2 * STEPS
    assert len(read_records(tmp_path / "run", "final")) == 1


def sleeping_model(num_classes):
    """A model that never gets through its first step."""

    class Sleeping(nn.Linear):
        def forward(self, images_NCHW: Any) -> Any:
            time.sleep(600)

    return Sleeping(1, num_classes)


@pytest.mark.nightly
def test_a_run_that_stands_still_ends_with_a_traceback_of_where(manifest, tmp_path):
    model = ModelConfig(name=f"{PLACE}:sleeping_model")
    code, output = finish(
        trainer(tiny_config(manifest, tmp_path, model=model, stall_timeout_s=60)),
        timeout_s=120 + START_S,
    )
    assert code == FAILED, output
    assert "Timeout" in output
    assert "in forward" in output


def python(name, *arguments: str):
    """A module of the tests in a separate process, which a test ends."""
    return subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
