"""COCO's annotations in a JSON field follow their image as it will be stored.

Boxes, polygons and keypoints belong to an image of the `width` and `height` that the JSON states,
or else to the upright image. They are moved by one affine map: from the stated size, over a turn if
that is the size before EXIF turns the image, to the size after `--resize-shorter`.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from pipelines.images.check import Examined
from pipelines.images.options import resized
from shardset.errors import BadTarget
from shardset.format.annotations import Annotation
from shardset.format.images.orientation import UPRIGHT, upright_size
from shardset.prepared import JSON_ERRORS

ANNOTATIONS_TURNED = "annotations-turned"
ANNOTATIONS_SCALED = "annotations-scaled"
RLE_LEFT_OUT = "rle-left-out"
"""The marks of images whose annotations were changed: counted, but no fix."""

_DIGITS = 3
"""Moved numbers are rounded to 1/1000 of a pixel."""


class _Shape(Annotation, kw_only=True):
    segmentation: list[list[float]] | dict[str, Any] | None = None
    keypoints: list[float] | None = None
    area: float | None = None


class _Shapes(msgspec.Struct):
    annotations: list[_Shape]
    width: Any = None
    height: Any = None


_decoder = msgspec.json.Decoder(_Shapes, strict=False)


def fitted(
    content: bytes, image: Examined, shorter: int | None, ids: Mapping[int, int]
) -> tuple[bytes, list[str]]:
    """The JSON for an image that is stored with that shorter side, and marks of what was done.

    `ids` has category ids to replace. Raises BadTarget for a stated size that is another image's.
    """
    try:
        found, document = _decoder.decode(content), msgspec.json.decode(content)
    except JSON_ERRORS as error:
        raise BadTarget("no annotations as COCO has them", str(error)) from error
    upright = upright_size(image.size, image.orientation)
    stored, marks = resized(upright, shorter), set[str]()
    stated, turn = upright, UPRIGHT
    if all(isinstance(side, int | float) and side > 0 for side in (found.width, found.height)):
        stated = found.width, found.height
    base = upright
    if stated == image.size != upright or not _is_alike(stated, upright):
        base, turn = image.size, image.orientation
        marks.add(ANNOTATIONS_TURNED)
        if not _is_alike(stated, base):
            raise BadTarget(
                f"width and height {stated[0]} x {stated[1]} are of another image",
                f"this one has {upright[0]} x {upright[1]}; correct them, or leave them out",
            )
    if stated != base:
        marks.add(ANNOTATIONS_SCALED)
    matrix = _scale(upright, stored) @ _turn(turn, upright) @ _scale(stated, base)
    is_same = bool((matrix == np.eye(3)).all())
    for one, shape in zip(document["annotations"], found.annotations, strict=True):
        if (category := shape.category_id) is not None and category in ids:
            one["category_id"] = ids[category]
        if not is_same:
            marks.update(_move(one, shape, matrix))
    if is_same and not ids:
        return content, []
    for name, side in zip(("width", "height"), stored, strict=True):
        if name in document:
            document[name] = side
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(), [*marks]


def _is_alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether one size is another one scaled, up to a pixel of each side."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(sum(one), sum(other))


def _scale(old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
    return np.diag([new[0] / old[0], new[1] / old[1], 1])


def _turn(orientation: int, upright: tuple[int, int]) -> np.ndarray:
    """From points of an image in an orientation of 5 to 8, or 1, to the upright one."""
    if orientation == UPRIGHT:
        return np.eye(3)
    width, height = upright
    x, right = (-1, width) if orientation in (6, 7) else (1, 0)
    y, down = (-1, height) if orientation in (7, 8) else (1, 0)
    return np.array([[0, x, right], [y, 0, down], [0, 0, 1]])


def _move(one: dict[str, Any], shape: _Shape, matrix: np.ndarray) -> list[str]:
    linear, shift = matrix[:2, :2], matrix[:2, 2]
    if shape.bbox and len(shape.bbox) == 4:
        corner, size = np.reshape(shape.bbox, (2, 2))
        new_size = abs(linear) @ size
        one["bbox"] = _rounded([linear @ (corner + size / 2) + shift - new_size / 2, new_size])
    if shape.area is not None:
        one["area"] = round(shape.area * abs(np.linalg.det(linear)), _DIGITS)
    if shape.keypoints:
        points = np.reshape(shape.keypoints[: len(shape.keypoints) // 3 * 3], (-1, 3))
        points[:, :2] = (points[:, :2] @ linear.T + shift) * (points[:, 2:] > 0)
        one["keypoints"] = _rounded(points)
    if isinstance(shape.segmentation, list):
        one["segmentation"] = [
            _rounded(np.reshape(polygon[: len(polygon) // 2 * 2], (-1, 2)) @ linear.T + shift)
            for polygon in shape.segmentation
        ]
    elif shape.segmentation:
        del one["segmentation"]
        return [RLE_LEFT_OUT]
    return []


def _rounded(points: Any) -> list[float]:
    numbers: list[float] = np.round(points, _DIGITS).ravel().tolist()
    return numbers
