"""How things are called, and that nobody can be talked into another folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.format import naming

LONGEST = "k" * naming.MAX_KEY_BYTES
ACCEPTED = {
    naming.is_key: [
        "a",
        "n01440764_10026",
        "train/n01440764/x-1",
        "a=b+c",
        "0",
        LONGEST,
        "a/__b__/c",
    ],
    naming.is_field: ["jpg", "seg.png", "a" * 16],
    naming.is_split: ["train", "Val-2_b", "plan-b", "column"],
    naming.is_member: ["a.jpg", "train/n01/x_1.seg.png", "a@1.cls"],
    naming.is_relative: ["train/train-000000.tar", "a", "a..b/c...d", "a b/ü"],
}
REFUSED = {
    naming.is_key: [
        *("", "a.b", "a b", "ä", "/a", "a/", "a//b", "../a", "a\n", "a@1", "a\0", "٣"),
        *("____/a", "__background__/a/b", LONGEST + "k"),
    ],
    naming.is_field: ["", "JPG", ".jpg", "a" * 17, "a/b", "jpg\n"],
    naming.is_split: ["", "a/b", "..", "x" * 41, "a\n", "plan", "versions", "columns"],
    naming.is_member: [
        *("a@12/b.cls", "a@0.cls", "a", ".jpg", "../a.jpg", "/a.jpg", "a.JPG", "a b.jpg"),
        *("a\0b.jpg", "a.jpg\n", "a."),
    ],
    naming.is_relative: [
        *("/etc/passwd", "gs://b/o", "a/memory://x", "a\\b", "C:\\x", "..\\a", "a\0b"),
        *("", "..", "../a", "a/../../b", "a/..", "./a", "a//b", "a/", "."),
    ],
}
"""Keys are ASCII, have no dot and a limited length, fields are lower case and short, a split is one
plain word; a path that may leave the folder on some system is refused.
"""


@pytest.mark.parametrize("check", ACCEPTED, ids=lambda check: check.__name__)
def test_names_are_accepted_or_refused(check):
    assert [name for name in ACCEPTED[check] if not check(name)] == []
    assert [name for name in REFUSED[check] if check(name)] == []


def test_the_longest_key_copy_and_field_fit_a_tar_header():
    key = naming.copy_key("k" * naming.MAX_KEY_BYTES, 999_999)
    assert len(f"{key}.{'f' * naming.MAX_FIELD_BYTES}") <= 100


def test_short_keys_are_frozen():
    # They stand in existing shard sets: the same name must give the same key for ever.
    assert naming.short_key("a b.JPEG") == "kw8dvmgfvkxjjd"
    assert naming.short_key("a b.JPEG", 1) == "k0hvqcawjrsd48"


@given(st.text(max_size=200), st.integers(0, 1000))
def test_a_short_key_is_a_key(original, occurrence):
    key = naming.short_key(original, occurrence)
    assert naming.is_key(key)
    assert len(key) == 14


def test_a_copy_has_its_own_key_and_the_sample_keeps_its():
    assert [naming.copy_key("a/b", copy) for copy in range(3)] == ["a/b", "a/b@1", "a/b@2"]


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a.seg.png", ("a", "seg.png")),
        ("d.x/a.jpg", ("d.x/a", "jpg")),
        ("a", ("a", "")),
        (".jpg", ("", "jpg")),
        ("d.x/a", ("d.x/a", "")),
        ("d/.a.b", ("d/", "a.b")),
    ],
)
def test_a_key_ends_at_the_first_dot_of_the_base_name(member, expected):
    assert naming.split_member(member) == expected


def test_paths_are_frozen():
    assert naming.shard_path("train", "train", 12) == "train/train-000012.tar"
    assert naming.index_path("train/train-000012.tar") == "train/train-000012.parquet"
