"""Which images are the same: by their checksums, and by small grey versions."""

import io
import time

import numpy as np
import pytest
from PIL import Image

from pipelines.report import near_duplicates


def grey(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L").resize((near_duplicates.GREY_WIDTH, near_duplicates.GREY_HEIGHT)))


def photograph(seed: int) -> Image.Image:
    """Coarse noise: as different from others as photographs are, smooth enough to survive JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((160, 120), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=quality)
    return Image.open(buffer)


def test_groups_need_the_same_checksum_and_the_same_size():
    crc = np.array([5, 6, 5, 5, 6, 7], np.uint32)
    size = np.array([10, 10, 10, 11, 10, 10])
    assert [group.tolist() for group in near_duplicates.equal_groups(crc, size)] == [[0, 2], [1, 4]]


def test_no_samples_have_no_groups():
    assert near_duplicates.equal_groups(np.zeros(0, np.uint32), np.zeros(0, int)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: as_jpeg(image, 40),
        lambda image: image.resize((80, 60)),
        lambda image: image.point(lambda value: int(0.7 * value + 20)),
        lambda image: image.convert("L"),
    ],
    ids=["compressed", "smaller", "darker", "grey"],
)
def test_a_changed_copy_in_another_split_is_found(change):
    train = [grey(photograph(seed)) for seed in range(60)]
    test = [grey(photograph(seed)) for seed in range(100, 110)] + [grey(change(photograph(17)))]
    found = near_duplicates.similar_pairs(np.stack(train + test), np.array([0] * 60 + [1] * 11))
    assert [(pair.left, pair.right) for pair in found] == [(70, 17)]


def test_copies_within_a_split_are_not_compared():
    same = grey(photograph(1))
    assert near_duplicates.similar_pairs(np.stack([same, same]), np.array([0, 0])) == []


def test_pictures_without_contrast_are_like_nothing():
    flat = np.full((2, near_duplicates.GREY_HEIGHT, near_duplicates.GREY_WIDTH), 80, np.uint8)
    assert near_duplicates.similar_pairs(flat, np.array([0, 1])) == []


def test_the_nearest_of_several_is_named_once():
    image = photograph(3)
    stored = [grey(as_jpeg(image, 30)), grey(image), grey(as_jpeg(image, 60)), grey(image)]
    (pair,) = near_duplicates.similar_pairs(np.stack(stored), np.array([0, 0, 0, 1]))
    assert (pair.left, pair.right, pair.distance, pair.correlation) == (3, 1, 0, 1.0)


def test_every_two_of_three_splits_are_compared():
    same = grey(photograph(5))
    found = near_duplicates.similar_pairs(np.stack([same, same, same]), np.array([0, 1, 2]))
    assert {frozenset((pair.left, pair.right)) for pair in found} == {
        frozenset(two) for two in ((0, 1), (0, 2), (1, 2))
    }


def test_blocks_of_rows_change_nothing():
    greys = np.stack([grey(photograph(seed)) for seed in range(20)] * 3)
    splits = np.array([0] * 40 + [1] * 20)
    expected = near_duplicates.similar_pairs(greys, splits)
    assert near_duplicates.similar_pairs(greys, splits, num_rows=3) == expected
    assert len(expected) == 20


def test_no_images_have_no_pairs():
    nothing = np.zeros((0, near_duplicates.GREY_HEIGHT, near_duplicates.GREY_WIDTH), np.uint8)
    assert near_duplicates.similar_pairs(nothing, np.zeros(0, int)) == []


def test_pictures_of_one_layout_are_compared_in_seconds():
    # 4 million pairs whose hashes are near: one by one they took 7 s, and 100,000 such images half an hour.
    noise = np.random.default_rng(0).normal(0, 2, (5_000, 16, 18))
    greys = np.clip(np.linspace(0, 255, 18) + noise, 0, 255).astype(np.uint8)
    splits = np.arange(5_000) % 5 == 0
    started = time.process_time()
    found = {pair.left: pair for pair in near_duplicates.similar_pairs(greys, splits)}
    assert time.process_time() - started < 3
    few, many = np.flatnonzero(splits), np.flatnonzero(~splits)
    best = np.corrcoef(greys.reshape(5_000, -1))[np.ix_(few, many)].max(axis=1)
    assert [found[left].correlation for left in few.tolist()] == pytest.approx(best, abs=2e-4)
