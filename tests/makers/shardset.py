"""Makes tiny valid shard sets without the build: pictures from numbers, tars and a sealed manifest.

manifest = write_shard_set(storage, {"train": png_samples("train", 40), "val": png_samples("val",
10)}, num_shards=4)
"""

import io
import itertools
import uuid
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from PIL import Image

from shardset.format import naming
from shardset.format.manifest import (
    ClassInfo,
    Manifest,
    Provenance,
    Quarantine,
    Shard,
    Split,
    opened,
    seal,
    to_json,
)
from shardset.format.shards import pattern_of
from shardset.format.tar import StoredSample
from shardset.format.write import WrittenShard, class_counts, write_shard, write_split
from shardset.order.permutation import hash64
from shardset.storage.base import Storage
from shardset.storage.open import open_storage


def pixels(serial: int, height: int, width: int) -> np.ndarray:
    """A picture that is different for each serial and smooth enough to survive JPEG: uint8 [height,
    width, 3].
    """
    red, green, blue = (hash64(7, serial, channel) % 256 for channel in range(3))
    down, right = np.mgrid[0:height, 0:width]
    planes = (
        red + 160 * down / max(1, height),
        green + 160 * right / max(1, width),
        blue + 0 * down,
    )
    return np.stack([(255 * (0.5 + 0.5 * np.sin(plane / 60))) for plane in planes], axis=-1).astype(
        np.uint8
    )


def encode(image: np.ndarray, file_format: str, **options) -> bytes:
    """The picture as the bytes of a PNG, JPEG, PPM, WEBP ... file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, file_format, **options)
    return buffer.getvalue()


def image_sample(
    split: str, serial: int, image: bytes, field: str, num_classes: int
) -> StoredSample:
    """A sample of one image field and its `cls`; the label is `serial % num_classes`."""
    label = serial % num_classes
    fields = ((field, image), ("cls", str(label).encode("ascii")))
    return StoredSample(key=f"{split}-{serial:06d}", fields=fields, label=label, serial=serial)


def png_samples(
    split: str, num_samples: int, *, size: int = 32, num_classes: int = 10
) -> list[StoredSample]:
    """Square PNGs whose pixels are `pixels(serial, size, size)`."""
    images = (encode(pixels(serial, size, size), "png") for serial in range(num_samples))
    return [
        image_sample(split, serial, image, "png", num_classes)
        for serial, image in enumerate(images)
    ]


def jpeg_samples(
    split: str,
    num_samples: int,
    *,
    height: int = 80,
    width: int = 96,
    num_classes: int = 10,
    quality: int = 90,
) -> list[StoredSample]:
    """JPEGs of `pixels(serial, height, width)`."""
    images = (pixels(serial, height, width) for serial in range(num_samples))
    return [
        image_sample(split, serial, encode(image, "jpeg", quality=quality), "jpg", num_classes)
        for serial, image in enumerate(images)
    ]


def new_set(
    samples: Sequence[StoredSample] | Mapping[str, Sequence[StoredSample]],
    url: object = None,
    **options,
) -> str:
    """The URL of a shard set of these samples, in memory unless `url` is given; a list becomes the
    split `train`.
    """
    url = str(url or f"memory://{uuid.uuid4().hex}/set")
    splits = samples if isinstance(samples, Mapping) else {"train": samples}
    write_shard_set(open_storage(url), splits, **options)
    return url


def write_shard_set(
    storage: Storage,
    samples: Mapping[str, Sequence[StoredSample]],
    *,
    num_shards: int = 2,
    num_classes: int = 10,
) -> Manifest:
    """Writes tars, indexes and last the manifest;
    each split's shards differ by at most one sample.
    """
    splits = {
        name: _write_split(storage, name, found, num_shards, num_classes)
        for name, found in samples.items()
    }
    put(storage, naming.quarantine_path(), b"")
    return publish(
        storage,
        Manifest(
            kind="shardset",
            version=1,
            digest="",
            classes=[ClassInfo(label=label, name=f"class {label}") for label in range(num_classes)],
            splits=splits,
            quarantine=Quarantine(count=0, path=naming.quarantine_path()),
            fixes={},
            provenance=Provenance(
                tool="test",
                source="made",
                source_digest="0" * 64,
                options={},
                libraries={},
                notes=[],
            ),
        ),
    )


def replace_shards(
    storage: Storage, manifest: Manifest, name: str, shards: Sequence[Shard]
) -> Manifest:
    """Writes the table of a split anew, with these shards, and seals the manifest;
    its totals stay.
    """
    split = manifest.split(name)
    written = [WrittenShard(shard, split.fields, 0) for shard in shards]
    told = _write_table(storage, name, written, split.class_totals)
    totals = {
        field: getattr(told, field)
        for field in (
            "num_samples",
            "num_tar_bytes",
            "max_tar_bytes",
            "num_source_samples",
            "shards",
        )
    }
    split = msgspec.structs.replace(split, **totals)
    return publish(
        storage, msgspec.structs.replace(manifest, splits={**manifest.splits, name: split})
    )


def publish(storage: Storage, manifest: Manifest) -> Manifest:
    """Seals and writes a manifest, and returns it as a reader gets it."""
    sealed = seal(manifest)
    put(storage, naming.MANIFEST, to_json(sealed))
    return opened(storage, sealed)


def quarantine(storage: Storage, manifest: Manifest, *lines: bytes) -> Manifest:
    """Publishes the set with these lines in its quarantine list."""
    listed = Quarantine(count=len(lines), path=naming.quarantine_path())
    put(storage, listed.path, b"".join(line + b"\n" for line in lines))
    return publish(storage, msgspec.structs.replace(manifest, quarantine=listed))


def put(storage: Storage, name: str, data: bytes) -> None:
    """Creates or replaces one object."""
    storage.write(name, data)


def _write_split(
    storage: Storage, name: str, samples: Sequence[StoredSample], num_shards: int, num_classes: int
) -> Split:
    fields = list(dict.fromkeys(field for sample in samples for field, _ in sample.fields))
    cuts = [len(samples) * number // num_shards for number in range(num_shards + 1)]
    written = [
        write_shard(
            naming.shard_path(name, name, number), samples[start:stop], fields, storage.writer
        )
        for number, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    totals = np.sum([class_counts(labels, num_classes) for _, labels in written], axis=0)
    return _write_table(storage, name, [shard for shard, _ in written], totals.tolist())


def _write_table(
    storage: Storage, name: str, shards: Sequence[WrittenShard], class_totals: list[int]
) -> Split:
    return write_split(
        storage.writer,
        shards,
        pattern=pattern_of(name, name, len(shards)),
        table_path=naming.table_path(name),
        class_totals=class_totals,
        plan_digest="0" * 64,
        promises=["mixed", "reproducible"],
    )
