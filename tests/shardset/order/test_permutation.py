"""The frozen numbers on which every order stands, and what a permutation must be for every n and
key.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardset.order.permutation import derive_key, hash64, hash_text, permute

KEYS = st.integers(0, 2**64 - 1)
WORDS = st.integers(-(2**63), 2**64 - 1)

# To change any number in the next five tests, raise ORDER_VERSION: the order of every existing run
# hangs on them.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 0),
        # also the first output of the published SplitMix64 seeded with 0
        ((0,), 0xE220A8397B1DCDAF),
        ((1,), 0x910A2DEC89025CC1),  # ... and with 1
        ((0, 0), 0xA706DD2F4D197E6F),
        ((7, 1), 0x3D41BF495CD3075F),
        ((8, 0), 0x4442E4266C0AC966),
        ((2**64 - 1,), 0xE4D971771B652C20),
        ((-1,), 0xE4D971771B652C20),
        ((1, 2, 3), 0xD0734750FDE362B3),
    ],
)
def test_hash64_is_frozen(words, expected):
    assert hash64(*words) == expected


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("", 0, 0x3C1B4FBFD8FFAFC3),
        ("n01440764_10026", 0, 0x9C0A3573250D85EF),
        ("n01440764_10026", 1, 0x7830FB97B128DD2A),
        ("größe", 2, 0x0189EB2F88C06124),
        ("\udcff", 3, 0x7B1B8AC04A9FF069),  # a file name that is not UTF-8
    ],
)
def test_hash_text_is_frozen(text, key, expected):
    assert hash_text(text, key=key) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((0,), 0xE220A8397B1DCDAF),
        ((7, "epoch", 1), 0x4DCA7C30C810E376),
        ((7, "epoch", "1"), 0x067551EFCF538483),
        ((7, "holdout", "test"), 0x0F4D93B94435A7B9),
    ],
)
def test_derive_key_is_frozen(names, expected):
    assert derive_key(*names) == expected


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (1, 7, [0]),
        (2, 7, [0, 1]),
        (5, 1, [1, 4, 0, 3, 2]),
        (10, 7, [6, 7, 5, 4, 1, 0, 9, 3, 8, 2]),
        (10, 8, [8, 7, 5, 2, 3, 9, 4, 6, 0, 1]),
        (17, 7, [10, 13, 14, 12, 1, 0, 15, 3, 8, 2, 6, 9, 4, 16, 5, 11, 7]),
    ],
)
def test_small_permutations_are_frozen(n, key, expected):
    assert permute(np.arange(n), n=n, key=key).tolist() == expected


@pytest.mark.parametrize(
    ("n", "key", "pairs"),
    [
        (
            1281167,
            42,
            [(0, 406783), (1, 1171671), (2, 878915), (640583, 669431), (1281166, 169016)],
        ),
        (
            10**12 + 39,
            2**64 - 1,
            [(0, 933314648027), (1, 317370902099), (10**12 + 38, 169175187988)],
        ),
        (2**62, 3, [(0, 1012675576841011706), (2**62 - 1, 4011403416958250718)]),
    ],
)
def test_large_permutations_are_frozen(n, key, pairs):
    positions, expected = zip(*pairs, strict=True)
    assert permute(np.array(positions), n=n, key=key).tolist() == list(expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1500), KEYS)
def test_every_position_is_hit_once_and_many_are_permuted_like_each_alone(n, key):
    # So many that rounds are looked up.
    permuted = permute(np.arange(n), n=n, key=key).tolist()
    assert sorted(permuted) == list(range(n))
    assert permuted == [permute(np.array([place]), n=n, key=key).item() for place in range(n)]


@given(WORDS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), WORDS)
def test_an_array_is_hashed_like_its_numbers(before, numbers, after):
    hashes = hash64(before, np.array(numbers, dtype=np.int64), after)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [hash64(before, number, after) for number in numbers]


@pytest.mark.parametrize("position", [np.array([3, 10]), np.array([-1])])
def test_a_position_outside_is_refused(position):
    with pytest.raises(ValueError, match="outside"):
        permute(position, n=10, key=1)


def test_a_permutation_sends_every_position_everywhere_equally_often():
    # From 64 positions on. Below, four rounds over so few bits favour some places by up to a third
    # (n = 5).
    n, num_keys = 64, 3200
    counts = np.zeros((n, n), dtype=int)
    for number in range(num_keys):
        counts[np.arange(n), permute(np.arange(n), n=n, key=derive_key(number, "test"))] += 1
    expected = num_keys / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 0.85 < chi_square / (n - 1) ** 2 < 1.15  # 1 expected, standard deviation 0.02
