"""Annotations of a sample as COCO's files have them: `json` is {"annotations": [...]}."""

from collections.abc import Collection
from typing import Annotated

import msgspec

from shardset.errors import BadTarget
from shardset.prepared import JSON_ERRORS


class Annotation(msgspec.Struct):
    """A box: `bbox` is [left, top, width, height] in pixels of the upright image."""

    bbox: tuple[float, float, float, float]
    category_id: Annotated[int, msgspec.Meta(ge=0)]
    iscrowd: int = 0


class _Annotated(msgspec.Struct):
    annotations: list[Annotation]


_decoder = msgspec.json.Decoder(_Annotated)


def annotations_in(content: bytes, categories: Collection[int]) -> list[Annotation]:
    """The annotations in a stored field; BadTarget unless they are COCO's, of these categories.

    Without any categories, any category will do.
    """
    try:
        found = _decoder.decode(content).annotations
    except JSON_ERRORS as error:
        raise BadTarget("no annotations as COCO has them", str(error)) from error
    for one in found:
        if categories and one.category_id not in categories:
            raise BadTarget(f"category {one.category_id} in an annotation, which no class has")
    return found
