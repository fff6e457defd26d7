"""Images that are stored turned: upright wherever pixels are shown or trained on, as by
`exif_transpose` of Pillow.
"""

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from pyarrow import parquet

import shardset
from pipelines.images.check import examine
from pipelines.images.encode import encode, thumbnail_of
from pipelines.images.options import ImageOptions, resized
from shardset.decode.crops import CenterCrop, PadCrop, RandomResizedCrop, Resize
from shardset.decode.image import ImageSpec, decode, image_size
from shardset.decode.workers import DecodeTask
from shardset.format.images.orientation import orientation_of, upright_size
from shardset.settings import with_values
from shardset.stream.stream import Stream
from shardset.writer import Writer
from tests.makers import odd_images
from tests.makers.odd_images import ORIENTATION, encoded
from tests.makers.training import tiny_config
from tests.shardset.decode.test_crops import one
from trainer.data.preparation import eval_spec, train_spec

SIZE = (52, 37)
XMP = '<rdf tiff:Orientation="%d"/>'
XMP_OF_JPEG = b"http://ns.adobe.com/xap/1.0/\0" + XMP.encode()
PADDINGS = {"fill": b"\xff\xff", "zeros": b"\0\0\0", "RST": b"\xff\xd3"}


def in_text(kind, exif, xmp):
    """The metadata of a PNG as ImageMagick writes it, or as XMP."""
    info = PngInfo()
    if kind == "XMP":
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    else:
        lines = f"\nexif\n{len(exif):8d}\n{exif[:30].hex()}\n{exif[30:].hex()}\n"
        info.add_text("Raw profile type exif", lines, zip=kind == "zTXt")
    return {"pnginfo": info}


FILES: dict = {
    "jpg": ("JPEG", lambda exif, xmp: {"quality": 95, "exif": exif}),
    "jpg XMP": ("JPEG", lambda exif, xmp: {"quality": 95, "xmp": xmp}),
    "jpg progressive": (
        "JPEG",
        lambda exif, xmp: {"quality": 95, "progressive": True, "exif": exif},
    ),
    **{f"jpg {name}": ("JPEG", lambda exif, xmp: {"exif": exif}) for name in PADDINGS},
    "png": ("PNG", lambda exif, xmp: {"exif": exif}),
    "png at its end": ("PNG", lambda exif, xmp: {"exif": exif}),
    **{
        f"png {kind}": ("PNG", lambda exif, xmp, kind=kind: in_text(kind, exif, xmp))
        for kind in ("tEXt", "zTXt", "XMP")
    },
    "webp": ("WEBP", lambda exif, xmp: {"lossless": True, "exif": exif}),
    "webp XMP": ("WEBP", lambda exif, xmp: {"lossless": True, "xmp": xmp}),
    "avif": ("AVIF", lambda exif, xmp: {"exif": exif}),
    "tif": ("TIFF", lambda exif, xmp: {"exif": exif}),
    "tif XMP": ("TIFF", lambda exif, xmp: {"tiffinfo": {0x02BC: xmp}}),
    "tif LZW XMP": (
        "TIFF",
        lambda exif, xmp: {"tiffinfo": {0x02BC: xmp}, "compression": "tiff_lzw"},
    ),
}
"""Where the orientation stands, by the format of the file."""


def turned_file(kind, orientation, size=SIZE, mode="RGB"):
    name, options = FILES[kind]
    exif = Image.Exif()
    exif[0x010E] = "a description, which comes before the orientation"
    exif[ORIENTATION] = orientation
    metadata = options(exif.tobytes(), XMP.encode() % orientation)
    data = encoded(odd_images.picture(3, size).convert(mode), name, **metadata)
    if padding := PADDINGS.get(kind.removeprefix("jpg ")):
        at = data.index(b"\xff\xe1")
        return data[:at] + padding + data[at:]
    if kind == "png at its end":
        at = data.index(b"eXIf") - 4
        end = data.index(b"IDAT") - 4
        return data[:at] + data[end:-12] + data[at:end] + data[-12:]
    return data


