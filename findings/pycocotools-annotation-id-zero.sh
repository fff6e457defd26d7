#!/bin/sh
# pycocotools: ground truth with two boxes, and detections that are exactly these boxes. One would
# expect an average precision of 1, whatever numbers the annotations have as ids. Seen: 1 with the
# ids 1 and 2; with 0 and 1 (as enumerate() gives them) the detection of box 0 counts as false,
# because a match is stored as the id and 0 means none.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pycocotools==2.0.11" "numpy==2.4.6"
cat > "$folder/run.py" <<'PYTHON'
import contextlib
import io
from importlib.metadata import version

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

BOXES = [[0.0, 0.0, 40.0, 40.0], [50.0, 50.0, 40.0, 40.0]]


def precision(first_id):
    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": 1, "width": 100, "height": 100}],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {
                "id": first_id + number,
                "image_id": 1,
                "category_id": 1,
                "bbox": box,
                "area": 1600.0,
                "iscrowd": 0,
            }
            for number, box in enumerate(BOXES)
        ],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found = truth.loadRes(
            [
                {"image_id": 1, "category_id": 1, "bbox": box, "score": 0.9 - number / 10}
                for number, box in enumerate(BOXES)
            ]
        )
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[0]


print("pycocotools", version("pycocotools"))
from_one, from_zero = precision(1), precision(0)
print(f"average precision with ids from 1: {from_one:.3f}, from 0: {from_zero:.3f}")
assert from_one == 1
assert abs(from_zero - 0.252) < 0.01
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
