"""`shardset export`: a trained model as files that other programs load.

The ONNX graph takes normalised images, float32 [n, 3, size, size], and returns one number for each
class. `model.json` says how images are prepared and what the classes are called.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from shardset.errors import DOCS, ConfigError, missing_library
from shardset.storage.open import open_storage
from trainer.config import SIDECAR
from trainer.errors import first_line
from trainer.tools.trained import WEIGHTS, TrainedModel

ONNX = "model.onnx"


NO_GRAPH = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""What torch raises for a model that it makes no graph of."""


def write(trained: TrainedModel, output: str, *, onnx: bool = False) -> list[str]:
    """Writes the weights and `model.json`, and with `onnx` a graph; returns the names of the files.

    Raises ConfigError. The others are written if there can be no graph.
    """
    if onnx:
        try:
            import_module("onnx.checker")
        except ModuleNotFoundError as error:
            raise ConfigError(f"--onnx: {missing_library(error, 'export')}") from error
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {
        name: tensor.contiguous().clone() for name, tensor in trained.net.state_dict().items()
    }
    facts = msgspec.json.format(msgspec.json.encode(trained.facts), indent=1)
    folder = open_storage(output)
    folder.write(WEIGHTS, save(tensors))
    folder.write(SIDECAR, facts)
    if not onnx:
        return [WEIGHTS, SIDECAR]
    try:
        graph = _onnx(trained)
    except NO_GRAPH as error:
        raise ConfigError(
            f"{folder.url}: {WEIGHTS} and {SIDECAR} are written, but torch can't make an ONNX graph"
            f" of {trained.facts.model.name!r} ({first_line(error)}); other images or"
            f" torch.onnx.export with dynamo=True may do, see {DOCS}/how-to/model.md"
        ) from error
    folder.write(ONNX, graph)
    return [WEIGHTS, SIDECAR, ONNX]


def _onnx(trained: TrainedModel) -> bytes:
    layer: Any  # timm's attention, of whose fused kernel torch can't trace every use
    for layer in trained.net.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False
    size, buffer = trained.facts.image.size, io.BytesIO()
    export: Any = torch.onnx.export  # its types do not know a buffer
    with _silent():
        export(
            trained.net,
            (torch.zeros(2, 3, size, size),),
            buffer,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
            dynamo=False,  # which would need one more library
        )
    data = buffer.getvalue()
    import_module("onnx.checker").check_model(data)
    return data


@contextmanager
def _silent() -> Iterator[None]:
    """Without the standard output of native code: torch's exporter prints the graph where it
    fails.
    """
    sys.stdout.flush()
    before = os.dup(1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
