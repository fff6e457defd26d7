"""`shardset predict`: the classes of images, prepared as an evaluation prepares them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardset.decode.image import decode_into
from shardset.errors import ConfigError, ShardsetError, UndecodableImage, printable
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.program import count
from shardset.storage.open import open_file
from trainer.config import ImageConfig
from trainer.data.preparation import eval_spec
from trainer.errors import TrainingError
from trainer.model.batch_transforms import Normalize
from trainer.tools.trained import TrainedModel

BATCH = 32


def report(trained: TrainedModel, images: Sequence[str], *, top: int, as_json: bool) -> None:
    """Prints each image with its classes.

    Raises TrainingError at the end if some could not be read.
    """
    failed = 0
    for prediction in predictions(trained, _paths(images), top):
        classes = "  ".join(
            f"{kind['name']} {kind['probability']:.1%}" for kind in prediction["classes"]
        )
        text = printable(f"{prediction['image']}: {classes or prediction['error']}")
        print(json.dumps(prediction) if as_json else text, flush=True)
        failed += prediction["error"] is not None
    if failed:
        raise TrainingError(
            f"{count(failed, 'image')} could not be read; the lines above give the reasons"
        )


def predictions(trained: TrainedModel, paths: Sequence[str], top: int) -> Iterator[dict[str, Any]]:
    """Each image and its `top` most probable classes, or the error of reading it."""
    image, names = trained.facts.image, trained.facts.classes
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        rows = np.zeros((len(chunk), image.size, image.size, 3), np.uint8)
        errors = [_fill(row, path, image) for row, path in zip(rows, chunk, strict=True)]
        values, labels = probabilities(trained, rows).topk(min(top, len(names)))
        for path, error, *best in zip(chunk, errors, values.tolist(), labels.tolist(), strict=True):
            classes = [
                {"name": names[label], "probability": value}
                for value, label in zip(*best, strict=True)
            ]
            yield {"image": path, "classes": [] if error else classes, "error": error}


@torch.no_grad()
def probabilities(trained: TrainedModel, images_NHWC: np.ndarray) -> torch.Tensor:
    """The probability of each class for each image: float32 [n, classes]."""
    image = trained.facts.image
    logits = trained.net(Normalize(image.mean, image.std)(torch.from_numpy(images_NHWC)))
    return torch.softmax(logits[:, : len(trained.facts.classes)].float(), 1)


def _fill(row: np.ndarray, path: str, image: ImageConfig) -> str | None:
    """Decodes an image into a row; returns why that failed."""
    try:
        folder, name = open_file(path)
        decode_into(row, folder.read(name), eval_spec(image), np.empty(0))
    except (UndecodableImage, ShardsetError) as error:
        return str(error)
    return None


def _paths(images: Sequence[str]) -> list[str]:
    """The images; of a folder, all images below it."""
    paths = []
    for path in images:
        if not Path(path).is_dir():
            paths.append(path)
            continue
        files = sorted(Path(path).rglob("*"))
        inside = [str(file) for file in files if file.suffix[1:].lower() in FIELD_OF_EXTENSION]
        if not inside:
            endings = ", ".join(FIELD_OF_EXTENSION)
            raise ConfigError(f"{path}: no images in this folder (by their names: {endings})")
        paths += inside
    return paths
