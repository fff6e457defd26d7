"""The build, `verify`, the Writer and the stream make the same of each mask."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardset
from pipelines.check.verify import verify
from pipelines.images.options import ImageOptions
from shardset import ImageSpec, Mask, Resize
from shardset.errors import BadTarget, ConfigError, UndecodableImage
from shardset.format.tar import StoredSample
from shardset.storage.open import open_storage
from tests.makers.built import built, config_of, verified
from tests.makers.folders import write_csv
from tests.makers.odd_images import ORIENTATION, encoded, picture
from tests.makers.shardset import write_shard_set
from tests.makers.stored import quarantined

IDS = np.arange(70, dtype=np.uint8).reshape(7, 10) % 5
IMAGE = encoded(picture(1, (10, 7)), "PNG")


def png(pixels, orientation=1):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(Image.fromarray(np.ascontiguousarray(pixels)), "PNG", exif=exif)


GOOD = {
    "grey": png(IDS),
    "on its side": png(np.rot90(IDS), 6),
    "upside down": png(np.rot90(IDS, 2), 3),
    "pgm": b"P5 10 7 9\n" + IDS.tobytes(),
}
BAD = {
    "small": (png(IDS[:6]), "mask of another size: 10 x 6 pixels"),
    "transposed": (png(IDS.T), "mask of another size: 7 x 10 pixels"),
    "rgb": (png(np.stack([IDS] * 3, 2)), "not a mask: its mode is RGB"),
    "rgba": (png(np.stack([IDS] * 4, 2)), "not a mask: its mode is RGBA"),
    "cut": (png(IDS)[:-20], "truncated"),
}
ALL = GOOD | {name: data for name, (data, _) in BAD.items()}
SPEC = ImageSpec(size=70, crop=Resize())


def read_masks(folder, **options):
    targets = {"ids": Mask("mask.png")}
    stream = shardset.Stream(
        str(folder), "train", batch_size=4, seed=None, image=SPEC, targets=targets, **options
    )
    rows = [
        row for one in stream for row in zip(one["key"], one["ids"], one["weight"], strict=True)
    ]
    # the last batch is filled up with repeats
    return {key: (ids, weight) for key, ids, weight in reversed(rows) if key}


def test_a_build_leaves_out_the_bad_ones_with_reasons_and_the_stream_reads_the_rest(tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    (raw / "image.png").write_bytes(IMAGE)
    for name, data in ALL.items():
        (raw / f"{name}.mask").write_bytes(data)
    rows = [["image.png", f"{name}.mask", name.replace(" ", "-")] for name in ALL]
    write_csv(raw / "list.csv", ["path", "mask", "key"], rows)
    options = {"file_column": {"mask.png": "mask"}, "max_bad_fraction": 0.6, "num_shards": {"": 1}}
    built(config_of(raw / "list.csv", out, source="listing", **options))
    verified(out)
    listed = quarantined(out)
    assert len(listed) == len(BAD)
    for _, reason in BAD.values():
        assert any(f"its mask.png: {reason}" in entry["reason"] for entry in listed)
    found = read_masks(out, with_key=True)
    assert {*found} == {name.replace(" ", "-") for name in GOOD}
    for ids, _ in found.values():
        np.testing.assert_array_equal(ids[5::10, 3::7], IDS)


@pytest.mark.parametrize("verify", ["decode", "none"])
def test_masks_get_the_size_of_their_images_and_keep_their_numbers(verify, tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    turned = np.rot90(IDS)
    (raw / "image.png").write_bytes(png(np.stack([turned] * 3, 2), 6))
    (raw / "0.mask").write_bytes(png(turned.astype(np.uint16) * 300, 6))
    write_csv(raw / "list.csv", ["path", "mask"], [["image.png", "0.mask"]])
    options = {"file_column": {"mask.png": "mask"}, "num_shards": {"": 1}, "verify": verify}
    image = ImageOptions(resize_shorter=5)
    built(config_of(raw / "list.csv", out, source="listing", image=image, **options))
    verified(out)
    with shardset.open(str(out), "train") as found:
        stored = found[0].fields
    for name in ("png", "mask.png"):
        assert Image.open(io.BytesIO(stored[name])).size == (7, 5)
    targets = {"ids": Mask("mask.png", dtype="uint16")}
    spec = ImageSpec(size=70, crop=Resize())
    stream = shardset.Stream(str(out), "train", batch_size=1, image=spec, targets=targets)
    small = Image.fromarray(IDS).resize((7, 5), Image.Resampling.NEAREST)
    ids = next(iter(stream))["ids"][0][7::14, 5::10]
    np.testing.assert_array_equal(ids, np.asarray(small, np.uint16) * 300)


def test_verify_names_what_the_stream_refuses(tmp_path):
    samples = [
        StoredSample(
            key=name.replace(" ", "-"),
            fields=(("mask.png", data), ("png", IMAGE)),
            label=-1,
            serial=at,
        )
        for at, (name, data) in enumerate(ALL.items())
    ]
    write_shard_set(open_storage(str(tmp_path)), {"train": samples}, num_shards=1)
    said = [f"{one.where}: {one.sentence}" for one in verify(str(tmp_path), deep=True).problems]
    for name, (_, reason) in BAD.items():
        assert any(f"sample {name}: its mask.png can't be" in one and reason in one for one in said)
    assert sum("mask.png" in one for one in said) == len(BAD)
    with pytest.raises(BadTarget, match="mask of another size"):
        read_masks(tmp_path, with_key=True)
    found = read_masks(tmp_path, with_key=True, bad_samples="mask")
    assert {key for key, (_, weight) in found.items() if not weight} == {*BAD}


@pytest.mark.parametrize("name", BAD)
def test_the_writer_refuses_it_and_goes_on(name, tmp_path):
    data, reason = BAD[name]
    with shardset.Writer(str(tmp_path / "set")) as writer:
        with pytest.raises(
            UndecodableImage, match=f"{reason.partition(':')[0]}: sample 0 .*mask.png"
        ):
            writer.write(image=IMAGE, fields={"mask.png": data})
        writer.write(image=IMAGE, fields={"mask.png": GOOD["grey"], "depth.png": data})
    given: Any = picture(1)
    with pytest.raises(ConfigError, match=r"np.asarray\(image.convert\(\"RGB\"\)\)"):
        shardset.Writer(str(tmp_path / "other")).write(image=given)


def test_a_mask_is_left_as_its_image_is(tmp_path):
    with shardset.Writer(str(tmp_path)) as writer:
        image, mask = encoded(picture(1, (7, 10)), "PNG"), png(np.rot90(IDS), 6)
        writer.write(image=image, fields={"ids.png": mask})
    spec = ImageSpec(size=70, crop=Resize(), upright=False)
    stream = shardset.Stream(
        str(tmp_path), "train", batch_size=1, image=spec, targets={"ids": Mask("ids.png")}
    )
    np.testing.assert_array_equal(next(iter(stream))["ids"][0][3::7, 5::10], np.rot90(IDS))
