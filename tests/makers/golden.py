"""The golden shard set of `tests/data/shardset/` and the published JSON Schema, made anew.

They hold the format still. When a change of the format is meant, raise
`shardset.format.manifest.VERSION` (or ORDER_VERSION), say so in docs/reference/format.md, and
write them again:

    python -m tests.makers.golden
"""

import inspect
import json
from pathlib import Path
from typing import Any

import msgspec

from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest, Provenance, Quarantine, Split
from shardset.format.shards import Group, StoredShards
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import put, write_shard_set

REPOSITORY = Path(__file__).parent.parent.parent
FOLDER = REPOSITORY / "tests/data/shardset"
SCHEMA = REPOSITORY / "docs/manifest.schema.json"
REGENERATE = "if the change is meant, raise the version and run `python -m tests.makers.golden`"


def picture(level: int) -> bytes:
    """A PPM file of 2 x 2 pixels, written by hand so that no image library decides its bytes."""
    return b"P6\n2 2\n255\n" + bytes((level + 3 * place) % 256 for place in range(12))


def samples() -> dict[str, list[StoredSample]]:
    """Two splits: with a copy, a sample without a label, one with a third field, and names of every
    kind.
    """
    cat, dog = picture(10), picture(200)
    return {
        "train": [
            StoredSample(key="cat/a_1", fields=[("ppm", cat), ("cls", b"0")], label=0, serial=1),
            StoredSample(
                key="dog/b-2",
                fields=[("ppm", dog), ("cls", b"1"), ("json", b"{}")],
                label=1,
                serial=0,
            ),
            StoredSample(
                key="cat/a_1@1", fields=[("ppm", cat), ("cls", b"0")], label=0, serial=1, copy=1
            ),
            StoredSample(key="x=1+2", fields=[("ppm", picture(0))], label=-1, serial=2),
        ],
        "validation": [
            StoredSample(key="c", fields=[("ppm", picture(77)), ("cls", b"1")], label=1, serial=0)
        ],
    }


def shard_set_files() -> dict[str, bytes]:
    """Every file of the golden shard set by its name."""
    storage = open_storage("memory://golden")
    for stat in list(storage.list()):
        storage.delete(stat.name)
    found = samples()
    train = write_shard_set(storage, {"train": found["train"]}, num_shards=2, num_classes=2)
    validation = write_shard_set(
        storage, {"validation": found["validation"]}, num_shards=1, num_classes=2
    )
    manifest = _told(train, {**train.splits, **validation.splits})
    put(storage, naming.MANIFEST, manifests.to_json(manifest))
    put(
        storage,
        naming.quarantine_path(),
        b'{"name": "dog/cut.ppm", "reason": "cut", "split": "train"}\n',
    )
    return _read_all(storage)


def schema() -> dict[str, Any]:
    """The JSON Schema of a manifest.

    Only `check` compares records with each other (sums, digest).
    """
    (manifest, _), parts = msgspec.json.schema_components(
        [Manifest, list[Group]],
        ref_template="#/$defs/{name}",
        schema_hook=lambda kind: {"type": "array", "items": {"$ref": "#/$defs/Group"}},
    )
    dialect = "https://json-schema.org/draft/2020-12/schema"
    for part in parts.values():  # Python 3.13 keeps no indentation of a docstring, 3.11 does
        part["description"] = inspect.cleandoc(part["description"])
    return {"$schema": dialect, **manifest, "$defs": parts}


def schema_file() -> bytes:
    """`docs/manifest.schema.json`."""
    return json.dumps(schema(), indent=1, sort_keys=True).encode() + b"\n"


def _read_all(storage: Storage) -> dict[str, bytes]:
    return {found.name: storage.read(found.name) for found in storage.list()}


def _told(manifest: Manifest, splits: dict[str, Split]) -> Manifest:
    """The manifest with something in every field."""
    (group,) = splits["train"].groups
    group = msgspec.structs.replace(group, seed=7, plan_digest="0123456789abcdef" * 4)
    train = msgspec.structs.replace(
        splits["train"],
        num_source_samples=4,
        num_dropped=1,
        num_repeats=1,
        shards=StoredShards([group]),
    )
    return manifests.seal(
        msgspec.structs.replace(
            manifest,
            classes=[
                ClassInfo(label=0, name='"Känguru", 袋鼠', wnid="n01877812"),
                ClassInfo(label=1, name="dog"),
            ],
            splits={**splits, "train": train},
            quarantine=Quarantine(count=1, path=naming.quarantine_path()),
            fixes={"cmyk": 2},
            provenance=Provenance(
                tool="shardset 0.1.0",
                source="folder",
                source_digest="fedcba9876543210" * 4,
                options={
                    "holdout": {"validation": 0.25},
                    "image": {"resize_shorter": None},
                    "remainder": "spread",
                },
                libraries={"pillow": "12.0.0"},
                notes=["no split in the names: everything is in train"],
            ),
        )
    )


def _write() -> None:
    files = {FOLDER / name: data for name, data in shard_set_files().items()} | {
        SCHEMA: schema_file()
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        print(f"{len(data):6d} {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    _write()
