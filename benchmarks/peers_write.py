"""The usual scripts with other tools, one call each.

Runs in the environment of the peers and imports nothing of ours.

python benchmarks/peers_write.py TOOL KIND INPUT OUTPUT

A tool gets a list of samples that was shuffled with a seed, as a careful user would do, and reads
each where it is stored; nothing is unpacked first. `pool` is the scheme of img2dataset: some
processes, a stretch of the unshuffled list each. `decode` writes nothing: it is the limit of what
checks images.
"""

import io
import os
import random
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NUM_SHARDS = 16
NUM_PROCESSES = len(os.sched_getaffinity(0))
SEED = 7


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample and where its bytes are: a file and a range of it."""

    key: str
    label: int
    path: str
    offset: int
    num_bytes: int


def in_folders(folder: str) -> list[Sample]:
    """Every file below `train/CLASS/`."""
    classes = sorted(os.listdir(f"{folder}/train"))
    return [
        Sample(
            name.partition(".")[0],
            label,
            path := f"{folder}/train/{wnid}/{name}",
            0,
            os.path.getsize(path),
        )
        for label, wnid in enumerate(classes)
        for name in sorted(os.listdir(f"{folder}/train/{wnid}"))
    ]


def in_tar_of_tars(folder: str) -> list[Sample]:
    """Every member of the inner tars, by its place in the outer one."""
    path, samples = f"{folder}/ILSVRC2012_img_train.tar", []
    with tarfile.open(path) as outer:
        for label, inner in enumerate(sorted(outer, key=lambda member: member.name)):
            with tarfile.open(fileobj=outer.extractfile(inner)) as members:
                samples += [
                    Sample(
                        one.name.partition(".")[0],
                        label,
                        path,
                        inner.offset_data + one.offset_data,
                        one.size,
                    )
                    for one in members
                ]
    return samples


def read(sample: Sample) -> bytes:
    """The image file of a sample."""
    with open(sample.path, "rb") as file:
        file.seek(sample.offset)
        return file.read(sample.num_bytes)


LISTINGS: dict[str, Callable[[str], list[Sample]]] = {
    "folders": in_folders,
    "imagenet": in_tar_of_tars,
}


def shuffled(kind: str, folder: str) -> list[Sample]:
    """The samples of an input, shuffled."""
    samples = LISTINGS[kind](folder)
    random.Random(SEED).shuffle(samples)
    return samples


def webdataset(kind: str, folder: str, output: str) -> None:
    """webdataset's ShardWriter, one process."""
    from webdataset import ShardWriter

    samples = shuffled(kind, folder)
    with ShardWriter(
        f"{output}/train-%06d.tar", maxcount=-(-len(samples) // NUM_SHARDS), verbose=0
    ) as sink:
        for one in samples:
            sink.write({"__key__": one.key, "jpg": read(one), "cls": one.label})


def mds(kind: str, folder: str, output: str) -> None:
    """MosaicML's MDSWriter, one process."""
    from streaming import MDSWriter

    with MDSWriter(out=output, columns={"image": "bytes", "label": "int"}) as sink:
        for one in shuffled(kind, folder):
            sink.write({"image": read(one), "label": one.label})


def litdata(kind: str, folder: str, output: str) -> None:
    """LitData's optimize, one worker a core."""
    from litdata import optimize

    optimize(
        fn=_as_record,
        inputs=shuffled(kind, folder),
        output_dir=output,
        chunk_bytes="64MB",
        num_workers=NUM_PROCESSES,
    )


def _as_record(sample: Sample) -> dict:
    return {"image": read(sample), "label": sample.label}


def pool(kind: str, folder: str, output: str) -> None:
    """Stretches of the list, each written as one tar by a process of a pool."""
    samples = LISTINGS[kind](folder)
    stretches = _cut(samples, -(-len(samples) // NUM_SHARDS))
    with ProcessPoolExecutor(NUM_PROCESSES) as workers:
        list(workers.map(_write_stretch, stretches, range(NUM_SHARDS), [output] * NUM_SHARDS))


def _cut(samples: list[Sample], size: int) -> list[list[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _write_stretch(samples: list[Sample], number: int, output: str) -> None:
    from webdataset import TarWriter

    with TarWriter(f"{output}/{number:05d}.tar") as sink:
        for one in samples:
            sink.write({"__key__": one.key, "jpg": read(one), "cls": one.label})


def decode(kind: str, folder: str, output: str) -> None:
    """Reads every image and decodes it with Pillow at an eighth of its size, for which all of a
    JPEG's data is read.
    """
    with ProcessPoolExecutor(NUM_PROCESSES) as workers:
        list(workers.map(_decode_stretch, _cut(LISTINGS[kind](folder), 100)))


def _decode_stretch(samples: list[Sample]) -> None:
    from PIL import Image

    for one in samples:
        image = Image.open(io.BytesIO(read(one)))
        image.draft(None, (1, 1))
        image.load()


TOOLS = {tool.__name__: tool for tool in (webdataset, mds, litdata, pool, decode)}


def main() -> None:
    """Runs one tool on one input."""
    tool, kind, folder, output = sys.argv[1:]
    Path(output).mkdir(parents=True, exist_ok=True)
    TOOLS[tool](kind, folder, output)


if __name__ == "__main__":
    main()
