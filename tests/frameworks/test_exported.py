"""RF-DETR and OpenCLIP read the tars with the files that `export` writes."""

import json

import msgspec
import pytest

import shardset
from pipelines.export.side_files import export
from scripts import venvs
from tests.makers.built import built, config_of
from tests.makers.documented import run
from tests.makers.folders import write_images
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

PACKED = """
import json
from rfdetr.datasets.webdataset.load import WebDatasetDetection
from rfdetr.datasets.webdataset.pack import pack_coco_to_shards

pack_coco_to_shards("raw/train", "raw/train/boxes.json", "packed", split="train")
with open("collected.jsonl", "w") as file:
    for folder in ("packed", "set"):
        dataset = WebDatasetDetection(folder, "train", None)
        found = {
            target["image_id"].item(): [target["boxes"].tolist(), target["labels"].tolist()]
            for _, target in dataset
        }
        print(json.dumps([dataset.class_names, sorted(found.items())]), file=file)
"""


@pytest.mark.parametrize(
    ("categories", "used"),
    [
        ([(0, "pets", "none"), (1, "cat", "pets"), (2, "dog", "pets")], [1, 2]),
        ([(0, "pets", "none"), (1, "cat", "pets"), (2, "dog", "pets")], [0, 1, 2]),
        ([(0, "cat", "none"), (1, "cat", "cat"), (2, "dog", "cat")], [1, 2]),
        ([(4, "none", "none"), (7, "cat", "none"), (9, "dog", "dog")], [7, 9]),
        ([(4, "cat", None), (7, "ox", "cattle"), (9, "dog", None)], [4, 9]),
    ],
)
def test_labels_are_those_of_rfdetr_s_own_packer_also_for_roots_of_roboflow(
    tmp_path, categories, used
):
    names = [f"{number}.png" for number in range(6)]
    images = write_images(tmp_path / "raw", [f"train/{name}" for name in names])
    annotations = [
        {"id": n, "image_id": n, "category_id": used[n % len(used)], "bbox": [1, 1, 3, 2]}
        for n in range(len(names))
    ]
    boxes = {
        "images": [{"id": n, "file_name": name} for n, name in enumerate(names)],
        "annotations": [one | {"area": 6, "iscrowd": 0} for one in annotations],
        "categories": [
            {"id": number, "name": name} | ({"supercategory": group} if group else {})
            for number, name, group in categories
        ],
    }
    (images / "train/boxes.json").write_text(json.dumps(boxes))
    files = {"train": str(images / "train/boxes.json")}
    built(config_of(images, tmp_path / "set", source="coco", annotations=files))
    export(str(tmp_path / "set"), ["rfdetr"])
    run([str(venvs.python_of(venvs.FRAMEWORKS)), "-c", PACKED], tmp_path)
    expected, found = map(json.loads, (tmp_path / "collected.jsonl").read_text().splitlines())
    assert len(expected[1]) == len(names)
    assert found == expected


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
