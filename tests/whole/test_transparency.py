"""Transparent images: the same pixels whatever decodes them, those of a plain composite on the
background.
"""

import io
import struct
import zlib
from itertools import starmap

import numpy as np
import pytest
from PIL import Image

from pipelines import cli as pipelines
from pipelines.images.check import examine
from pipelines.images.encode import encode, thumbnail_of
from pipelines.images.options import ImageOptions
from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode, decode_into
from shardset.decode.workers import DecodeTask
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.images import format_of
from shardset.format.images.background import (
    check,
    flattened,
    is_transparent,
    over,
    parse,
    rgb_pixels,
)
from shardset.format.images.limits import DECODED_BYTES
from shardset.format.images.pillow import load, opened
from tests.makers import odd_images
from tests.makers.built import HERE, add
from tests.makers.odd_images import encoded, png_chunk, png_of
from tests.makers.stored import samples_of

SIZE = (24, 16)


def rgba() -> Image.Image:
    """A picture of every alpha, with runs that are opaque and runs that are not there at all."""
    image = odd_images.picture(5, SIZE).convert("RGBA")
    alpha = np.clip(np.arange(SIZE[0] * SIZE[1]).reshape(SIZE[::-1]) * 2 - 150, 0, 255).astype(
        np.uint8
    )
    image.putalpha(Image.fromarray(alpha))
    return image


def made(bits: int, colour: int, unused: int = 0) -> tuple[bytes, np.ndarray]:
    """A transparent PNG of random samples, and its pixels: by a hidden colour (grey 0, RGB 2), a
    palette (3) or a channel (4, 6). `unused` are bits of the hidden colour that have no meaning.
    """
    channels, draw = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour], np.random.default_rng(bits + colour)
    values = draw.integers(0, 2**bits, (SIZE[1], SIZE[0], channels), dtype=np.uint16)
    chunks: list[tuple[bytes, bytes]] = []
    if colour in (0, 2):
        hidden = values[3, 4].copy()
        values[:, ::2] = hidden
        named = b"".join(struct.pack(">H", level | unused) for level in hidden.tolist())
        chunks = [(b"tRNS", named)]
    pixels = values >> 8 if bits == 16 else values.astype(int) * 255 // (2**bits - 1)
    if colour in (0, 2):
        alpha = 255 * (values != hidden).any(axis=2, keepdims=True)
        pixels = np.concatenate([pixels, alpha], axis=2)
    if colour == 3:
        palette = draw.integers(0, 256, (2**bits, 4))
        palette[-1, 3] = 255  # the chunk may be shorter than the palette
        pixels = palette[values[:, :, 0]]
        levels = palette.astype(np.uint8)
        chunks = [(b"PLTE", levels[:, :3].tobytes()), (b"tRNS", levels[:-1, 3].tobytes())]
    if colour in (0, 4):
        pixels = pixels[:, :, [0, 0, 0, 1]]
    wide = values.astype(">u2").reshape(SIZE[1], -1, 1).view(np.uint8)
    each = np.unpackbits(wide, axis=2)[:, :, 16 - bits :].reshape(SIZE[1], -1)
    body = b"".join(b"\0" + row.tobytes() for row in np.packbits(each, axis=1))
    parts = starmap(png_chunk, [*chunks, (b"IDAT", zlib.compress(body))])
    return png_of(*SIZE, *parts, bits=bits, colour=colour), pixels.astype(np.uint8)


KINDS: dict[str, tuple[int, ...]] = {
    **{f"grey {bits}": (bits, 0) for bits in (1, 2, 4, 8, 16)},
    "grey 8, a bit that is not used": (8, 0, 0x100),
    "grey 2, a bit that is not used": (2, 0, 0x10),
    **{f"rgb {bits}": (bits, 2) for bits in (8, 16)},
    **{f"palette {bits}": (bits, 3) for bits in (1, 2, 4, 8)},
    **{f"grey and alpha {bits}": (bits, 4) for bits in (8, 16)},
    **{f"rgb and alpha {bits}": (bits, 6) for bits in (8, 16)},
}


def composite(pixels: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    """The plain reference: Pillow's alpha_composite on the background."""
    image = Image.fromarray(pixels, "RGBA")
    return np.asarray(
        Image.alpha_composite(Image.new("RGBA", image.size, (*background, 255)), image)
    )[:, :, :3]


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (200, 17, 90)], ids=str)
def test_every_colour_and_alpha_becomes_what_pillows_composite_makes_of_it(background):
    colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
    pixels = np.stack([colour, 255 - colour, colour // 2, alpha], axis=2).astype(np.uint8)
    assert np.array_equal(over(pixels, background), composite(pixels, background))


@pytest.mark.parametrize("kind", KINDS)
def test_every_decoder_puts_a_transparent_image_on_the_background(kind):
    data, pixels = made(*KINDS[kind])
    background = (200, 17, 90)
    expected = composite(pixels, background)
    assert np.array_equal(decode(data, background=background), expected)
    with opened(data, field := format_of(data), DECODED_BYTES) as image:
        load(image, data, field)
        assert is_transparent(image)
        assert np.array_equal(rgb_pixels(image, background), expected)
        assert np.array_equal(np.asarray(flattened(image, background).convert("RGB")), expected)
    field = examine(data, field="", verify="decode", options=ImageOptions()).field
    stored = encode(data, field, "", ImageOptions(image_format="ppm", background=background))[1]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), expected)


