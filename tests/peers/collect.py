"""What another reader gives, as JSON lines: `python collect.py READER < code`, in the readers' own
environment.

The code on standard input leaves `samples`; standard output may hold what the library
prints, so the lines go to the file `collected.jsonl`.
"""

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

FIELDS = ("png", "jpg")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pixels(image: Image.Image) -> str:
    return digest(np.asarray(image.convert("RGB")).tobytes())


def raw_image(sample: dict):
    (found,) = [sample[field] for field in FIELDS if field in sample]
    return found


def webdataset(names: dict) -> Iterator[dict]:
    for sample in names["samples"]:
        yield {
            "key": sample["__key__"],
            "label": int(sample["cls"]),
            "image": digest(raw_image(sample)),
        }


def wids(names: dict) -> Iterator[dict]:
    samples = names["samples"]
    assert any(isinstance(value, Image.Image) for value in samples[0].values())
    samples.transformations = []
    for number in range(len(samples)):
        sample = {name.removeprefix("."): value for name, value in samples[number].items()}
        image = digest(raw_image(sample).read())
        yield {"key": sample["__key__"], "label": int(sample["cls"].read()), "image": image}


def timm(names: dict) -> Iterator[dict]:
    samples = names["samples"]
    assert len(samples) == len(list(samples))
    keys = [name.removesuffix(".JPEG") for name in samples.filenames()]
    for key, (image, label) in zip(keys, samples, strict=True):
        yield {"key": key, "label": label, "pixels": pixels(image)}


def energon(names: dict) -> Iterator[dict]:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.itar_reader import SqliteITarEntryReader

    by_key = SqliteITarEntryReader(EPath("shards"))
    for sample in names["samples"]:
        image = (sample.image.numpy().transpose(1, 2, 0) * 255).round().astype(np.uint8)
        stored = by_key[sample.__key__]
        assert int(stored["cls"]) == sample.label
        yield {
            "key": sample.__key__,
            "label": sample.label,
            "pixels": digest(image.tobytes()),
            "image": digest(raw_image(stored)),
        }


def dali(names: dict) -> Iterator[dict]:
    pipeline = names["samples"]()
    pipeline.build()
    (left,) = pipeline.epoch_size().values()
    while left:
        images, labels = pipeline.run()
        for number in range(min(left, len(images))):
            image, label = bytes(images.at(number)), int(bytes(labels.at(number)))
            yield {
                "label": label,
                "image": digest(image),
                "pixels": pixels(Image.open(io.BytesIO(image))),
            }
        left -= min(left, len(images))


def hf(names: dict) -> Iterator[dict]:
    import datasets

    samples = names["samples"]
    for field in set(FIELDS) & set(samples.column_names):
        samples = samples.cast_column(field, datasets.Image(decode=False))
    for sample in samples:
        (image,) = [sample[field]["bytes"] for field in FIELDS if sample.get(field)]
        yield {
            "key": sample["__key__"],
            "label": sample["cls"],
            "image": digest(image),
            "class": samples.features["cls"].int2str(sample["cls"]),
        }


if __name__ == "__main__":
    names: dict = {}
    exec(compile(sys.stdin.read(), "code", "exec"), names)
    collected = list(globals()[sys.argv[1]](names))
    Path("collected.jsonl").write_text("".join(json.dumps(row) + "\n" for row in collected))
