"""`python -m trainer predict`: the classes of images, prepared as an evaluation prepares them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from shardset.decode.image import decode_into
from shardset.errors import ConfigError, ShardsetError, UndecodableImage, printable
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.program import count
from shardset.storage.open import open_file
from trainer.data.splits import eval_spec
from trainer.errors import TrainingError
from trainer.model.augment import Normalize
from trainer.tools.trained import TrainedModel

BATCH = 32


@dataclass(frozen=True, slots=True)
class Guess:
    """A class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An image and its most probable classes, or the reason why it has none."""

    image: str
    classes: list[Guess]
    error: str | None = None

    def __str__(self) -> str:
        said = "  ".join(f"{one.name} {one.probability:.1%}" for one in self.classes)
        return printable(f"{self.image}: {said or self.error}")


def report(trained: TrainedModel, images: Sequence[str], *, top: int, as_json: bool) -> None:
    """Prints each image with its classes.

    Raises TrainingError at the end if some could not be read.
    """
    failed = 0
    for one in predictions(trained, list(_paths(images)), top):
        print(json.dumps(asdict(one)) if as_json else one, flush=True)
        failed += one.error is not None
    if failed:
        raise TrainingError(
            f"{count(failed, 'image')} could not be read; the lines above give the reasons"
        )


def predictions(trained: TrainedModel, paths: Sequence[str], top: int) -> Iterator[Prediction]:
    """The `top` most probable classes of each image, in order."""
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        rows = np.zeros((len(chunk), trained.size, trained.size, 3), np.uint8)
        errors = [_fill(row, path, trained) for row, path in zip(rows, chunk, strict=True)]
        for path, error, chances in zip(chunk, errors, probabilities(trained, rows), strict=True):
            yield Prediction(
                image=path,
                classes=[] if error else _best(chances, trained.classes, top),
                error=error,
            )


@torch.no_grad()
def probabilities(trained: TrainedModel, images_NHWC: np.ndarray) -> torch.Tensor:
    """The probability of each class for each image: float32 [n, classes]."""
    image = trained.config.image
    logits = trained.net(Normalize(image.mean, image.std)(torch.from_numpy(images_NHWC)))
    return torch.softmax(logits[:, : len(trained.classes)].float(), 1)


def _fill(row: np.ndarray, path: str, trained: TrainedModel) -> str | None:
    """Decodes an image into a row; returns why that failed."""
    try:
        folder, name = open_file(path)
        decode_into(row, folder.read(name), eval_spec(trained.config.image), np.empty(0))
    except (UndecodableImage, ShardsetError) as error:
        return str(error)
    return None


def _best(chances: torch.Tensor, classes: Sequence[str], top: int) -> list[Guess]:
    values, labels = chances.topk(min(top, len(classes)))
    return [
        Guess(classes[label], value)
        for value, label in zip(values.tolist(), labels.tolist(), strict=True)
    ]


def _paths(images: Sequence[str]) -> Iterator[str]:
    """The images; of a folder, all pictures below it."""
    for path in images:
        if not Path(path).is_dir():
            yield path
            continue
        inside = [
            one
            for one in sorted(Path(path).rglob("*"))
            if one.suffix[1:].lower() in FIELD_OF_EXTENSION
        ]
        if not inside:
            raise ConfigError(
                f"{path}: no pictures in this folder (by their names:"
                f" {', '.join(FIELD_OF_EXTENSION)})"
            )
        yield from map(str, inside)
