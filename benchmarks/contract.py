"""Measures the cost of the format: a tar member, a header, a manifest.

python -m benchmarks.contract
"""

import io
import tarfile
import time
from collections.abc import Callable

import numpy as np
import webdataset

from shardset.format.manifest import (
    KIND,
    VERSION,
    ClassInfo,
    IndexFile,
    Manifest,
    Provenance,
    Quarantine,
    Shard,
    Split,
    parse,
    seal,
    to_json,
)
from shardset.format.tar import StoredSample, TarBuilder, header

NUM_SAMPLES = 500
IMAGE = bytes(3000)
MEMBERS = [
    (f"k{number}", field, data) for number in range(NUM_SAMPLES) for field, data in (("jpg", IMAGE), ("cls", b"1"))
]


def best_s(work: Callable[[], object], runs: int = 9) -> float:
    """The fastest of some runs, in seconds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def write_ours() -> None:
    builder, out = TarBuilder(["jpg", "cls"]), io.BytesIO()
    for number in range(NUM_SAMPLES):
        fields = [("jpg", IMAGE), ("cls", b"1")]
        out.write(builder.add(StoredSample(key=f"k{number}", fields=fields, label=1, source=number)))
    out.write(builder.finish())
    builder.index()


def write_python() -> None:
    with tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, field, data in MEMBERS:
            info = tarfile.TarInfo(f"{key}.{field}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_webdataset() -> None:
    with webdataset.TarWriter(io.BytesIO(), encoder=False) as tar:
        for number in range(NUM_SAMPLES):
            tar.write({"__key__": f"k{number}", "jpg": IMAGE, "cls": b"1"})


def header_ours() -> None:
    for key, field, data in MEMBERS:
        header(f"{key}.{field}".encode(), len(data))


def header_python() -> None:
    for key, field, data in MEMBERS:
        info = tarfile.TarInfo(f"{key}.{field}")
        info.size = len(data)
        info.tobuf(tarfile.USTAR_FORMAT)


def manifest(num_shards: int, num_classes: int, shard_size: int = 1252) -> bytes:
    """A manifest of one split."""
    random = np.random.default_rng(0)
    shards = [
        Shard(
            path=f"train/train-{number:06d}.tar",
            num_samples=shard_size,
            num_bytes=140_000_000,
            crc32c="AAAAAA==",
            sha256="0" * 64,
            first_id=number * shard_size,
            index=IndexFile(path=f"train/train-{number:06d}.idx.npy", num_bytes=100_000, crc32c="AAAAAA=="),
            class_counts=random.multinomial(shard_size, [1 / num_classes] * num_classes).tolist()
            if num_classes
            else [],
        )
        for number in range(num_shards)
    ]
    num_samples = num_shards * shard_size
    split = Split(
        num_samples=num_samples, num_shards=num_shards, num_source_samples=num_samples, num_dropped=0, num_repeats=0,
        num_content_bytes=0, fields=["jpg", "cls"], shards=shards,
    )  # fmt: skip
    return to_json(
        seal(
            Manifest(
                kind=KIND, version=VERSION, digest="", plan_digest="0" * 64, seed=0, order_version=1,
                remainder="spread", classes=[ClassInfo(label=n, name=f"class {n}") for n in range(num_classes)],
                splits={"train": split}, quarantine=Quarantine(count=0, path="quarantine.jsonl"), fixes={},
                provenance=Provenance(
                    tool="benchmark", source="made", source_digest="0" * 64, options={}, libraries={}, notes=[]
                ),
            )
        )
    )  # fmt: skip


def main() -> None:
    """Prints one line for each measurement."""
    for name, work in (("shardset", write_ours), ("tarfile", write_python), ("webdataset", write_webdataset)):
        print(f"{name:12} {best_s(work) / NUM_SAMPLES * 1e6:8.1f} µs a sample of two members")
    for name, work in (("shardset", header_ours), ("tarfile", header_python)):
        print(f"{name:12} {best_s(work) / len(MEMBERS) * 1e6:8.1f} µs a header")
    for num_shards, num_classes in ((100, 10), (1024, 1000), (10240, 0)):
        data = manifest(num_shards, num_classes)
        seconds = best_s(lambda data=data: parse(data))
        print(f"{num_shards} shards, {num_classes} classes: {len(data) / 1e6:.2f} MB, parsed in {seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
