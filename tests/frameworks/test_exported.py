"""RF-DETR and OpenCLIP read the tars with the files that `export` writes."""

import json

import msgspec
import pytest

import shardset
from pipelines.export.write import export
from scripts import venvs
from tests.makers.documented import run
from tests.makers.shardset import pixels, publish

pytestmark = pytest.mark.nightly

RFDETR = """
import json
from rfdetr.datasets.webdataset.load import WebDatasetDetection

with open("collected.jsonl", "w") as file:
    for image, target in WebDatasetDetection("scenes", "train", None):
        found = {name: target[name].tolist() for name in ("image_id", "boxes", "labels")}
        print(json.dumps(found | {"size": list(image.size)}), file=file)
"""
OPENCLIP = """
import json
from open_clip_train.data import get_dataset_size

with open("collected.jsonl", "w") as file:
    print(json.dumps(get_dataset_size("scenes/train/train-{000000..000002}.tar")), file=file)
"""


def test_detectors_and_clip_find_the_boxes_and_the_number_of_samples(tmp_path):
    expected = []
    with shardset.Writer(tmp_path / "scenes", samples_per_shard=5, classes=["a", "b"]) as writer:
        for number in range(14):
            box = [number, 3, 10, 12]
            annotation = {
                "bbox": box,
                "category_id": 3 + 4 * (number % 2),
                "iscrowd": 0,
                "area": 120,
            }
            writer.write(
                image=pixels(number, 40, 50),
                json={"image_id": number, "annotations": [annotation]},
            )
            corners = [number, 3, number + 10, 15]
            labels = [number % 2]
            expected.append(
                {"image_id": [number], "boxes": [corners], "labels": labels, "size": [50, 40]}
            )
    loaded = shardset.load(tmp_path / "scenes")
    classes = [
        msgspec.structs.replace(info, category_id=number)
        for info, number in zip(loaded.manifest.classes, (3, 7), strict=True)
    ]
    publish(loaded.storage, msgspec.structs.replace(loaded.manifest, classes=classes))
    export(str(tmp_path / "scenes"), ["rfdetr", "openclip"])
    for code, wanted in ((RFDETR, expected), (OPENCLIP, [[14, 3]])):
        run([str(venvs.python_of(venvs.FRAMEWORKS)), "-c", code], tmp_path)
        lines = (tmp_path / "collected.jsonl").read_text().splitlines()
        assert list(map(json.loads, lines)) == wanted