def test_a_crop_and_a_whole_image_of_a_process_show_the_background():
    data = encoded(Image.new("RGBA", (16, 16), (9, 9, 9, 0)), "PNG")
    rows, background = np.zeros((1, 16, 16, 3), np.uint8), (10, 20, 30)
    for crop in (CenterCrop(16), RandomResizedCrop(), PadCrop(2)):
        spec = ImageSpec(size=16, crop=crop, background=background)
        decode_into(rows[0], data, spec, np.full(23, 0.5))
        assert (rows == background).all()
        rows[:] = 0
    assert DecodeTask(background).decode(rows, np.arange(1), [data], np.zeros((1, 0))).all()
    assert (rows == background).all()


@pytest.mark.parametrize("kind", ["grey 8", "rgb 16", "palette 4", "rgb and alpha 8"])
def test_a_large_image_is_put_together_strip_by_strip(kind):
    data, pixels = made(*KINDS[kind])
    expected = composite(pixels, (255, 255, 255)).repeat(40, axis=0).repeat(20, axis=1)
    with opened(data, field := format_of(data), DECODED_BYTES) as image:
        load(image, data, field)
        large = image.resize((20 * SIZE[0], 40 * SIZE[1]), Image.Resampling.NEAREST)
    assert np.array_equal(rgb_pixels(large), expected)
    assert np.array_equal(np.asarray(flattened(large).convert("RGB")), expected)


def test_an_opaque_image_is_the_image_and_a_grey_one_stays_grey_on_a_grey_background_only():
    for mode in ("RGB", "L", "P", "RGBA", "LA", "1", "CMYK"):
        image = odd_images.picture().convert(mode)
        assert not is_transparent(image)
        assert np.array_equal(rgb_pixels(image), np.asarray(image.convert("RGB")))
    assert not is_transparent(odd_images.sixteen_bit())
    assert flattened(rgba().convert("LA")).mode == "L"
    assert flattened(rgba().convert("LA"), (200, 17, 90)).mode == "RGB"


SMALLER = ImageOptions(resize_shorter=8, image_format="jpg")


@pytest.mark.parametrize(
    ("image", "field", "options", "marks"),
    [
        (rgba(), "png", SMALLER, "alpha-to-background"),
        (rgba(), "png", ImageOptions(), "transparent"),
        (rgba(), "png", ImageOptions(resize_shorter=100), "transparent"),
        (rgba(), "jpg", ImageOptions(resize_shorter=8), "renamed-png+alpha-to-background"),
        (odd_images.picture().convert("RGBA"), "png", ImageOptions(resize_shorter=8), ""),
    ],
    ids=["resized", "as it came", "small enough", "named wrong", "hides nothing"],
)
def test_a_transparent_image_that_is_encoded_again_counts_as_repaired_and_is_shown_on_white(
    image, field, options, marks
):
    data = encoded(image, "PNG")
    found = examine(data, field=field, verify="decode", options=options)
    assert found.marks == marks
    stored = encode(data, found.field, found.marks, options)[1]
    assert (stored == data) == (marks == "transparent")
    if options is SMALLER:
        assert np.asarray(Image.open(io.BytesIO(stored)))[0].min() > 235
    shown = thumbnail_of(data, 8)
    assert shown.transparent == bool(marks)
    assert not marks or np.asarray(shown.pixels)[0].min() > 200


def test_a_colour_is_named_or_written_in_hexadecimal_and_is_of_use():
    assert [parse(text) for text in ("white", "#0a141E")] == [(255, 255, 255), (10, 20, 30)]
    for text in ("", "red-ish", "#12345", "1,2,3"):
        with pytest.raises(ConfigError, match="expected white, black, grey or #rrggbb"):
            parse(text)
    with pytest.raises(ConfigError, match="expected three levels"):
        check("red-ish")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--background is for images that are re-encoded"):
        ImageOptions(background=(0, 0, 0))


def test_a_build_stores_images_on_the_background_that_it_is_told(tmp_path):
    add(tmp_path / "raw", "stamp/1.png", encoded(Image.new("LA", SIZE, (9, 0)), "PNG"))
    where = ["--source=folder", f"--input={tmp_path}/raw", f"--output={tmp_path}/out", *HERE]
    options = ["--image-format=ppm", "--background=#00ff00", "--no-report"]
    assert pipelines.main(["build", *where, *options]) == 0
    manifest = manifests.load(str(tmp_path / "out")).manifest
    assert manifest.fixes == {"alpha-to-background": 1}
    [fields] = samples_of(tmp_path / "out", manifest, "train").values()
    assert (decode(fields["ppm"]) == (0, 255, 0)).all()
