"""Boxes, masks and text follow the crop as torchvision's v2 transforms move them."""

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardset.decode.crops import (
    CenterCrop,
    Letterbox,
    PadCrop,
    Placement,
    RandomResizedCrop,
    Resize,
)
from shardset.decode.image import ImageSpec, decode_into, draws, is_mirrored
from shardset.decode.targets import Boxes, Mask, Text
from shardset.errors import BadTarget, ConfigError


def placed_by(crop, image_size, size, drawn, *, mirrored=False):
    return Placement(image_size, crop.region(image_size, size, drawn), size, mirrored)


WHOLE = placed_by(Resize(), (20, 30), 60, np.zeros(1))
"""An image of 20 x 30 in a row of 60: x doubles, y triples."""


def png(values, mode=None):
    out = io.BytesIO()
    image = Image.fromarray(values)
    (image if mode is None else image.convert(mode)).save(out, "PNG", compress_level=0)
    return out.getvalue()


def annotated(*boxes, **extra):
    objects = [
        {"bbox": list(box), "category_id": number} | extra for number, box in enumerate(boxes)
    ]
    return msgspec.json.encode({"annotations": objects})


def of_boxes(rows):
    kept = rows["_class"] >= 0
    return rows[""][kept].tolist(), rows["_class"][kept].tolist()


