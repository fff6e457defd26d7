import threading

import numpy as np
import pytest

from pipelines.images.check import examine
from pipelines.images.encode import thumbnail_of
from pipelines.images.options import ImageOptions
from shardset.decode.crops import CenterCrop, Crop, PadCrop, RandomResizedCrop
from shardset.decode.image import ImageSpec, decode, decode_into
from shardset.errors import ConfigError, UndecodableImage
from shardset.format.images import limits
from tests.makers.shardset import encode, pixels


def many_scans(number: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times."""
    data = encode(pixels(1, 48, 64), "jpeg", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


SMALL = ImageOptions(decoded_bytes=1_000_000)


def of_build(data: bytes, verify) -> None:
    examine(data, field="", verify=verify, options=SMALL)


def of_reader(data: bytes, crop: Crop) -> None:
    spec = ImageSpec(size=8, crop=crop, decoded_bytes=SMALL.decoded_bytes)
    decode_into(np.zeros((8, 8, 3), np.uint8), data, spec, np.full(23, 0.5))


WAYS = {
    "header": lambda data: of_build(data, "header"),
    "decode": lambda data: of_build(data, "decode"),
    "thumbnail": lambda data: thumbnail_of(data, 96, SMALL),
    "random": lambda data: of_reader(data, RandomResizedCrop()),
    "centre": lambda data: of_reader(data, CenterCrop(8)),
    "padded": lambda data: of_reader(data, PadCrop(1)),
}


@pytest.mark.parametrize("way", WAYS)
def test_build_and_reader_refuse_an_image_that_takes_too_much(way, monkeypatch):
    # Complete files took 3 GB from 40 bytes, or ten seconds for the thousand scans in 11 KB.
    assert (limits.MAX_SCANS, limits.DECODED_BYTES) == (100, 2 << 30)
    monkeypatch.setattr(limits, "MAX_SCANS", 20)
    for data, what in (
        (encode(pixels(1, 250, 240), "webp"), "240 x 250 pixels, which take 1200000 bytes"),
        (many_scans(30), r"3\d scans, at most 20"),
    ):
        with pytest.raises(UndecodableImage, match=f"^takes too much to decode: {what}"):
            WAYS[way](data)
    few = many_scans(8)
    of_build(few, "decode")
    assert decode(few).shape == (48, 64, 3)


@pytest.mark.parametrize("file_format", ["png", "jpeg", "webp", "tiff", "ppm"])
def test_a_smaller_budget_refuses_smaller_images(file_format):
    data = encode(pixels(1, 40, 50), file_format)
    assert decode(data).shape == (40, 50, 3)
    with pytest.raises(UndecodableImage, match=r"which take \d+ bytes to decode, at most 1000"):
        decode(data, decoded_bytes=1000)
    with pytest.raises(UndecodableImage, match="at most 1000"):
        examine(data, field="", verify="decode", options=ImageOptions(decoded_bytes=1000))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True}], ids=str)
def test_what_follows_the_end_of_a_jpeg_counts_as_no_scan(options):
    # A telephone appends a film to a photograph.
    data = encode(pixels(1, 48, 64), "jpeg", **options) + b"\xff\xda" * 1000
    assert limits.num_scans(data) <= 10
    assert decode(data).shape == (48, 64, 3)


def test_large_images_wait_for_each_other_and_never_for_themselves():
    free, budget = limits._FREE_BYTES, 3 * limits._FREE_BYTES
    entered, leave, inside = threading.Semaphore(0), threading.Event(), []

    def hold() -> None:
        with limits.room(2 * free, budget):
            inside.append(limits._room_of_process().taken)
            entered.release()
            leave.wait(60)

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=60)
    with limits.room(free, budget):  # small: waits for nobody
        assert inside == [2 * free]
    leave.set()
    for thread in threads:
        thread.join(60)
    assert inside == [2 * free] * 3
    with limits.room(9 * free, budget):
        pass
    assert not limits._room_of_process().taken


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1"])
def test_what_is_no_budget_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected a number of bytes"):
        ImageSpec(size=8, decoded_bytes=wrong)
    with pytest.raises(ConfigError, match=r"decoded_bytes is .*, expected int >= 1"):
        ImageOptions(decoded_bytes=wrong)
