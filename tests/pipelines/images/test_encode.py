"""What the build makes of images: good ones untouched, odd ones put right, bad ones named."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from pipelines.images.check import examine
from pipelines.images.encode import encode, libraries
from pipelines.images.options import ImageOptions, resized, stored_field
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.images import MAX_PIXELS, format_of, is_image_field
from shardset.format.images.limits import check_pixels
from tests.makers import odd_images
from tests.makers.image_files import FILES

PLAIN = ImageOptions()
GOOD = [name for name, file in FILES.items() if name.count(" ") == 1 and not file.reason]
"""Each format in each mode."""


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def stored(name: str, options: ImageOptions = PLAIN) -> tuple[str, bytes]:
    """What the build stores of an odd image."""
    extension, data = odd_images.make(name)
    found = examine(data, field=extension, verify="decode", options=options)
    return encode(data, found.field, found.marks, options)


def difference(first: Image.Image, second: Image.Image) -> float:
    """Mean absolute difference of two images of one mode and size, in grey levels."""
    return float(np.abs(np.asarray(first, int) - np.asarray(second, int)).mean())


def test_a_reason_survives_the_way_between_processes():
    error = UndecodableImage("too many pixels", "9 x 9, at most 80")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, str(again)) == ("too many pixels", "too many pixels: 9 x 9, at most 80")


@pytest.mark.parametrize("extension", ["jpg", "JPEG", "jpe", "jfif", "jif", "mpo"])
def test_every_spelling_of_an_extension_is_stored_under_one_field(extension):
    found = examine(odd_images.jpeg(), field=extension, verify="header", options=PLAIN)
    assert (found.field, found.marks) == ("jpg", "")
    assert examine(b"", field=extension, verify="none", options=PLAIN).field == "jpg"
    assert is_image_field(f"left.{extension.lower()}")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_a_png_named_jpeg_keeps_its_bytes_under_its_own_extension_unless_jpegs_are_asked_for():
    assert stored("png named jpeg") == ("png", odd_images.png())
    options = ImageOptions(image_format="jpg")
    assert examine(odd_images.png(), field="JPEG", verify="decode", options=options).marks == ""
    field, data = stored("png named jpeg", options)
    assert (field, opened(data).format) == ("jpg", "JPEG")


def test_an_image_above_the_limit_is_refused_from_its_header_alone_and_one_at_the_limit_is_not():
    with pytest.raises(UndecodableImage, match="too many pixels"):
        examine(odd_images.oversized(), field="png", verify="header", options=PLAIN)
    check_pixels(10, MAX_PIXELS // 10)
    with pytest.raises(UndecodableImage, match="10 x 17895698, at most 178956970"):
        check_pixels(10, MAX_PIXELS // 10 + 1)


@pytest.mark.parametrize("name", ["truncated jpeg", "truncated png", "jpeg with a zeroed tail"])
def test_truncation_is_found_by_decoding_only(name):
    extension, data = odd_images.make(name)
    assert examine(data, field=extension, verify="header", options=PLAIN).marks == ""
    with pytest.raises(UndecodableImage, match=r"^truncated$"):
        examine(data, field=extension, verify="decode", options=PLAIN)


@given(st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_a_jpeg_or_png_cut_anywhere_is_refused(missing):
    for data in (odd_images.jpeg(), odd_images.png()):
        with pytest.raises(UndecodableImage):
            examine(data[: -1 - missing], field="", verify="decode", options=PLAIN)


def test_the_shorter_side_becomes_the_wanted_one_and_the_picture_stays():
    data = odd_images.encoded(odd_images.picture(size=(500, 375)), "JPEG")
    field, found = encode(data, "jpg", "", ImageOptions(resize_shorter=256))
    assert (field, opened(found).size) == ("jpg", (341, 256))
    data = odd_images.encoded(odd_images.picture(size=(1200, 800)), "JPEG", quality=95)
    small = opened(encode(data, "jpg", "", ImageOptions(resize_shorter=32))[1])
    assert difference(small, odd_images.picture()) < 4


@pytest.mark.parametrize("shorter", [None, 8, 32])
@pytest.mark.parametrize("image_format", ["keep", "jpg", "png", "ppm", "webp"])
@pytest.mark.parametrize("name", GOOD)
def test_a_good_image_is_stored_as_its_options_say_and_not_encoded_again_without_need(
    name, image_format, shorter
):
    options = ImageOptions(resize_shorter=shorter, image_format=image_format)
    extension, raw, *_ = FILES[name]
    found = examine(raw, field=extension, verify="decode", options=options)
    field, data = encode(raw, found.field, found.marks, options)
    assert field == stored_field(extension, options) == format_of(data)
    if field != extension:
        image = opened(data)
        assert image.mode in ("L", "RGB")
        assert not {"exif", "xmp", "icc_profile", "comment", "dpi"} & set(image.info)
    elif shorter != 8 and not found.marks:
        assert data == raw


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reencoded_image_is_upright_and_says_no_more_that_it_is_turned_also_a_small_one(
    orientation,
):
    data = odd_images.exif_rotated(orientation)
    upright = ImageOps.exif_transpose(opened(data))
    image = opened(encode(data, "jpg", "", ImageOptions(image_format="png"))[1])
    assert odd_images.ORIENTATION not in image.getexif()
    assert difference(image, upright) == 0
    small = encode(data, "jpg", "", ImageOptions(resize_shorter=1000))[1]
    assert (small == data) == (orientation == 1)
    assert difference(opened(small), upright if orientation != 1 else opened(data)) < 3


@pytest.mark.parametrize(("image_format", "longest"), [("webp", 16383), ("jpg", 65500)])
def test_an_image_with_a_longer_side_than_its_format_has_is_refused_unless_it_is_made_smaller(
    image_format, longest
):
    wanted = ImageOptions(image_format=image_format)
    assert opened(encode(wide(longest), "png", "", wanted)[1]).size == (longest, 8)
    data = wide(longest + 1)
    expected = rf"^too large for {image_format}: {longest + 1} x 8, at most {longest} a side$"
    for verify in ("header", "decode"):
        with pytest.raises(UndecodableImage, match=expected):
            examine(data, field="png", verify=verify, options=wanted)
    with pytest.raises(UndecodableImage, match=expected):
        encode(data, "png", "", wanted)
    smaller = replace(wanted, resize_shorter=4)
    assert examine(data, field="png", verify="header", options=smaller).field == "png"
    assert opened(encode(data, "png", "", smaller)[1]).size == (longest // 2 + 1, 4)


def wide(width: int) -> bytes:
    """A PNG of `width` x 8 pixels."""
    return odd_images.encoded(Image.new("L", (width, 8)), "PNG")


def test_comments_and_profiles_are_not_carried_into_a_reencoded_image_nor_broken_exif():
    data = odd_images.jpeg(comment=b"taken on a Tuesday", icc_profile=b"profile" * 20)
    small = encode(data, "jpg", "", ImageOptions(resize_shorter=16))[1]
    assert b"Tuesday" not in small
    assert b"ICC_PROFILE" not in small
    data = odd_images.jpeg(exif=b"Exif\0\0nonsense that is no TIFF header")
    assert (
        opened(encode(data, "jpg", "", ImageOptions(image_format="png"))[1]).size == odd_images.SIZE
    )


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_resizing_never_enlarges_and_never_loses_a_side(width, height, shorter):
    size = resized((width, height), shorter)
    assert min(size) == min(width, height, shorter)
    assert 1 <= size[0] <= width
    assert 1 <= size[1] <= height


def test_the_same_image_is_encoded_to_the_same_bytes_and_to_fewer_at_a_lower_quality():
    options = ImageOptions(image_format="jpg", quality=80)
    once = encode(odd_images.png(), "png", "", options)
    assert encode(odd_images.png(), "png", "", options) == once
    assert len(encode(odd_images.png(), "png", "", replace(options, quality=30))[1]) < len(once[1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"resize_shorter": 0},
        {"quality": 0},
        {"quality": 101},
        {"image_format": "bmp"},
    ],
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        ImageOptions(**wrong)


def test_the_libraries_that_decide_the_bytes_are_named_with_versions():
    found = libraries(PLAIN)
    assert {"pillow", "zlib"} <= set(found)
    assert any(name.startswith("libjpeg") for name in found)
    assert all(version[0].isdigit() for version in found.values())
