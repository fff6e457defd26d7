"""Annotations follow their image: Pillow says where their pixels are, once it is upright."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pipelines.images.annotation_geometry import (
    ANNOTATIONS_SCALED,
    ANNOTATIONS_TURNED,
    RLE_LEFT_OUT,
    fitted,
)
from pipelines.images.check import Examined
from pipelines.images.options import resized
from shardset.errors import BadTarget


def document(*annotations, **sides):
    return json.dumps({"annotations": annotations, **sides}).encode()


def upright(pixels, orientation):
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = orientation
    return np.asarray(ImageOps.exif_transpose(image))


def bounds(pixels):
    """Left, top, width and height of what is not 0."""
    rows, columns = np.nonzero(pixels)
    left, top = columns.min(), rows.min()
    return [left, top, columns.max() + 1 - left, rows.max() + 1 - top]


@given(
    st.sampled_from(range(1, 9)),
    st.sampled_from([(40, 24), (24, 40), (30, 30)]),
    st.sampled_from([0.5, 1, 3]),
    st.sampled_from([None, 12, 24]),
    st.tuples(*[st.integers(0, 15)] * 2, *[st.integers(2, 8)] * 2),
    st.booleans(),
)
def test_annotations_lie_where_pillow_puts_their_pixels(
    orientation, size, factor, shorter, box, as_stored
):
    width, height = size
    as_stored = as_stored and orientation >= 5 and width != height
    pixels = np.zeros((height, width), np.uint8)
    left, top, wide, high = box
    pixels[top : top + high, left : left + wide] = 255
    turned = upright(pixels, orientation)
    drawn = pixels if as_stored else turned
    left, top, wide, high = (factor * float(number) for number in bounds(drawn))
    polygon = [left, top, left + wide, top, left + wide, top + high, left, top + high]
    one = {
        "bbox": [left, top, wide, high],
        "segmentation": [polygon],
        "area": wide * high,
        "keypoints": [left, top, 2, 0, 0, 0],
        "category_id": 7,
        "note": "é",
    }
    sides = {"width": factor * drawn.shape[1], "height": factor * drawn.shape[0]}
    content = document(one, **sides)
    found, marks = fitted(content, Examined("jpg", "", size, orientation), shorter, {})

    stored = resized(turned.shape[::-1], shorter)
    scale = np.divide(stored, turned.shape[::-1])
    expected = np.reshape(bounds(turned), (2, 2)) * scale
    got = json.loads(found)
    assert (got["width"], got["height"]) == stored
    [got] = got["annotations"]
    np.testing.assert_allclose(got["bbox"], expected.ravel(), atol=2e-3)
    corners = np.reshape(got["segmentation"], (-1, 2))
    np.testing.assert_allclose([corners.min(axis=0), np.ptp(corners, axis=0)], expected, atol=2e-3)
    np.testing.assert_allclose(got["area"], np.prod(expected[1]), atol=1e-2)
    assert got["keypoints"][:2] in corners.tolist()
    assert got["keypoints"][2:] == [2, 0, 0, 0]
    assert (got["category_id"], got["note"]) == (7, "é")
    wanted = {ANNOTATIONS_TURNED: as_stored, ANNOTATIONS_SCALED: factor != 1}
    assert marks == {mark for mark, is_wanted in wanted.items() if is_wanted}
    if not marks and stored == turned.shape[::-1]:
        assert found is content


@pytest.mark.parametrize(
    ("size", "orientation", "sides"),
    [
        ((40, 24), 1, (24, 40)),
        ((40, 24), 6, (40, 40)),
        ((640, 480), 1, (640, 360)),
        ((640, 480), 1, (480, 640)),
    ],
)
def test_a_size_of_another_shape_is_refused(size, orientation, sides):
    content = document({"bbox": [1, 2, 3, 4]}, width=sides[0], height=sides[1])
    with pytest.raises(BadTarget, match="width and height in json are of another image"):
        fitted(content, Examined("jpg", "", size, orientation), None, {})


@pytest.mark.parametrize(
    "sides",
    [{}, {"width": None, "height": 9}, {"width": "wide", "height": 24}, {"width": 0, "height": 0}],
)
def test_no_size_is_no_evidence(sides):
    content = document({"bbox": [1, 2, 3, 4]}, **sides)
    assert fitted(content, Examined("jpg", "", (40, 24), 6), None, {}) == (content, set())


def test_a_size_that_was_rounded_is_the_same_shape():
    content = document({"bbox": [64, 0, 64, 427]}, width=640, height=427)
    found, marks = fitted(content, Examined("jpg", "", (100, 66), 1), None, {})
    assert json.loads(found)["annotations"][0]["bbox"] == [10, 0, 10, 66]
    assert marks == {ANNOTATIONS_SCALED}


def test_rle_is_left_out_and_boxes_without_area_stay():
    rle, none = {"bbox": [2, 2, 4, 4], "segmentation": {"counts": [1, 2]}}, {"bbox": [1, 2, -3, 4]}
    found, marks = fitted(document(rle, none, {}), Examined("jpg", "", (40, 20), 1), 10, {})
    assert json.loads(found)["annotations"] == [{"bbox": [1, 1, 2, 2]}, none, {}]
    assert marks == {RLE_LEFT_OUT}


def test_categories_are_renumbered():
    content = document(*({"bbox": [], "category_id": one} for one in (3, "3", 4, None)))
    found, _ = fitted(content, Examined("jpg", "", (40, 20), 1), None, {3: 9})
    assert [one["category_id"] for one in json.loads(found)["annotations"]] == [9, 9, 4, None]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"bbox": [1, 2, 3]}, "not as COCO has them"),
        ({"bbox": "1 2 3 4"}, "not as COCO has them"),
        ({"bbox": [1, 2, 3, 4], "segmentation": [["a", "b"]]}, "not as COCO has them"),
        ({"bbox": [1, 2, 3, 4], "area": "x"}, "not as COCO has them"),
    ],
)
def test_what_can_not_be_moved_is_refused(one, message):
    image = Examined("jpg", "", (40, 20), 1)
    with pytest.raises(BadTarget, match=message):
        fitted(document(one), image, 10, {})
    assert fitted(document(one), image, 30, {}) == (document(one), set())


def test_boxes_in_another_form_are_refused_only_if_images_are_resized():
    content, image = b'{"objects":{"bbox":[[1,2,3,4]]}}', Examined("jpg", "", (40, 20), 1)
    assert fitted(content, image, None, {}) == (content, set())
    with pytest.raises(BadTarget, match="not in COCO's `annotations`, which --resize-shorter"):
        fitted(content, image, 10, {})
