"""What holds of the spmd runtime on four XLA:CPU devices, as JSON: run as `python -m
tests.makers.xla_facts`, or with the names of optimizers or WAYS for these alone.

A separate process, because torch_xla's choice of devices and of SPMD is for a process' whole
life.
"""

import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardset.errors import ConfigError
from tests.makers.models import batch_of
from trainer.config import ModelConfig, OptimizerConfig, RegularizeConfig
from trainer.model.batch_transforms import with_mix
from trainer.model.learner import Learner
from trainer.recipes import digits_smoke
from trainer.run_folder import checkpoint
from trainer.runtime.base import Single
from trainer.runtime.launch import running
from trainer.runtime.xla import Spmd

SMALL, NORMED = (f"tests.makers.xla_facts:{name}" for name in ("small", "Normed"))

STEP_RATES = (0.02, 0.05, 0.03, 0.07, 0.004, 0.005, 0.006)
"""Learning rates that move the weights by about their size, so that their rounding hides nothing;
the last ones less. RAdam begins to divide by its moments in the sixth step.
"""

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dampening": ("momentum", {"dampening": 0.5}),
    "trust_clip": ("lars", {"trust_clip": True}),
    "adamw": ("adamw", {}),
}
"""Optimizers and options that mixed up steps when the rate was a tensor, and the usual one."""


def small(num_classes, grouped=False):
    """A model that compiles in a second, with a GroupNorm if asked for."""
    norm = nn.GroupNorm(4, 16) if grouped else nn.LayerNorm(16)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 16), norm, nn.ReLU(), nn.Linear(16, num_classes)
    )