def by_pillow(data):
    """The upright image."""
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def upright_by_pillow(data):
    """The same pixels, decoded as they are stored and turned by Pillow, as a PNG."""
    with Image.open(io.BytesIO(data)) as image:
        exif = b"" if image.format == "TIFF" else image.getexif().tobytes()
    stored = Image.fromarray(decode(data, upright=False))
    stored.info["exif"] = exif
    return encoded(Image.fromarray(np.asarray(ImageOps.exif_transpose(stored))), "PNG")


def off(found, expected):
    return np.abs(np.asarray(found, int) - np.asarray(expected)).mean()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", FILES)
def test_crops_are_those_of_the_upright_image(kind, orientation):
    data = turned_file(kind, orientation)
    expected = np.asarray(by_pillow(data))
    assert image_size(data) == decode(data).shape[:2] == expected.shape[:2]
    assert np.abs(decode(data).astype(int) - expected).mean() <= (0.5 if "jpg" in kind else 0)
    upright = upright_by_pillow(data)
    for crop in (RandomResizedCrop(), CenterCrop(30), CenterCrop(30, "bicubic"), PadCrop(4)):
        spec = ImageSpec(size=30, crop=crop)
        np.testing.assert_array_equal(one(data, spec), one(upright, spec))


@pytest.mark.parametrize("kind", FILES)
def test_build_writer_stream_and_report_turn_an_image_as_pillow_does(kind, tmp_path):
    field = kind.split()[0]
    turned = {orientation: turned_file(kind, orientation) for orientation in range(1, 9)}
    expected = {orientation: by_pillow(data) for orientation, data in turned.items()}
    with Writer(str(tmp_path)) as writer:
        for orientation, data in turned.items():
            writer.write(image=data, key=str(orientation))
    columns = parquet.read_table(tmp_path / "train/train-000000.parquet").to_pydict()
    view, spec = shardset.open(str(tmp_path)), ImageSpec(size=40, crop=Resize())
    stream = Stream(str(tmp_path), "train", batch_size=8, seed=None, image=spec, with_matrix=True)
    batch = next(iter(stream))
    for at, (orientation, data) in enumerate(turned.items()):
        image = expected[orientation]
        size = image.size[::-1]
        assert view[at].image.shape[:2] == tuple(batch["orig_size"][at]) == size
        assert (columns["height"][at], columns["width"][at]) == size
        assert off(batch["image"][at], image.resize((40, 40), Image.Resampling.BOX)) < 12
        shown = thumbnail_of(data, 99)
        assert (shown.height, shown.width) == size
        assert off(shown.pixels, image) == 0
        for options in (ImageOptions(image_format="ppm"), ImageOptions(resize_shorter=20)):
            found = examine(data, field=field, verify="decode", options=options)
            assert upright_size(found.size, found.orientation) == image.size
            assert found.marks == "turned-upright" * (orientation != 1 and field != "tif")
            stored = by_pillow(encode(data, found.field, found.marks, options)[1])
            assert stored.size == resized(image.size, options.resize_shorter)
            assert off(stored, image.resize(stored.size, Image.Resampling.LANCZOS)) < 12


@pytest.mark.parametrize("orientation", [1, 4, 6, 7])
def test_a_jpeg_that_is_reduced_while_it_is_decoded_is_upright(orientation):
    data = turned_file("jpg", orientation, (640, 420))
    upright = upright_by_pillow(data)
    for crop in (RandomResizedCrop((0.5, 1)), CenterCrop(80)):
        spec = ImageSpec(size=64, crop=crop)
        off = np.abs(one(data, spec).astype(int) - one(upright, spec)).mean()
        assert off < 3, (crop, off)


@pytest.mark.parametrize("kind", FILES)
def test_processes_that_decode_turn_images_too_and_leave_them_where_that_is_not_wanted(kind):
    data = turned_file(kind, 6, (24, 24))
    rows, drawn = np.zeros((1, 24, 24, 3), np.uint8), np.full((1, 3), 0.5)
    for upright in (True, False):
        spec = ImageSpec(size=24, crop=PadCrop(0), upright=upright)
        for task in (DecodeTask((255,) * 3, upright), DecodeTask((255,) * 3, upright, spec)):
            assert task.decode(rows, np.array([0]), [data], drawn).all()
            np.testing.assert_array_equal(rows[0], decode(data, upright=upright))
    # Pillow turns it anyway
    assert kind.startswith("tif") == np.array_equal(decode(data), decode(data, upright=False))


