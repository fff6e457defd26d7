"""MNIST as published, unpacked: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same
for `t10k`. docs/dev/sources.md says how to add it.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pipelines.sources.base import RawSample, Rejected, Spool, Survey, Unit
from shardset.errors import NotFound, SourceError
from shardset.format.manifest import ClassInfo
from shardset.storage.base import Stat, Storage


@dataclass(frozen=True)
class Mnist:
    """Grey digits in the splits `train` and `test`; a key is split and row: `test-00042`."""

    input: Storage
    name: ClassVar[str] = "mnist"

    def survey(self) -> Survey:
        """One unit for each split; raises SourceError if a file is missing."""
        units = []
        for prefix, split in (("train", "train"), ("t10k", "test")):
            files = [
                self._stat(f"{prefix}-{rest}")
                for rest in ("images-idx3-ubyte", "labels-idx1-ubyte")
            ]
            units.append(
                {"split": split, "files": [[stat.name, stat.generation] for stat in files]}
            )
        return Survey(
            units=units,
            classes=[ClassInfo(label=digit, name=str(digit)) for digit in range(10)],
            splits=("train", "test"),
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The rows of one split, in order; raises SourceError if its files don't fit each other."""
        (num_images, height, width), pixels = self._read(unit["files"][0], num_axes=3)
        (num_labels,), labels = self._read(unit["files"][1], num_axes=1)
        if num_images != num_labels:
            raise SourceError(
                f"{self.input.url}: {num_images} images, {num_labels} labels; fetch both again"
            )
        for row, label in enumerate(labels):
            key = f"{unit['split']}-{row:05d}"
            if label > 9:
                yield Rejected(
                    name=key, split=unit["split"], reason=f"label {label}, expected 0 to 9"
                )
                continue
            image = pixels[row * height * width : (row + 1) * height * width]
            extent = spool.add(b"P5\n%d %d\n255\n" % (width, height) + image)
            yield RawSample(
                name=key,
                key=key,
                split=unit["split"],
                label=label,
                image="pgm",
                fields={"pgm": extent},
            )

    def _stat(self, name: str) -> Stat:
        try:
            return self.input.stat(name)
        except NotFound as error:
            raise SourceError(
                f"{self.input.url}: no {name}; fetch it and unpack it with gunzip"
            ) from error

    def _read(self, file: list[str], num_axes: int) -> tuple[tuple[int, ...], bytes]:
        """The shape that an IDX file of bytes states, and its content."""
        name, generation = file
        data = self.input.read(name, generation=generation)
        start = 4 + 4 * num_axes
        shape = struct.unpack(f">{num_axes}I", data[4:start].ljust(4 * num_axes, b"\0"))
        if data[:4] != bytes([0, 0, 8, num_axes]) or len(data) != start + math.prod(shape):
            raise SourceError(
                f"{self.input.url}/{name}: no whole IDX file of bytes in {num_axes} axes; fetch"
                " it again"
            )
        return shape, data[start:]