def test_a_thousand_crops_are_those_of_torchvision():
    import torch
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional as v2

    rng = np.random.default_rng(1)
    for number in range(1000):
        height, width = map(int, rng.integers(20, 600, 2))
        size = int(rng.choice([64, 96, 224, 333]))
        spec = ImageSpec(size=size, crop=RandomResizedCrop(), flip="pixels")
        drawn = draws(spec, 3, 0, np.array([number]), np.array([0]))[0]
        placed = placed_by(
            spec.crop, (height, width), size, drawn, mirrored=bool(is_mirrored(drawn))
        )
        mask = rng.integers(0, 255, (height, width), np.uint8)
        corner = rng.uniform(0, [width, height], (6, 2))
        boxes = np.hstack([corner, rng.uniform(0, [width, height], (6, 2)) / 2])

        expected_mask = v2.resized_crop(
            tv_tensors.Mask(mask[None]), *placed.region.box, [size, size]
        )
        corners = torch.tensor(np.hstack([corner, corner + boxes[:, 2:]]))
        given = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=(height, width))
        moved = v2.resized_crop(given, *placed.region.box, [size, size])
        if placed.is_mirrored:
            expected_mask, moved = v2.horizontal_flip(expected_mask), v2.horizontal_flip(moved)
        moved = v2.clamp_bounding_boxes(moved).numpy()
        kept = (moved[:, 2:] > moved[:, :2]).all(axis=1)

        assert np.array_equal(Mask("mask.png").read(png(mask), placed, {})[""], expected_mask[0])
        found = Boxes("json").read(annotated(*boxes.tolist()), placed, {})
        assert found["_class"][: kept.sum()].tolist() == np.flatnonzero(kept).tolist()
        assert len(found["_class"]) == kept.sum()
        np.testing.assert_allclose(found[""][: kept.sum()], moved[kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "crop",
    [RandomResizedCrop(), CenterCrop(40), Letterbox(), Resize(), PadCrop(4)],
    ids=lambda crop: type(crop).__name__,
)
@pytest.mark.parametrize("size", [(60, 45), (40, 70)])
def test_the_pixels_of_a_box_lie_where_its_target_says(crop, size):
    """A white rectangle on black stays under its box and its mask, whatever the crop."""
    image, (top, left, bottom, right) = np.zeros((*size, 3), np.uint8), (12, 10, 36, 40)
    image[top:bottom, left:right] = 255
    spec = ImageSpec(size=32, crop=crop, flip="pixels")
    mask = Mask("mask.png", fill=0)
    box = annotated((left, top, right - left, bottom - top))
    for number in range(40):
        drawn = draws(spec, 1, 0, np.array([number]), np.array([0]))[0]
        row = np.empty((32, 32, 3), np.uint8)
        placed = decode_into(row, png(image), spec, drawn)
        if placed.is_mirrored:
            row = row[:, ::-1]
        white = row[:, :, 0] > 127
        followed = mask.read(png(image[:, :, 0]), placed, {})[""] > 127
        assert (white != followed).mean() < 0.12
        corners, _ = of_boxes(Boxes("json").read(box, placed, {}))
        if white.sum() > 20:
            x, y = np.flatnonzero(white.any(axis=0)), np.flatnonzero(white.any(axis=1))
            expected = [x[0], y[0], x[-1] + 1, y[-1] + 1]
            np.testing.assert_allclose(corners[0], expected, atol=1.6)


def test_a_box_goes_when_too_little_of_it_is_seen():
    placed = placed_by(CenterCrop(20), (20, 30), 20, np.zeros(1))
    content = annotated((1, 0, 8, 10), (0, 0, 5, 5), (10, 5, 0, 4), (10, 5, 4, 4))
    assert of_boxes(Boxes("json").read(content, placed, {}))[1] == [0, 3]
    half = Boxes("json", min_visible=0.5)
    assert of_boxes(half.read(content, placed, {})) == ([[0, 0, 4, 10], [5, 5, 9, 9]], [0, 3])
    assert of_boxes(Boxes("json", min_visible=0.51).read(content, placed, {}))[1] == [3]


@given(
    st.sampled_from([RandomResizedCrop((0.01, 1)), Resize()]),
    st.tuples(*[st.integers(1, 3000)] * 2),
    st.sampled_from([32, 224, 1000, 4096]),
    st.integers(0, 99),
    st.lists(st.tuples(*[st.integers(0, 3000)] * 4), max_size=20),
)
def test_boxes_have_an_area_in_float32(crop, image_size, size, number, boxes):
    spec = ImageSpec(size=size, crop=crop, flip="pixels")
    drawn = draws(spec, 3, 0, np.array([number]), np.array([0]))[0]
    placed = placed_by(crop, image_size, size, drawn, mirrored=bool(is_mirrored(drawn)))
    top, left, height, width = placed.region.box
    edges = [(left - 5, top, 5, height), (left + width, top, 5, 5), (left, top + height, width, 3)]
    rows = Boxes("json").read(annotated(*boxes, *edges, (left, top, width, height)), placed, {})
    sides = rows[""][:, 2:] - rows[""][:, :2]
    assert sides.dtype == np.float32
    assert (sides >= 9e-4).all()
    assert not {len(boxes), len(boxes) + 1, len(boxes) + 2} & {*rows["_class"].tolist()}


@given(
    st.tuples(*[st.integers(1, 200)] * 2),
    st.sampled_from([(Resize(), 224), (Letterbox(), 640), (RandomResizedCrop((0.3, 1)), 96)]),
    st.booleans(),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_exactly_enough_of_a_box_is_enough(image_size, crop, mirrored, share):
    """Boxes of which exactly the share that is wanted lies in the window, at each of its edges."""
    crop, size = crop
    placed = placed_by(crop, image_size, size, np.full(23, 0.5), mirrored=mirrored)
    top, left, height, width = placed.region.box
    wide, high = width / 3 / share, height / 3 / share
    boxes = annotated(
        (left, top, width, height),
        (left + width - share * wide, top, wide, height),
        (left + share * wide - wide, top, wide, height),
        (left, top + height - share * high, width, high),
    )
    rows = Boxes("json", min_visible=share).read(boxes, placed, {})
    assert rows["_class"].tolist() == [0, 1, 2, 3]


def test_crowds_and_categories():
    crowd = annotated((1, 1, 5, 5), iscrowd=1)
    assert of_boxes(Boxes("json").read(crowd, WHOLE, {})) == ([], [])
    assert of_boxes(Boxes("json", crowd=True).read(crowd, WHOLE, {})) == ([[2, 3, 12, 18]], [0])
    two = annotated((1, 1, 5, 5), (2, 2, 5, 5))
    assert of_boxes(Boxes("json").read(two, WHOLE, {1: 7, 0: 3}))[1] == [3, 7]
    with pytest.raises(BadTarget, match="'json': category 1, which no class has"):
        Boxes("json").read(two, WHOLE, {0: 3})


@pytest.mark.parametrize(
    ("changes", "boxes"),
    [
        *(({"iscrowd": crowd}, 1) for crowd in (False, None, 0.0, "0")),
        *(({"iscrowd": crowd}, 0) for crowd in (True, 1.0, "1")),
        *(({"category_id": number}, 1) for number in (4.0, "4")),
        *(({"bbox": bbox}, 0) for bbox in (None, [], [1, 2, 0, 4], [1, 2, 3, -4])),
    ],
)
def test_what_pycocotools_reads_is_read(changes, boxes):
    content = annotated((1, 1, 5, 5), **({"category_id": 4} | changes))
    assert of_boxes(Boxes("json").read(content, WHOLE, {4: 6}))[1] == [6] * boxes
    captions = b'{"annotations": [{"id": 1, "caption": "a cat"}]}'
    assert of_boxes(Boxes("json").read(captions, WHOLE, {})) == ([], [])


def test_in_a_set_of_categories_samples_without_annotations_have_no_boxes():
    assert of_boxes(Boxes("json").read(b'{"size": 3}', WHOLE, {4: 6})) == ([], [])
    assert Boxes("json").may_lack({4: 6})
    assert not Boxes("json").may_lack({})
    assert not Text("txt").may_lack({4: 6})


def test_empty_rows_have_the_types_of_full_ones():
    for target, content in (
        (Boxes("json"), annotated((1, 1, 5, 5))),
        (Mask("png"), png(np.zeros((20, 30), np.uint8))),
        (Mask("png", dtype="uint16"), png(np.zeros((20, 30), np.uint16))),
    ):
        empty, full = target.empty(1, 60), target.read(content, WHOLE, {})
        for end, rows in empty.items():
            assert (rows.dtype, rows.shape[2:]) == (full[end].dtype, full[end].shape[1:])


@pytest.mark.parametrize(
    ("target", "content", "message"),
    [
        (Boxes("json"), b"{}", "no annotations as COCO"),
        (
            Boxes("json"),
            b'{"annotations": [{"bbox": [1, 2], "category_id": 1}]}',
            "a bbox of 2 numbers",
        ),
        (Boxes("json"), annotated((1, 2, 3, 4), category_id=2**63), "no annotations as COCO"),
        (Boxes("json"), annotated((1, 2, 3, 4), category_id=-1), "no annotations as COCO"),
        (Boxes("json"), annotated((1, 2, 3, 4), category_id=None), "category None, which no"),
        (Boxes("json"), b"\xff", "no annotations as COCO"),
        (Mask("png"), png(np.zeros((20, 31), np.uint8)), "31 x 20 pixels, its image is"),
        (Mask("png"), png(np.zeros((20, 30), np.uint16)), "numbers of uint16, expected uint8"),
        (Mask("png"), png(np.zeros((20, 30, 3), np.uint8)), "mode is RGB, expected one channel"),
        (Mask("png"), png(np.zeros((20, 30), np.uint8))[:-40], "'png': truncated"),
        (Text("txt"), b"caf\xe9", "'txt': 'utf-8' codec"),
    ],
)
def test_content_that_is_no_target(target, content, message):
    with pytest.raises(BadTarget, match=message):
        target.read(content, WHOLE, {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Boxes("json", max_boxes=0),
        lambda: Boxes("json", min_visible=1.5),
        lambda: Mask("png", fill=256),
        lambda: Mask("png", dtype="int32"),  # type: ignore[arg-type]
        lambda: Letterbox(fill=256),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(ConfigError):
        make()
