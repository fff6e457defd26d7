"""Makes tiny valid shard sets without the build: pictures from numbers, tars and a sealed manifest.

manifest = write_shard_set(storage, {"train": png_samples("train", 40), "val": png_samples("val", 10)}, num_shards=4)
"""

import io
import itertools
from collections.abc import Sequence

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa
from PIL import Image

from shardset.checksum import crc32c_text
from shardset.format import arrow, naming
from shardset.format.index import index_to_bytes
from shardset.format.manifest import ClassInfo, IndexFile, Manifest, Provenance, Quarantine, Shard, Split, seal, to_json
from shardset.format.originals import REFERENCE
from shardset.format.tar import StoredSample, TarBuilder
from shardset.order.permutation import ORDER_VERSION, hash64
from shardset.storage.base import Storage


def pixels(serial: int, height: int, width: int) -> np.ndarray:
    """A picture that is different for each serial and smooth enough to survive JPEG: uint8 [height, width, 3]."""
    red, green, blue = (hash64(7, serial, channel) % 256 for channel in range(3))
    down, right = np.mgrid[0:height, 0:width]
    planes = (red + 160 * down / max(1, height), green + 160 * right / max(1, width), blue + 0 * down)
    return np.stack([(255 * (0.5 + 0.5 * np.sin(plane / 60))) for plane in planes], axis=-1).astype(np.uint8)


def encode(image: np.ndarray, file_format: str, **options: object) -> bytes:
    """The picture as the bytes of a PNG, JPEG, PPM, WEBP ... file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, file_format, **options)
    return buffer.getvalue()


def image_sample(split: str, serial: int, image: bytes, field: str, num_classes: int) -> StoredSample:
    """A sample of one image field and its `cls`; the label is `serial % num_classes`."""
    label = serial % num_classes
    fields = ((field, image), ("cls", str(label).encode("ascii")))
    return StoredSample(key=f"{split}-{serial:06d}", fields=fields, label=label, source=serial)


def png_samples(split: str, num_samples: int, *, size: int = 32, num_classes: int = 10) -> list[StoredSample]:
    """Square PNGs whose pixels are `pixels(serial, size, size)`."""
    return [
        image_sample(split, serial, encode(pixels(serial, size, size), "png"), "png", num_classes)
        for serial in range(num_samples)
    ]


def jpeg_samples(
    split: str, num_samples: int, *, height: int = 80, width: int = 96, num_classes: int = 10, quality: int = 90
) -> list[StoredSample]:
    """JPEGs of `pixels(serial, height, width)`."""
    return [
        image_sample(split, serial, encode(pixels(serial, height, width), "jpeg", quality=quality), "jpg", num_classes)
        for serial in range(num_samples)
    ]


def write_shard_set(
    storage: Storage, samples: dict[str, Sequence[StoredSample]], *, num_shards: int = 2, num_classes: int = 10
) -> Manifest:
    """Writes tars, indexes and last the manifest; each split's shards differ by at most one sample."""
    splits = {name: _write_split(storage, name, found, num_shards, num_classes) for name, found in samples.items()}
    manifest = seal(
        Manifest(
            kind="shardset",
            version=1,
            digest="",
            plan_digest="0" * 64,
            seed=0,
            order_version=ORDER_VERSION,
            remainder="spread",
            classes=[ClassInfo(label=label, name=f"class {label}") for label in range(num_classes)],
            splits=splits,
            quarantine=Quarantine(count=0, path=naming.quarantine_path()),
            fixes={},
            provenance=Provenance(
                tool="test", source="made", source_digest="0" * 64, options={}, libraries={}, notes=[]
            ),
        )
    )
    put(storage, naming.quarantine_path(), b"")
    put(storage, naming.MANIFEST, to_json(manifest))
    return manifest


def references(samples: Sequence[StoredSample], names: Sequence[str]) -> bytes:
    """The plan of a shard, with rows that say more than what the samples were called."""
    keys = [sample.key.partition("@")[0] for sample in samples]
    columns = {
        "row": [
            msgspec.msgpack.encode(["train", name, key, "", 0, ["jpg", -1, []]])
            for name, key in zip(names, keys, strict=True)
        ],
        "occurrence": [0] * len(samples),
        "source": [sample.source for sample in samples],
        "copy": [sample.copy for sample in samples],
    }
    return bytes(arrow.to_bytes(pa.RecordBatch.from_pydict(columns, schema=REFERENCE)))


def put(storage: Storage, name: str, data: bytes) -> None:
    """Creates or replaces one object."""
    with storage.writer(name) as writer:
        writer.write(data)


def _write_split(
    storage: Storage, name: str, samples: Sequence[StoredSample], num_shards: int, num_classes: int
) -> Split:
    fields = list(dict.fromkeys(field for sample in samples for field, _ in sample.fields))
    cuts = [len(samples) * number // num_shards for number in range(num_shards + 1)]
    shards = [
        _write_shard(storage, naming.shard_path(name, name, number), samples[start:stop], start, fields, num_classes)
        for number, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
    return Split(
        num_samples=len(samples),
        num_shards=num_shards,
        num_source_samples=len(samples),
        num_dropped=0,
        num_repeats=0,
        num_content_bytes=sum(len(content) for sample in samples for _, content in sample.fields),
        fields=fields,
        shards=shards,
    )


def _write_shard(
    storage: Storage, path: str, samples: Sequence[StoredSample], first_id: int, fields: list[str], num_classes: int
) -> Shard:
    builder = TarBuilder(fields)
    put(storage, path, b"".join([*(builder.add(sample) for sample in samples), builder.finish()]))
    index = index_to_bytes(builder.index())
    put(storage, naming.index_path(path), index)
    labels = [sample.label for sample in samples if sample.label >= 0]
    return Shard(
        path=path,
        num_samples=len(samples),
        num_bytes=builder.num_bytes,
        crc32c=builder.crc32c,
        sha256=builder.sha256,
        first_id=first_id,
        index=IndexFile(
            path=naming.index_path(path), num_bytes=len(index), crc32c=crc32c_text(google_crc32c.value(index))
        ),
        class_counts=np.bincount(labels, minlength=num_classes).tolist() if labels else [0] * num_classes,
    )
