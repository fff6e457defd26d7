"""Annotations of a sample as COCO's files have them: `json` is {"annotations": [...]}.

What pycocotools reads is read: ids as floats or texts, `iscrowd` as a truth value or null, and
annotations without a `bbox`, which have no box.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from shardset.errors import BadTarget
from shardset.prepared import JSON_ERRORS

CategoryId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that fits the int64 of a batch, where -1 is no box."""


class Annotation(msgspec.Struct):
    """An annotation: `bbox` is [left, top, width, height] in pixels of the upright image."""

    bbox: list[float] | None = None
    category_id: CategoryId | None = None
    iscrowd: bool | int | None = 0


class AnnotatedBox(NamedTuple):
    """A box with an area, in pixels of the upright image, and the label of its category."""

    left: float
    top: float
    width: float
    height: float
    label: int
    is_crowd: bool


class _Annotated(msgspec.Struct):
    annotations: list[Annotation] | None = None


class _Objects(msgspec.Struct):
    annotations: list[dict[str, Any]]


_decoder = msgspec.json.Decoder(_Annotated, strict=False)
_objects = msgspec.json.Decoder(_Objects)


def is_coco(content: bytes) -> bool:
    """Whether a JSON field has COCO's annotations: a list of objects, some with a `bbox`."""
    if b'"annotations"' not in content or b'"bbox"' not in content:
        return False
    try:
        return any("bbox" in annotation for annotation in _objects.decode(content).annotations)
    except JSON_ERRORS:
        return False


def box_of(annotation: Annotation, labels: Mapping[int, int]) -> AnnotatedBox | None:
    """The box of an annotation, None if it has none or one without area.

    `labels` has the label of each category id; without any, the label is the id. Raises BadTarget
    for a bbox that is none, or that has no category.
    """
    if not annotation.bbox:
        return None
    if len(annotation.bbox) != 4:
        raise BadTarget(
            f"a bbox of {len(annotation.bbox)} numbers, expected left, top, width, height"
        )
    category = annotation.category_id
    if category is None or (labels and category not in labels):
        raise BadTarget(f"category {category}, which no class has")
    left, top, width, height = annotation.bbox
    if width <= 0 or height <= 0:
        return None
    return AnnotatedBox(
        left, top, width, height, labels.get(category, category), bool(annotation.iscrowd)
    )


def boxes_in(content: bytes, labels: Mapping[int, int]) -> list[AnnotatedBox]:
    """The boxes in a stored JSON field; BadTarget unless they are COCO's, of these categories.

    In a set with `labels`, JSON without annotations has no boxes.
    """
    try:
        annotations = _decoder.decode(content).annotations
    except JSON_ERRORS as error:
        raise BadTarget("no annotations as COCO has them", str(error)) from error
    if annotations is None and not labels:
        raise BadTarget("no annotations as COCO has them", "it has no `annotations`")
    return [box for annotation in annotations or () if (box := box_of(annotation, labels))]
