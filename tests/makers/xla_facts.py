"""What holds of the spmd runtime on four XLA:CPU devices, as JSON: run as `python -m tests.makers.xla_facts`.

A process of its own, because torch_xla's choice of devices and of SPMD is for a process' whole life.
"""

import json
import os
from typing import Any

import torch

RATES = (0.1, 0.0, 1.0, 0.9, 5e-5, 0.05, 0.1)
"""Learning rates that meet torch_xla's constants (0 and 1) and other numbers of the optimizer (0.9, 5e-5, 0.1)."""


def main() -> None:
    """Prints the facts."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4")
    from trainer import runtime

    with runtime.running("spmd", "fp32") as spmd:
        print(json.dumps({**_placing(spmd), **_agreeing(spmd), "graphs": _graphs(spmd)}))


def _placing(spmd: Any) -> dict[str, object]:
    import torch_xla

    batch = spmd.put({"image": torch.zeros(8, 4, 4, 3, dtype=torch.uint8), "label": torch.arange(8)})
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
    spmd.num_hosts = 1
    return {"values": values, "alone": alone, "over the mesh": over_the_mesh}


def _graphs(spmd: Any) -> list[int]:
    from trainer import config
    from trainer.learner import Learner

    learner = Learner(spmd, config.digits_smoke(), 10, None)
    batch = {
        "image": torch.zeros(64, 8, 8, 3, dtype=torch.uint8),
        "label": torch.zeros(64, dtype=torch.int64),
        "weight": torch.ones(64),
        "flip": torch.zeros(64, dtype=torch.bool),
    }
    for step, rate in enumerate(RATES):
        learner.train_step(spmd.put(batch), rate, key=step)
    return list(spmd.graphs.values())


if __name__ == "__main__":
    main()
