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
from trainer.config import ImageConfig
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
    for one in predictions(trained, _paths(images), top):
        print(json.dumps(asdict(one)) if as_json else one, flush=True)
        failed += one.error is not None
    if failed:
        raise TrainingError(
            f"{count(failed, 'image')} could not be read; the lines above give the reasons"
        )


def predictions(trained: TrainedModel, paths: Sequence[str], top: int) -> Iterator[Prediction]:
    """The `top` most probable classes of each image, in order."""
    image, names = trained.facts.image, trained.facts.classes
    for start in range(0, len(paths), BATCH):
        chunk = paths[start : start + BATCH]
        rows = np.zeros((len(chunk), image.size, image.size, 3), np.uint8)
        errors = [_fill(row, path, image) for row, path in zip(rows, chunk, strict=True)]
        values, labels = probabilities(trained, rows).topk(min(top, len(names)))
        for path, error, *best in zip(chunk, errors, values.tolist(), labels.tolist(), strict=True):
            guesses = [Guess(names[label], value) for value, label in zip(*best, strict=True)]
            yield Prediction(image=path, classes=[] if error else guesses, error=error)


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
        inside = [str(one) for one in files if one.suffix[1:].lower() in FIELD_OF_EXTENSION]
        if not inside:
            known = ", ".join(FIELD_OF_EXTENSION)
            raise ConfigError(f"{path}: no images in this folder (by their names: {known})")
        paths += inside
    return paths
