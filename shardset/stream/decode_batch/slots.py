"""Writes stored samples into the slots of a batch: passes fields through, decodes images, handles
bad samples.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shardset.decode.image import ImageSpec, crop_into, decode, decode_into, mirror
from shardset.decode.memory_cache import MemoryCache
from shardset.errors import BadTarget, ConfigError, DamagedShard, ShardsetError, UndecodableImage
from shardset.format.images import FIELD_OF_EXTENSION, stored_png
from shardset.read.pending import Contents
from shardset.stream.decode_batch.steps import PlannedStep
from shardset.stream.source import StreamSource

StoredContents = tuple[int, Contents]
"""A slot and the stored fields of its sample."""

_log = logging.getLogger(__name__)


class SlotWriter:
    """Writes samples into their slots of a batch; any thread may."""

    def __init__(
        self,
        source: StreamSource,
        cache: MemoryCache | None,
        stopped: threading.Event,
    ) -> None:
        self.cache, self.stopped = cache, stopped
        self.spec = source.spec
        fields = source.split.fields
        self._columns: list[tuple[str, int, Callable[[bytes | None], Any]]] = [
            (name, fields.index(name), lambda content: content) for name in source.spec.fields
        ]
        self._columns += [
            (column.name, at, column.value)
            for at, (column, _) in enumerate(source.columns, len(fields))
        ]
        self._targets = [
            (name, fields.index(target.field), target)
            for name, target in source.spec.targets.items()
        ]
        self._labels = source.manifest.labels_by_category
        self._fields = fields
        self._image_columns = [at for at, name in enumerate(fields) if name in FIELD_OF_EXTENSION]
        self._stored_png_size = 0
        """The side of stored PNGs that the crop takes without resizing."""
        image = self.spec.image
        if image and image.crop.keeps_size(image.size) and not self.spec.follows_crop:
            self._stored_png_size = image.size

    def read(self, step: PlannedStep, slots: range) -> Iterator[StoredContents]:
        """Some slots with their stored fields, without damaged samples, which are handled here."""
        assert step.pending is not None
        slot = slots.start
        while slot < slots.stop:
            try:
                for contents in step.pending.contents(slot, slots.stop):
                    if self.stopped.is_set():
                        return
                    yield slot, contents
                    slot += 1
            except DamagedShard as error:
                self._handle_bad_sample(step, slot, error)
                slot += 1

    def write(self, step: PlannedStep, samples: Iterable[StoredContents]) -> None:
        """Writes samples into their slots; treats one that isn't an image as `bad_samples` says."""
        assert step.pending is not None
        for slot, contents in samples:
            if self.stopped.is_set():
                return
            try:
                self._write_sample(step, slot, contents)
            except UndecodableImage as error:
                self._handle_bad_sample(step, slot, step.pending.located(slot, error))
            except ConfigError as error:
                raise step.pending.located(slot, error) from None

    def write_undecoded(
        self, step: PlannedStep, samples: list[StoredContents]
    ) -> list[StoredContents]:
        """Writes all at once the samples that need no decoder; returns the others.

        Those are stored PNGs of the wanted size, and every sample where no image is decoded.
        """
        if not self.spec.decodes:
            self.pass_through(step, samples)
            return []
        size = self._stored_png_size
        if not stored_png.fits(size, size):
            return samples
        done, pixels = stored_png.pixels(self.images(samples), size, size)
        if not done.any():
            return samples
        slots = slots_of(samples)[done]
        if self.cache is not None:
            self.cache.put(step.slots.ids[slots], pixels, step.labels[slots])
        assert self.spec.image is not None
        self.spec.image.crop.put_many(
            step.rows["image"], slots, pixels, np.arange(len(slots)), step.drawn[slots]
        )
        self.pass_through(step, list(itertools.compress(samples, done)))
        return list(itertools.compress(samples, ~done))

    def pass_through(self, step: PlannedStep, samples: Sequence[StoredContents]) -> None:
        """Copies the fields that the stream passes through, and the columns."""
        for name, at, value_of in self._columns:
            values = step.rows[name]
            for slot, contents in samples:
                values[slot] = value_of(contents[at])

    def put_cached(self, step: PlannedStep, slots: np.ndarray) -> None:
        """Crops cached images into their slots."""
        assert self.spec.image is not None
        assert self.cache is not None
        self.spec.image.crop.put_many(
            step.rows["image"],
            slots,
            self.cache.images_NHWC,
            step.slots.ids[slots],
            step.drawn[slots],
        )

    def images(self, samples: Sequence[StoredContents]) -> list[bytes]:
        """The encoded images of samples; empty where one has none."""
        if len(self._image_columns) == 1:
            [column] = self._image_columns
            return [contents[column] or b"" for _, contents in samples]
        return [self._image(contents) or b"" for _, contents in samples]

    def _image(self, contents: Contents) -> bytes | None:
        return next(
            (contents[column] for column in self._image_columns if contents[column] is not None),
            None,
        )

    def _write_sample(self, step: PlannedStep, slot: int, contents: Contents) -> None:
        """Raises UndecodableImage without the place of the sample."""
        self.pass_through(step, [(slot, contents)])
        if not self.spec.decodes:
            return
        image = self._image(contents)
        if image is None:
            pairs = zip(self._fields, contents, strict=False)
            stored = [name for name, content in pairs if content]
            raise UndecodableImage(f"it has no image among {stored}")
        if (spec := self.spec.image) is None:
            self._write_views(step, slot, image)
            return
        row, drawn = step.rows["image"][slot], step.drawn[slot]
        if self.cache is not None:
            pixels = _decode(image, spec)
            self.cache.put(step.slots.ids[slot], pixels, step.labels[slot])
            crop_into(row, pixels, spec, drawn)
            return
        placed = decode_into(row, image, spec, drawn)
        for name, at, target in self._targets:
            if (content := contents[at]) is None:
                if target.may_lack(self._labels):
                    continue
                raise BadTarget(f"it has no field {target.field!r}")
            for end, value in target.read(content, placed, self._labels).items():
                rows = step.rows[name + end]
                if isinstance(rows, list):
                    rows[slot] = value
                else:
                    rows[slot, : len(value)] = value
        if self.spec.with_matrix:
            step.rows["matrix"][slot] = placed.matrix
            step.rows["orig_size"][slot] = placed.image_size

    def _write_views(self, step: PlannedStep, slot: int, image: bytes) -> None:
        """Decodes an image once and crops its views."""
        specs = {name: spec for name, (_, spec) in self.spec.views.items()}
        pixels = _decode(image, next(iter(specs.values())))
        for name, spec in specs.items():
            rows, drawn = step.rows[name][slot], step.drawn_views[name][slot]
            for row, row_drawn in zip(rows, drawn, strict=True):
                crop_into(row, pixels, spec, row_drawn)
            if spec.flip:
                mirror(rows, drawn)

    def _handle_bad_sample(self, step: PlannedStep, slot: int, error: ShardsetError) -> None:
        if self.spec.bad_samples == "raise":
            raise error
        _log.warning("epoch %d step %d slot %d: masked: %s", step.epoch, step.step, slot, error)
        step.rows["weight"][slot] = 0
        for name, empty in self.spec.empty_rows(1).items():
            step.rows[name][slot] = empty[0]


def slots_of(samples: Sequence[StoredContents]) -> np.ndarray:
    """The slots of samples: int64 [n]."""
    return np.array([slot for slot, _ in samples], dtype=np.int64)


def _decode(image: bytes, spec: ImageSpec) -> np.ndarray:
    return decode(
        image,
        background=spec.background,
        decoded_bytes=spec.decoded_bytes,
        upright=spec.upright,
    )
