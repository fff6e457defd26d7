"""JPEGs rewritten with restart markers: other bytes, the same picture."""

import io
import random
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from pipelines import cli
from pipelines.images import restart_markers
from pipelines.images.check import examine
from pipelines.images.encode import encode, libraries
from pipelines.images.options import ImageOptions
from pipelines.images.restart_markers import add_restart_markers
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.manifest import load
from tests.makers import odd_images
from tests.makers.built import HERE, add, config_of
from tests.makers.stored import samples_of

KINDS: dict = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4"},
    "progressive": {"progressive": True},
    "own tables": {"optimize": True},
    "restarts already": {"restart_marker_blocks": 3},
    "grey": {},
}


def jpeg(kind, size=(130, 75), **options):
    image = odd_images.picture(3, size).convert("L" if kind == "grey" else "RGB")
    return odd_images.encoded(image, "JPEG", quality=90, **KINDS[kind], **options)


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


def marks(data):
    return re.findall(rb"\xff[\xd0-\xd7]", data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(128, 64), (130, 75), (97, 33), (8, 8), (1, 1)])
def test_the_picture_stays_the_same_to_the_last_bit(kind, size):
    data = jpeg(kind, size)
    assert np.array_equal(pixels(add_restart_markers(data)), pixels(data))


@pytest.mark.parametrize(
    ("kind", "size", "in_a_row"),
    [
        ("4:2:0", (128, 64), 4),
        ("4:2:0", (130, 75), 9),
        ("4:4:4", (128, 64), 4),
        ("grey", (72, 64), 3),
        ("4:4:4", (97, 64), 1),
    ],
)
def test_every_segment_is_16_to_32_pixels_wide_or_a_whole_row(kind, size, in_a_row):
    rows = -(-size[1] // (16 if kind == "4:2:0" else 8))
    found = marks(add_restart_markers(jpeg(kind, size)))
    assert found == [b"\xff" + bytes([0xD0 + number % 8]) for number in range(rows * in_a_row - 1)]


def test_a_rewritten_jpeg_is_sequential_and_is_not_rewritten_again():
    data = add_restart_markers(jpeg("progressive"))
    assert "progressive" not in Image.open(io.BytesIO(data)).info
    assert marks(data)
    once = add_restart_markers(jpeg("4:2:0"))
    assert add_restart_markers(jpeg("4:2:0")) == once == add_restart_markers(once)


def test_exif_comment_and_colour_profile_stay():
    data = add_restart_markers(
        jpeg(
            "4:2:0",
            exif=Image.open(io.BytesIO(odd_images.exif_rotated())).getexif(),
            comment=b"c",
            icc_profile=b"p" * 99,
        )
    )
    image = Image.open(io.BytesIO(data))
    assert image.getexif()[274] == 6
    assert (image.info["comment"], image.info["icc_profile"]) == (b"c", b"p" * 99)


def test_what_is_no_whole_jpeg_is_never_an_error():
    assert add_restart_markers(b"nothing like one") == b"nothing like one"
    data = jpeg("4:2:0")
    assert all(add_restart_markers(data[:size]) for size in range(2, len(data), 97))


def test_images_that_nobody_decoded_are_not_rewritten():
    with pytest.raises(ConfigError, match="--verify decode"):
        config_of("in", "out", verify="header", image=ImageOptions(jpeg_restart=True))


def test_the_build_rewrites_jpegs_only_and_only_when_asked_also_resized_ones():
    asked, data = ImageOptions(jpeg_restart=True), jpeg("4:2:0")
    assert encode(data, "jpg", "", asked) == ("jpg", add_restart_markers(data))
    assert encode(data, "jpg", "", ImageOptions()) == ("jpg", data)
    assert encode(odd_images.png(), "png", "", asked) == ("png", odd_images.png())
    small = encode(data, "jpg", "", ImageOptions(resize_shorter=32, jpeg_restart=True))[1]
    plain = encode(data, "jpg", "", ImageOptions(resize_shorter=32))[1]
    assert marks(small)
    assert np.array_equal(pixels(small), pixels(plain))


def test_the_library_that_decides_the_bytes_is_named_and_its_lack_says_what_to_install(monkeypatch):
    assert libraries(ImageOptions(jpeg_restart=True))["pyjpegio"]
    assert "pyjpegio" not in libraries(ImageOptions())
    monkeypatch.setitem(sys.modules, "jpegio", None)
    with pytest.raises(ConfigError, match=r"install 'shardset\[pipelines\]'"):
        add_restart_markers(jpeg("grey"))


def test_a_rewrite_that_would_change_a_coefficient_is_not_used(monkeypatch):
    monkeypatch.setattr(restart_markers, "_equal", lambda before, after: False)
    assert add_restart_markers(jpeg("4:2:0")) == jpeg("4:2:0")


def test_a_build_rewrites_jpegs_if_it_is_asked_and_its_manifest_says_so(tmp_path):
    for number in range(4):
        add(tmp_path / "raw", f"cat/{number}.jpg", odd_images.jpeg(number))
    where = ["--source=folder", f"--input={tmp_path}/raw", f"--output={tmp_path}/out", *HERE]
    assert cli.main(["build", *where, "--num-shards=1", "--jpeg-restart"]) == 0
    manifest = load(str(tmp_path / "out")).manifest
    assert manifest.provenance.options["image"]["jpeg_restart"] is True
    stored = samples_of(tmp_path / "out", manifest, "train")
    assert stored["cat/2"]["jpg"] == add_restart_markers(odd_images.jpeg(2))


def test_a_jpeg_that_holds_more_than_its_image_stays_as_it_is_and_is_counted(tmp_path):
    mpo = odd_images.encoded(
        odd_images.picture(), "MPO", save_all=True, append_images=[odd_images.picture(1, (9, 9))]
    )
    files = {
        "mpo": mpo,
        "film": odd_images.jpeg() + b"\0\0\0\x18ftypmp42",
        "plain": odd_images.jpeg(2),
    }
    for name, data in files.items():
        assert (add_restart_markers(data) == data) == (name != "plain")
        add(tmp_path / "raw", f"cat/{name}.jpg", data)
    where = ["--source=folder", f"--input={tmp_path}/raw", f"--output={tmp_path}/out", *HERE]
    assert cli.main(["build", *where, "--num-shards=1", "--jpeg-restart"]) == 0
    manifest = load(str(tmp_path / "out")).manifest
    stored = samples_of(tmp_path / "out", manifest, "train")
    assert [stored[f"cat/{name}"]["jpg"] == files[name] for name in files] == [True, True, False]
    [note] = manifest.provenance.notes
    assert note.startswith("2 images are kept without restart markers")
    assert not manifest.fixes
    # what is re-encoded holds its image alone
    asked = ImageOptions(jpeg_restart=True, resize_shorter=24)
    assert examine(mpo, field="jpg", verify="decode", options=asked).marks == ""
    assert marks(encode(mpo, "jpg", "", asked)[1])


ADOBE = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0"
TABLE = b"\xff\xdb\0\x43\0" + bytes(range(1, 65))
HEIGHT = b"\xff\xdc\0\x04\0\x10"


def mutants(number):
    """JPEGs of all kinds with a byte, a segment or a scan changed, always the same."""
    draw = random.Random(7)
    bases = [jpeg(kind, (48, 40)) for kind in KINDS]
    for _ in range(number):
        data = bytearray(draw.choice(bases))
        begins = [found.start() for found in re.finditer(rb"\xff[\xc0-\xcf\xda-\xfe]", data)]
        start, stop = draw.choice([*pairwise(begins)])
        match draw.randrange(4):
            case 0:
                data[draw.randrange(2, stop)] = draw.randrange(256)
            case 1:
                data[start:start] = data[start:stop]
            case 2:
                data[start:start] = draw.choice((ADOBE + bytes([draw.randrange(3)]), TABLE, HEIGHT))
            case _:
                del data[start:-2]
        yield bytes(data)


def test_a_damaged_jpeg_that_the_build_accepts_keeps_its_pixels():
    rewritten = 0
    for data in mutants(300):
        try:
            examine(
                data, field="jpg", verify="decode", options=ImageOptions(decoded_bytes=8_000_000)
            )
        except UndecodableImage:
            continue
        found = add_restart_markers(data)
        rewritten += found != data
        assert found == data or np.array_equal(pixels(found), pixels(data))
    assert rewritten > 50


def test_a_progressive_jpeg_without_its_last_scans_stays_because_decoders_smooth_it():
    data = jpeg("progressive")
    scans = [found.start() for found in re.finditer(rb"\xff\xda", data)]
    cut = data[: scans[3]] + b"\xff\xd9"
    assert add_restart_markers(cut) == cut
    assert add_restart_markers(data) != data
