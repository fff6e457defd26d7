"""The build, `verify`, the Writer, the reader and the report make of each file what Pillow does."""

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jpegio
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from pipelines import cli as pipelines
from pipelines.check.verify import verify
from pipelines.images.check import examine, marks_of
from pipelines.images.encode import encode, thumbnail_of
from pipelines.images.options import ImageOptions
from shardset.decode.crops import CenterCrop
from shardset.decode.image import ImageSpec, decode, decode_into, image_size
from shardset.decode.workers import DecodeTask
from shardset.errors import UndecodableImage
from shardset.format import manifest as manifests
from shardset.format.images import IMAGE_FIELDS, format_of
from shardset.format.images.jpeg_header import frame_of
from shardset.read.indexes import read_index
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from shardset.writer import Writer
from tests.makers import odd_images
from tests.makers.image_files import FILES, ImageFile
from tests.makers.stored import quarantined, samples_of
from tests.shardset.format.images.test_jpeg_header import header

pytestmark = pytest.mark.filterwarnings("ignore")
GOOD = {name: file for name, file in FILES.items() if not file.reason}
BAD = {name: file for name, file in FILES.items() if file.reason}
SPEC = ImageSpec(size=8, crop=CenterCrop(8))


def of_pillow(data: bytes) -> np.ndarray:
    """The upright pixels on white, uint8 [height, width, 3]; the upper 8 of 16 bits."""
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(white, image)
        return np.asarray(image.convert("RGB"))


def off(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found.astype(int) - expected).mean())


def test_there_is_a_file_of_every_format_that_a_build_stores():
    assert {file.field for file in GOOD.values()} == {*IMAGE_FIELDS}


@pytest.mark.parametrize("name", GOOD)
def test_every_part_gives_pillows_pixels(name, tmp_path):
    field, data, _, same = GOOD[name]
    expected, row = of_pillow(same or data), np.zeros((8, 8, 3), np.uint8)
    assert off(decode(data), expected) <= (0.5 if field == "jpg" else 0)  # by another decoder
    assert image_size(data) == expected.shape[:2]
    decode_into(row, data, SPEC, np.empty(0))
    whole, options = ImageOptions(), ImageOptions(image_format="ppm")
    assert format_of(data) == examine(data, field="", verify="none", options=whole).field == field
    for each in (whole, options):
        found = examine(data, field=field, verify="decode", options=each)
        stored = encode(data, field, found.marks, each)
        assert (found.field, stored[0]) == (field, "ppm" if each is options else field)
        assert format_of(stored[1]) == stored[0]
        pixels = expected if stored[1] == data else of_pillow(stored[1])
        assert off(pixels, expected) <= 8 * ("cmyk" in found.marks)
    shown = np.asarray(thumbnail_of(data, 99).pixels.convert("RGB"))
    assert off(shown, expected) == 0
    with Writer(str(tmp_path)) as writer:
        writer.write(image=data, label=0)


@pytest.mark.parametrize("name", BAD)
def test_every_part_refuses_what_has_no_pixels_for_the_same_reason(name, tmp_path):
    field, data, reason, _ = BAD[name]
    for act in (
        lambda: decode(data),
        lambda: decode_into(np.zeros((8, 8, 3), np.uint8), data, SPEC, np.empty(0)),
        lambda: examine(data, field=field, verify="header", options=ImageOptions()),
        lambda: examine(data, field=field, verify="decode", options=ImageOptions()),
        lambda: thumbnail_of(data, 9),
        lambda: Writer(str(tmp_path)).write(image=data, label=0),
    ):
        with pytest.raises(UndecodableImage) as caught:
            act()
        assert caught.value.reason == reason


def arithmetic(data: bytes, folder: Path) -> bytes:
    """The same JPEG with arithmetic codes instead of Huffman's."""
    before, after = folder / "before.jpg", folder / "after.jpg"
    before.write_bytes(data)
    image = jpegio.read(str(before))
    image.arith_code, image.optimize_coding = 1, 0
    jpegio.write(image, str(after))
    return after.read_bytes()


