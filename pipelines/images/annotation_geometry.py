"""COCO's annotations in a JSON field follow their image as it will be stored.

Boxes, polygons and keypoints belong to an image of the `width` and `height` that the JSON states,
or else to the upright image. One affine map moves them: from the stated size, over a turn if that
is the size before EXIF turns the image, to the size after `--resize-shorter`.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelines.images.check import Examined
from pipelines.images.options import resized
from shardset.errors import BadTarget
from shardset.format.annotations import is_coco
from shardset.format.images.orientation import upright_size

ANNOTATIONS_TURNED = "annotations-turned"
ANNOTATIONS_SCALED = "annotations-scaled"
RLE_LEFT_OUT = "rle-left-out"
"""The marks of images whose annotations were changed: counted, but no fix."""

_DIGITS = 3
"""Moved numbers are rounded to 1/1000 of a pixel."""


def fitted(
    content: bytes, image: Examined, shorter: int | None, ids: Mapping[int, int]
) -> tuple[bytes, set[str]]:
    """The JSON beside an image that is stored with this shorter side, and marks of what was done.

    `ids` has category ids to replace. Raises BadTarget if the stated size is another image's, or
    if the boxes would have to move and are not in COCO's form.
    """
    if not is_coco(content):
        if shorter and b'"bbox"' in content:
            raise BadTarget(
                "its json has a bbox that is not in COCO's `annotations`, which --resize-shorter"
                " can't move"
            )
        return content, set()
    document = msgspec.json.decode(content)
    upright = upright_size(image.size, image.orientation)
    stated = document.get("width"), document.get("height")
    if not all(isinstance(side, int | float) and side > 0 for side in stated):
        stated = upright
    is_turned = stated == image.size != upright or not _is_alike(stated, upright)
    base = image.size if is_turned else upright
    if not _is_alike(stated, base):
        raise BadTarget(
            "its width and height in json are of another image",
            f"{stated} for {upright}; correct them, or leave them out",
        )
    marks = {ANNOTATIONS_TURNED} if is_turned else set()
    if stated != base:
        marks.add(ANNOTATIONS_SCALED)
    stored = resized(upright, shorter)
    is_moved = is_turned or stated != stored
    if not is_moved and not ids:
        return content, marks
    before, after = np.divide(base, stated), np.divide(stored, upright)
    is_mirrored = image.orientation in (6, 7), image.orientation in (7, 8)

    def moved(points: ArrayLike) -> NDArray[np.float64]:
        at = np.reshape(points, (-1, 2)) * before
        if is_turned:
            at = np.where(is_mirrored, np.subtract(upright, at[:, ::-1]), at[:, ::-1])
        return at * after

    try:
        for annotation in document["annotations"]:
            if (category := annotation.get("category_id")) is not None:
                annotation["category_id"] = ids.get(int(category), category)
            if not is_moved:
                continue
            if (bbox := annotation.get("bbox")) and min(bbox[2:]) > 0:
                left, top, width, height = bbox
                corners = moved([left, top, left + width, top + height])
                annotation["bbox"] = _rounded([corners.min(axis=0), np.ptp(corners, axis=0)])
            if area := annotation.get("area"):
                annotation["area"] = round(area * float(np.prod(before * after)), _DIGITS)
            if keypoints := annotation.get("keypoints"):
                points = np.array(keypoints, float).reshape(-1, 3)
                points[:, :2] = moved(points[:, :2]) * (points[:, 2:] > 0)
                annotation["keypoints"] = _rounded(points)
            if isinstance(polygons := annotation.get("segmentation"), dict):
                del annotation["segmentation"]
                marks.add(RLE_LEFT_OUT)
            elif polygons:
                annotation["segmentation"] = [_rounded(moved(polygon)) for polygon in polygons]
        if "width" in document and "height" in document:
            document["width"], document["height"] = stored
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadTarget("its annotations in json are not as COCO has them", str(error)) from error
    return text.encode(), marks


def _is_alike(size: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether one size is another one scaled, up to a pixel of each side."""
    return abs(size[0] * other[1] - size[1] * other[0]) <= max(sum(size), sum(other))


def _rounded(points: Any) -> list[float]:
    numbers: list[float] = np.round(points, _DIGITS).ravel().tolist()
    return numbers
