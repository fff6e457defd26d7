"""`shardset export`: a trained model as files that other programs load.

The ONNX graph takes normalised images, float32 [n, 3, size, size], and returns one number for each
class. `model.json` says how images are prepared and what the classes are called.
"""

import io
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from shardset.errors import ConfigError, missing_library
from shardset.storage.open import open_storage
from trainer.config import SIDECAR
from trainer.tools.trained import WEIGHTS, TrainedModel

ONNX = "model.onnx"


def write(trained: TrainedModel, output: str, *, onnx: bool = False) -> list[str]:
    """Writes the weights and `model.json`, and with `onnx` a graph; returns the names of the files.

    Raises ConfigError.
    """
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: one.contiguous().clone() for name, one in trained.net.state_dict().items()}
    facts = msgspec.json.format(msgspec.json.encode(trained.facts), indent=1)
    files = {WEIGHTS: save(tensors), SIDECAR: facts}
    if onnx:
        files[ONNX] = _onnx(trained)
    folder = open_storage(output)
    for name, data in files.items():
        folder.write(name, data)
    return list(files)


def _onnx(trained: TrainedModel) -> bytes:
    try:
        import onnx
    except ModuleNotFoundError as error:
        raise ConfigError(f"--onnx: {missing_library(error, 'export')}") from error
    size, buffer = trained.facts.image.size, io.BytesIO()
    export: Any = torch.onnx.export  # its types do not know a buffer
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
    onnx.checker.check_model(data)
    return data
