"""The same steps by three learners, one of each strategy: `single`, `ddp` and `fsdp`.

Run as a script under torchrun: `torchrun --nproc-per-node N -m tests.makers.sharded` prints one JSON object: for each
case the largest difference of `fsdp` from the others, what a process keeps, and how a run is refused.
"""

import io
import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardset.errors import ConfigError
from tests.makers.training import tiny_config
from trainer.config import ModelConfig, OptimizerConfig, RegularizeConfig, TrainConfig
from trainer.model.learner import Learner
from trainer.record import checkpoint_state
from trainer.record.checkpoint_parts import joined
from trainer.runtime.base import Runtime, TensorBatch
from trainer.runtime.distributed import Ddp
from trainer.runtime.fsdp import Fsdp
from trainer.runtime.single import Single

CLASSES, BATCH, NUM_STEPS = 5, 16, 4
GROUP_NORM = ModelConfig(name="trainer.model:tiny_resnet", norm="group")
TRANSFORMER = ModelConfig(name=f"{__name__}:transformer")
CALM = OptimizerConfig(learning_rate=0.01)
EVERYTHING = RegularizeConfig(label_smoothing=0.1, ema_decay=0.9, clip_norm=0.5)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"regularize": EVERYTHING, "accumulate": 2},
    "transformer": {"model": TRANSFORMER, "optimizer": replace(CALM, name="adamw"), "regularize": EVERYTHING},
    "shared weights": {"model": ModelConfig(name=f"{__name__}:shared_blocks")},
    "head rate": {"optimizer": replace(CALM, head_learning_rate=0.05)},
    "frozen": {"model": replace(GROUP_NORM, freeze=True)},
    **{name: {"optimizer": replace(CALM, name=name)} for name in ("lars", "lamb")},
}
"""What does not depend on how a batch is cut."""
CUT_CASES: dict[str, dict[str, Any]] = {
    "batch norm": {"model": ModelConfig(name="trainer.model:tiny_resnet"), "regularize": EVERYTHING},
    "mixup": {"regularize": replace(EVERYTHING, mixup=0.5)},
    "bf16": {"precision": "bf16", "model": TRANSFORMER},
    "bf16 batch norm": {"precision": "bf16", "model": ModelConfig(name="trainer.model:tiny_resnet")},
}
"""What only processes with the same share of a batch compute alike."""
REFUSED: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": replace(CALM, name="adamp")},
    "model": {"model": ModelConfig(name=f"{__name__}:scaled")},
}


class Scaled(nn.Linear):
    """A layer with a weight that has no dimension."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(192, num_classes)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(images_NCHW.flatten(1))


def scaled(num_classes: int) -> nn.Module:
    return Scaled(num_classes)


def transformer(num_classes: int) -> nn.Module:
    """A vision transformer of two blocks for pictures of 8 pixels."""
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=num_classes
    )


def shared_blocks(num_classes: int) -> nn.Module:
    """Three blocks of which the first and the last are one."""
    blocks = [nn.Sequential(nn.Linear(192, 192), nn.LayerNorm(192)) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Sequential(blocks[0], blocks[1], blocks[0]), nn.Linear(192, num_classes))


def main() -> None:
    """Prints the differences on the first process."""
    torch.set_num_threads(1)
    ddp = Ddp("fp32")
    ddp.join(300)
    found = {
        **{name: differences([Single, Ddp, Fsdp], **{"model": GROUP_NORM, "optimizer": CALM} | changes)
           for name, changes in CASES.items()},
        **{name: differences([Ddp, Fsdp], **{"model": GROUP_NORM, "optimizer": CALM} | changes)
           for name, changes in CUT_CASES.items()},
    }  # fmt: skip
    refusals = {name: refusal(**{"model": GROUP_NORM} | changes) for name, changes in REFUSED.items()}
    facts = {"differences": found, "kept": kept_share(), "refusals": refusals}
    if ddp.is_master:
        print(json.dumps(facts))
    ddp.close()


def refusal(**changes: Any) -> str:
    """Why a run of this config does not start."""
    try:
        numbers_of(Fsdp, tiny_config(None, "run", **changes))
    except ConfigError as error:
        return str(error)
    return ""


def differences(kinds: list[type[Runtime]], **changes: Any) -> float:
    """The largest one of the sums and weights of the last kind from those of the others, over all steps."""
    config = tiny_config(None, "run", **changes)
    results = [numbers_of(kind, config) for kind in kinds]
    return max(float((results[-1] - other).abs().max()) for other in results[:-1])


def numbers_of(kind: type[Runtime], config: TrainConfig) -> torch.Tensor:
    """The sums of all steps, the middle of them after a resume from the state, and the weights that are evaluated."""
    learner, rows = Learner(kind(config.precision), config, CLASSES, None), []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS // 2:
            state = whole_state(learner)
            learner = Learner(kind(config.precision), config, CLASSES, state)
        runtime = learner._runtime
        batch = batch_of(step, config)
        weight = float(batch["weight"].sum())
        row = learner.train_step(share_of(batch, runtime), 0.01 * (step + 1), key=step, weight=weight)
        rows.append(runtime.fetch([row])[0])
    learner.broadcast_buffers()
    rows.append(runtime.fetch([learner.eval_step(share_of(batch_of(99, config), runtime))])[0])
    state = whole_state(learner)
    weights = (state["ema"] or state["model"]).values()
    return torch.cat([*rows, *(weight.double().flatten() for weight in weights)])


def whole_state(learner: Learner) -> Any:
    """The state as a checkpoint gives it back."""
    states: list[Any] = [learner.state()]
    if isinstance(learner._runtime, Fsdp):
        states = [None] * learner._runtime.num_hosts
        dist.all_gather_object(states, learner.state())
    first, *parts = (torch.load(io.BytesIO(checkpoint_state.encode(state)), weights_only=True) for state in states)
    return joined(first, parts)


def batch_of(seed: int, config: TrainConfig) -> TensorBatch:
    """A whole batch."""
    draw = torch.Generator().manual_seed(seed)
    batch = {
        "image": torch.randint(0, 256, (BATCH, 8, 8, 3), generator=draw, dtype=torch.uint8),
        "label": torch.randint(0, CLASSES, (BATCH,), generator=draw),
        "weight": torch.ones(BATCH),
    }
    batch["weight"][-1] = seed % 2
    if config.regularize.mixup and seed < NUM_STEPS:
        batch["mix"] = torch.tensor([0.75, 0, 0, 0, 0]).repeat(BATCH, 1)
    return batch


def share_of(batch: TensorBatch, runtime: Runtime) -> TensorBatch:
    """The rows of one process."""
    return {name: tensor[runtime.host :: runtime.num_hosts] for name, tensor in batch.items()}


def kept_share() -> float:
    """The share of a transformer's weights, averages and moments that this process keeps after a step."""
    config = tiny_config(None, "run", **CASES["transformer"])
    learner = Learner(Fsdp("fp32"), config, CLASSES, None)
    learner.train_step(share_of(batch_of(0, config), learner._runtime), 0.01, key=0, weight=BATCH - 1)
    large = [tensor for tensor in learner._tensors() if tensor.numel() >= 1000]
    own = sum(tensor.to_local().numel() for tensor in large if isinstance(tensor, DTensor))
    return own / sum(tensor.numel() for tensor in large)


if __name__ == "__main__":
    from tests.makers import sharded as itself

    itself.main()
