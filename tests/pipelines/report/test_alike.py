"""Which images are the same: by their checksums, and by small grey versions."""

import io

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipelines.report import alike


def grey(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L").resize((alike.SIDE, alike.SIDE)))


def photograph(seed: int) -> Image.Image:
    """Coarse noise: as different from others as photographs are, smooth enough to survive JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=quality)
    return Image.open(buffer)


def pairs(greys: list[np.ndarray], splits: list[int]) -> list[tuple[int, int]]:
    numbers = range(len(greys))
    found = alike.similar_pairs(numbers, np.array(greys), np.array(splits))
    return [(pair.left, pair.right) for pair in found]


def test_equal_images_have_the_same_checksum_and_size_and_show_every_split_and_label_first():
    samples = pa.table(
        {
            "row": range(8),
            "image_crc32c": [5, 6, 5, 5, 6, 7, 5, 5],
            "image.bytes": [10, 10, 10, 11, 10, 10, 10, 10],
            "split": ["train"] * 6 + ["val"] * 2,
            "label": [1, 2, 1, 1, 3, 1, 1, 1],
            "copy": [0] * 7 + [1],
        }
    )
    found = alike.equal_images(samples)
    assert [(group.samples, group.num_splits, group.num_labels) for group in found] == [
        ([1, 4], 1, 2),
        ([0, 6, 2], 2, 1),
    ]
    assert alike.equal_images(samples.slice(0, 0)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: as_jpeg(image, 40),
        lambda image: image.resize((80, 60)),
        lambda image: image.point(lambda value: int(0.7 * value + 20)),
        lambda image: image.convert("L"),
        lambda image: image.crop((5, 4, 155, 116)),
    ],
    ids=["compressed", "smaller", "darker", "grey", "cropped"],
)
def test_a_changed_copy_in_another_split_is_found(change):
    train = [grey(photograph(seed)) for seed in range(60)]
    test = [grey(photograph(seed)) for seed in range(100, 110)] + [grey(change(photograph(17)))]
    assert pairs(train + test, [0] * 60 + [1] * 11) == [(70, 17)]


def test_copies_within_a_split_and_pictures_without_contrast_are_like_nothing():
    same, flat = grey(photograph(1)), np.full((alike.SIDE, alike.SIDE), 80, np.uint8)
    assert pairs([same, same, flat, flat], [0, 0, 0, 1]) == []
    no_greys = np.zeros((0, alike.SIDE, alike.SIDE), np.uint8)
    assert alike.similar_pairs([], no_greys, np.zeros(0, int)) == []


def test_the_nearest_of_several_is_named_once_and_every_two_splits_are_compared():
    image = photograph(3)
    stored = [grey(as_jpeg(image, 30)), grey(image), grey(as_jpeg(image, 60)), grey(image)]
    [pair] = alike.similar_pairs(range(4), np.stack(stored), np.array([0, 0, 0, 1]))
    assert (pair.left, pair.right, pair.alike) == (3, 1, 1.0)
    assert {frozenset(pair) for pair in pairs([stored[1]] * 3, [0, 1, 2])} == set(
        map(frozenset, ({0, 1}, {0, 2}, {1, 2}))
    )