class Normed(nn.Module):
    """A layer, a norm that is called by keyword, and the head.

    The statistics are of eight values of each pass.
    """

    def __init__(self, num_classes: int, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(192, 16), nn.Linear(16, num_classes)
        self.norm = nn.BatchNorm1d(16, momentum=momentum)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits: torch.Tensor = self.head(self.norm(input=self.layer(images_NCHW.flatten(1))).relu())
        return logits


def averaging(num_classes: int) -> nn.Module:
    """A norm whose statistics are means of all batches."""
    return Normed(num_classes, momentum=None)


def main() -> None:
    """Prints the facts."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    with running("spmd", "fp32") as spmd:
        if names := sys.argv[1:]:
            print(json.dumps({name: _optimizer(spmd, name) for name in names}))
            return
        facts = {
            **_placing(spmd),
            **_agreeing(spmd),
            "steps": _steps(spmd),
            "refusal": _refusal(spmd),
        }
        print(json.dumps({**facts, "part of a pod": _part_of_a_pod()}))


def _placing(spmd: Any) -> dict[str, object]:
    import torch_xla

    batch = spmd.to_device(
        {"image": torch.zeros(8, 4, 4, 3, dtype=torch.uint8), "label": torch.arange(8)}
    )
    spec = {name: torch_xla._XLAC._get_xla_sharding_spec(tensor) for name, tensor in batch.items()}
    return {
        "shardings": spec,
        "label": batch["label"].cpu().tolist(),
        "part": [spmd.host, spmd.num_hosts, spmd.num_devices],
    }


def _agreeing(spmd: Any) -> dict[str, object]:
    values = [0, 1, 70000, 2**48 - 1]
    alone = spmd.sum_hosts(values)
    spmd.num_hosts = 2
    over_the_mesh = spmd.sum_hosts(values)
    questions = [spmd.ask_hosts(flag) for flag in (True, False)]
    spmd.num_hosts = 1
    questions += [spmd.ask_hosts(flag) for flag in (True, False)]
    answers = [answer() for answer in questions]
    return {"values": values, "alone": alone, "over the mesh": over_the_mesh, "answers": answers}


def _steps(spmd: Any) -> dict[str, list[float]]:
    """For each way to learn: the graphs it compiled, and how far its weights end from those of
    plain torch.
    """
    base = replace(digits_smoke(), model=ModelConfig(name=SMALL), global_batch_size=16)
    ways = {
        "binary": replace(base, regularize=RegularizeConfig(loss="bce", label_smoothing=0.1)),
        "two passes": replace(base, accumulate=2),
    }
    ways["statistics"] = replace(
        ways["two passes"],
        model=ModelConfig(name=NORMED),
        regularize=RegularizeConfig(ema_decay=0.9),
    )
    ways["everything"] = replace(
        base,
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.01, kwargs={"eps": 0.001}),
        model=ModelConfig(name=SMALL, kwargs={"grouped": True}),
        accumulate=2,
        regularize=RegularizeConfig(
            ema_decay=0.9, clip_norm=0.1, mixup=0.4, cutmix=1.0, label_smoothing=0.1
        ),
    )
    return {name: _step(spmd, config) for name, config in ways.items()}


def _optimizer(spmd: Any, way: str) -> list[float] | str:
    """The same of a way or an optimizer, which may also be refused."""
    name, kwargs = WAYS.get(way, (way, {}))
    optimizer = OptimizerConfig(name=name, weight_decay=0.01, kwargs=kwargs)
    base = replace(digits_smoke(), model=ModelConfig(name=SMALL), global_batch_size=16)
    try:
        return _step(spmd, replace(base, optimizer=optimizer))
    except ConfigError as error:
        return str(error)


def _refusal(spmd: Any) -> str:
    """What is said of a norm that averages over all batches."""
    model = ModelConfig(name="tests.makers.xla_facts:averaging")
    try:
        Learner(spmd, replace(digits_smoke(), model=model), 10, None)
    except ConfigError as error:
        return str(error)
    return ""


def _step(spmd, config):
    """The graphs, and the distance of the weights from those of plain torch at the end.

    Halfway a new learner continues with the state.
    """
    spmd.graphs.clear()
    states = []
    for runtime in (Single("fp32"), spmd):
        learner = Learner(runtime, config, 10, None)
        for step, rate in enumerate(STEP_RATES):
            if step == 2:
                learner = Learner(runtime, config, 10, _copied(learner))
            batch = with_mix(config, _batch(16, step), 0, step)
            placed = {name: torch.as_tensor(value) for name, value in batch.items()}
            learner.train_step(runtime.to_device(placed), rate, key=step, weight=16)
        states.append(learner.state())
    pairs = [
        (states[1][kind], states[0][kind])
        for kind in ("model", "ema")
        if states[0][kind] is not None
    ]
    far = max(_distance(left[name], right[name]) for left, right in pairs for name in right)
    return [spmd.graphs["train step"], far]


def _copied(learner: Learner) -> Any:
    """The state of a learner as its checkpoint has it.

    Copying it runs nothing on the devices of other hosts.
    """
    import torch_xla.core.xla_model as xm
    from torch_xla.debug import metrics

    xm.wait_device_ops()
    before = metrics.metric_data("ExecuteReplicatedTime")
    state = learner.state()
    assert metrics.metric_data("ExecuteReplicatedTime") == before
    stored: Any = {"identity": {}, **state}
    return checkpoint.state_from_bytes(checkpoint.state_to_bytes(stored), "here")


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """How far apart two tensors are, as a share of their largest number."""
    return ((left - right).abs().max() / right.abs().max()).item()


def _batch(size, seed):
    flip = torch.zeros(size, dtype=torch.bool)
    return {**batch_of(size, classes=10, seed=seed), "flip": flip}


def _part_of_a_pod() -> list[int]:
    """What a runtime reads as host 3 of 4, where rank and world size of torch_xla stay 0 and 1, and
    whose random numbers it draws.
    """
    import torch_xla.runtime as xr

    before = xr.process_index, xr.process_count
    xr.process_index, xr.process_count = lambda: 3, lambda: 4
    try:
        host = Spmd("fp32")
        return [host.host, host.num_hosts, xr.global_ordinal(), xr.world_size(), host.replica]
    finally:
        xr.process_index, xr.process_count = before


if __name__ == "__main__":
    main()