def test_no_decoder_is_asked_for_a_part_of_a_jpeg_whose_frame_is_rare(tmp_path, monkeypatch):
    data = odd_images.encoded(odd_images.picture(size=(99, 67)), "JPEG")
    rare, row = arithmetic(data, tmp_path), np.zeros((8, 8, 3), np.uint8)
    assert frame_of(rare) == ("SOF9", 8, 67, 99, 3, 3)
    for owner, name in (
        (JpegImageFile, "draft"),
        (simplejpeg, "decode_jpeg"),
        (jpegio, "read"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, _name=name, **__: pytest.fail(_name))
    expected = of_pillow(data)
    small = ImageOptions(resize_shorter=8, image_format="png")
    assert off(decode(rare, (9, 9)), expected) == 0
    for spec in (SPEC, ImageSpec(size=8)):
        decode_into(row, rare, spec, np.full(23, 0.5))
        assert DecodeTask((255,) * 3, True, spec).decode(
            row[None], np.zeros(1, int), [rare], np.full((1, 23), 0.5)
        )
    for options in (ImageOptions(), small):
        assert examine(rare, field="", verify="decode", options=options).marks == ""
    wanted = Image.fromarray(expected).resize((12, 8), Image.Resampling.LANCZOS, reducing_gap=3)
    assert off(np.asarray(thumbnail_of(rare, 12).pixels), np.asarray(wanted)) == 0
    assert off(of_pillow(encode(rare, "jpg", "", small)[1]), np.asarray(wanted)) == 0
    assert encode(rare, "jpg", "", ImageOptions(jpeg_restart=True)) == ("jpg", rare)
    with Writer(str(tmp_path / "set")) as writer:
        writer.write(image=rare)


@pytest.mark.parametrize("kind", [3, 5, 6, 7, 11, 13, 14, 15])
def test_a_frame_that_no_decoder_reads_is_refused_by_its_name(kind):
    # without an image: a complete one might harm a decoder that is asked for a part of it
    data = header((kind, 8))
    for act in (
        lambda: decode(data, (1, 1)),
        lambda: decode_into(np.zeros((8, 8, 3), np.uint8), data, SPEC, np.empty(0)),
        lambda: examine(data, field="", verify="decode", options=ImageOptions()),
        lambda: thumbnail_of(data, 1),
    ):
        with pytest.raises(UndecodableImage, match=f"^unsupported format: .*SOF{kind} of 8 bits"):
            act()


def build(tmp_path: Path, *words: str) -> tuple[str, set[str]]:
    """A set of all files, named by what they are, and the names that the build left out."""
    folder, output = tmp_path / "raw" / "a", tmp_path / f"out{len(words)}"
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(FILES.values()):
        (folder / f"{number}.{file.field}").write_bytes(file.data)
    where = f"--source folder --input {tmp_path}/raw --output {output} --num-shards 1"
    command = f"build {where} --max-bad-fraction 0.5 --direct_num_workers=1"
    assert pipelines.main([*command.split(), *words]) == 0
    return str(output), {names(entry["name"]) for entry in quarantined(output)}


def names(text: str) -> str:
    """The name of the file that a path or a key `a/17` stands for."""
    number = re.search(r"a/(\d+)", text)
    assert number, text
    return list(FILES)[int(number[1])]


def test_a_build_leaves_out_what_verify_names_and_the_stream_shows_the_rest(tmp_path, capsys):
    output, left_out = build(tmp_path)
    assert left_out == {*BAD}
    assert verify(output, deep=True).ok
    said, page = capsys.readouterr().out, Path(output, "report.html").read_text()
    marks = Counter(mark for file in GOOD.values() for mark in marks_of(marks_in(file)))
    transparent, turned = marks.pop("transparent"), marks.pop("turned")
    assert f"note: {transparent} images with transparency are stored as they came" in said
    assert f"note: {turned} images are stored turned, as EXIF says; the stream turns" in said
    assert f"{transparent} decoded images have transparency; the stream puts them on" in page
    assert f"{turned} decoded images are stored turned" in page
    manifest = manifests.load(output).manifest
    assert manifest.fixes == marks
    assert "background" not in manifest.provenance.options["image"]
    stored = samples_of(output, manifest, "train")
    storage, (shard,) = open_storage(output), manifest.split("train").shards
    rows = {row["key"]: row for row in read_index(storage, shard).to_pylist()}
    spec = replace(SPEC, background=(10, 20, 30))
    shown = {}
    for batch in Stream(output, "train", batch_size=9, seed=None, image=spec, with_key=True):
        shown |= dict(zip(batch["key"], batch["image"], strict=True))
    assert {names(key) for key in shown} == {*GOOD}
    for key, found in shown.items():
        file, row = GOOD[names(key)], np.zeros((8, 8, 3), np.uint8)
        data = stored[key][file.field]
        assert (rows[key]["height"], rows[key]["width"]) == of_pillow(file.same or data).shape[:2]
        assert data == file.data or "cmyk" in marks_in(file)
        decode_into(row, data, spec, np.empty(0))
        assert np.array_equal(found, row)
    unchecked, without_format = build(tmp_path, "--verify", "none", "--no-report")
    problems = verify(unchecked, deep=True).problems
    found = {names(problem.where + problem.sentence) for problem in problems}
    assert found | without_format == {*BAD}


def marks_in(file: ImageFile) -> str:
    """What the build notes of a file."""
    return examine(file.data, field=file.field, verify="decode", options=ImageOptions()).marks
