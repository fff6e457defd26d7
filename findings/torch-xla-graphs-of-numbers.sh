#!/bin/sh
# torch_xla: which Python numbers of a step are part of its compiled graph? The usual answers are
# "all, so keep a learning rate in a tensor" or "none". Seen: a number that changes compiles
# nothing, since it is sent as data. But 0 and 1 are constants of a graph, and equal numbers are one
# input of it. So a graph more comes at the step where a number becomes 0 or 1 or equal to another,
# such as at the end of a warm-up.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.9.1" "torch_xla==2.9.0" "numpy==2.4.6"
cat > "$folder/run.py" <<'PYTHON'
from importlib.metadata import version

import torch
import torch_xla
import torch_xla.debug.metrics as metrics

device = torch_xla.device()


def num_graphs():
    return metrics.counter_value("UncachedCompile") or 0


def compiled(factor, alpha):
    """The graphs that a step with two numbers compiles."""
    before = num_graphs()
    weight, gradient = torch.ones(8, device=device), torch.ones(8, device=device)
    weight.mul_(factor).add_(gradient, alpha=alpha)
    torch_xla.sync()
    return num_graphs() - before


print("torch", version("torch"), "torch_xla", version("torch_xla"))
for what, steps, expected in (
    ("numbers that change", [(0.1, 0.2), (0.3, 0.4), (0.5, 0.6), (0.7, 0.9)], [1, 0, 0, 0]),
    ("a number becomes 1, then 0", [(1.0, 0.2), (0.0, 0.4)], [1, 1]),
    ("both are equal, then not", [(0.5, 0.5), (0.4, 0.5), (0.25, 0.25)], [1, 0, 0]),
    ("both are 0, then 1", [(0.0, 0.0), (1.0, 1.0), (0.3, 0.8)], [1, 1, 0]),
):
    found = [compiled(*numbers) for numbers in steps]
    print(f"{what}: {steps} compiles {found} graphs")
    assert found == expected
PYTHON
PJRT_DEVICE=CPU "$folder/venv/bin/python" "$folder/run.py"
