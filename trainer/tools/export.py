"""`python -m trainer export`: a trained model as files that other programs load.

The graphs take normalised images, float32 [n, 3, size, size], and return one number for each class.
`model.json` says how images are prepared and what the classes are called.
"""

import io
import json
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from shardset.errors import ConfigError, missing_library
from shardset.storage.open import open_storage
from shardset.version import __version__
from trainer.errors import TrainingError
from trainer.model.pretrained import SIDECAR
from trainer.tools.trained import TrainedModel

WEIGHTS = "model.safetensors"
EXAMPLES = 2
"""Images of the batch that a graph is traced with; exported graphs take any number."""
TOLERANCE = 1e-3
"""Largest difference of a graph's results from the model's, relative to the largest of them."""


def write(trained: TrainedModel, output: str, formats: list[str]) -> list[str]:
    """Writes the model in these formats with `model.json`, and returns the names of the files.

    Raises ConfigError.
    """
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"--format {name!r}: there are {', '.join(FORMATS)}")
    images = torch.rand(
        EXAMPLES, 3, trained.size, trained.size, generator=torch.Generator().manual_seed(0)
    )
    chosen = [FORMATS[name] for name in formats]
    files = {file: encode(trained.net, images) for file, encode in chosen}
    files[SIDECAR] = (json.dumps(_facts_of(trained, list(files)), indent=1) + "\n").encode()
    folder = open_storage(output)
    for name, data in files.items():
        with folder.writer(name) as writer:
            writer.write(data)
    return list(files)


def _facts_of(trained: TrainedModel, files: list[str]) -> dict[str, Any]:
    config, image = trained.config, trained.config.image
    return {
        "shardset": __version__,
        "files": files,
        "model": {
            "name": config.model.name,
            "stem": config.model.stem,
            "norm": config.model.norm,
            "kwargs": config.model.kwargs,
        },
        "classes": trained.classes,
        "input": {
            "size": image.size_in_evaluation,
            "resize": image.eval_resize,
            "interpolation": image.eval_interpolation,
            "crop": "shorter side resized to `resize`, then the centre",
            "mean": list(image.mean),
            "std": list(image.std),
            "scale": "pixels divided by 255, minus mean, divided by std; RGB, [n, 3, size, size]",
            "background": image.background,
            "upright": image.upright,
        },
        "trained": {"step": trained.step, "accuracy": trained.accuracy},
    }


def _safetensors(net: nn.Module, images: torch.Tensor) -> bytes:
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    return save({name: tensor.contiguous().clone() for name, tensor in net.state_dict().items()})


def _torchscript(net: nn.Module, images: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    script: Any = torch.jit  # has no types
    script.save(script.trace(net, images), buffer)
    buffer.seek(0)
    _compare(net, script.load(buffer), images, "torchscript")
    return buffer.getvalue()


def _exported(net: nn.Module, images: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    program = torch.export.export(net, (images,), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, buffer)
    buffer.seek(0)
    _compare(net, torch.export.load(buffer).module(), images, "torch.export")
    return buffer.getvalue()


def _onnx(net: nn.Module, images: torch.Tensor) -> bytes:
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ConfigError(f"--format onnx: {missing_library(error, 'export')}") from error
    buffer: Any = io.BytesIO()  # which its types do not know
    names: dict[str, Any] = {"input_names": ["image"], "output_names": ["logits"]}
    # Not by dynamo: it needs one more library.
    torch.onnx.export(
        net,
        (images,),
        buffer,
        dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
        dynamo=False,
        **names,
    )
    data: bytes = buffer.getvalue()
    onnx.checker.check_model(data)
    return data


@torch.no_grad()
def _compare(net: nn.Module, graph: Any, images: torch.Tensor, name: str) -> None:
    """Raises TrainingError unless a graph that was read back computes what the model computes, for
    any batch.
    """
    more = torch.cat([images, images.flip(0), images[:1]])
    expected, found = net(more), graph(more)
    if (expected - found).abs().max() > TOLERANCE * expected.abs().max():
        raise TrainingError(
            f"{name}: the exported graph gives other results than the model; use another --format"
        )


FORMATS = {
    "safetensors": (WEIGHTS, _safetensors),
    "torchscript": ("model.pt", _torchscript),
    "torch.export": ("model.pt2", _exported),
    "onnx": ("model.onnx", _onnx),
}
"""Of each format: the file that it writes, and what encodes it."""