def damaged(rng):
    """A JPEG whose EXIF data were flipped, cut, divided or named twice."""
    exif = bytearray(odd_images.exif_rotated(rng.randint(0, 9))[30:60])
    for _ in range(rng.randint(0, 3)):
        exif[rng.randrange(len(exif))] = rng.choice([0, 255, 1, 3, 4, rng.randrange(256)])
    del exif[rng.choice([len(exif), rng.randrange(len(exif))]) :]
    at = rng.choice([len(exif), rng.randrange(len(exif) + 1)])
    parts = [rng.choice([b"", b"Exif\0\0"]) + exif[:at], exif[at:]]
    bodies = [*(b"Exif\0\0" + part for part in parts), XMP_OF_JPEG % rng.randint(0, 9)]
    segments = [
        struct.pack(">HH", 0xFFE1, len(body) + 2) + body + rng.choice([b"", *PADDINGS.values()])
        for body in bodies
    ]
    plain = odd_images.jpeg()
    return plain[:2] + b"".join(segments[: rng.randint(2, 3)]) + plain[2:]


@pytest.mark.filterwarnings("ignore")
def test_damaged_exif_is_read_as_pillow_reads_it_and_raises_nothing():
    rng, found = random.Random(0), []
    for _ in range(1000):
        data = damaged(rng)
        with Image.open(io.BytesIO(data)) as image:
            try:
                expected = image.getexif().get(ORIENTATION, 1)
            except (SyntaxError, struct.error):
                expected = 1
        expected = expected if isinstance(expected, int) and 1 <= expected <= 8 else 1
        found.append(orientation_of(data))
        assert found[-1] == expected, data[:200]
    assert len(set(found)) == 8
    for cut in range(0, 400, 7):
        orientation_of(turned_file("png", 6)[:cut])


def test_a_mark_that_pillow_does_not_know_hides_no_orientation():
    data = turned_file("jpg", 6)
    at = data.index(b"\xff\xe1")
    assert orientation_of(data[:at] + b"\xff\x01" + data[at:]) == 6  # TEM: OpenCV reads it


def test_a_damaged_text_of_a_png_hides_no_orientation():
    data = turned_file("png", 6)
    damaged = odd_images.png_chunk(b"zTXt", b"Raw profile type exif\0\7")
    assert orientation_of(data[:33] + damaged + data[33:]) == 6


@pytest.mark.parametrize(
    ("kind", "mode", "options", "fix"),
    [
        ("jpg", "RGB", ImageOptions(), ""),
        ("jpg", "RGB", ImageOptions(resize_shorter=999), "turned-upright"),
        ("png", "RGB", ImageOptions(image_format="jpg"), "turned-upright"),
        ("webp", "RGB", ImageOptions(image_format="webp"), ""),
        ("jpg", "CMYK", ImageOptions(), "cmyk-to-rgb+turned-upright"),
    ],
)
def test_the_build_counts_what_it_keeps_turned_and_what_it_stores_upright(kind, mode, options, fix):
    data = turned_file(kind, 6, mode=mode)
    found = examine(data, field=kind, verify="decode", options=options)
    assert found.marks == (fix or "turned")
    _, stored = encode(data, found.field, found.marks, options)
    assert (stored == data) == (not fix)
    with Image.open(io.BytesIO(stored)) as image:
        assert image.getexif().get(ORIENTATION, 1) == (1 if fix else 6)
    assert np.abs(decode(stored).astype(int) - decode(data)).mean() < 8
    small = thumbnail_of(data, 26)
    assert small.turned
    assert small.pixels.height > small.pixels.width
    assert (small.height, small.width) == image_size(data)


def test_a_run_may_take_images_as_they_are_stored_and_on_a_background_of_its_own():
    settings = {"image.upright": False, "image.background": "#0a141e"}
    image = with_values(tiny_config("shards", "run"), settings).image
    for spec in (train_spec(image), eval_spec(image)):
        assert (spec.upright, spec.background) == (False, (10, 20, 30))
