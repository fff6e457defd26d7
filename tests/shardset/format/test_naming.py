"""How things are called, and that nobody can be talked into another folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardset.format import naming

GOOD_KEYS = [
    "a",
    "n01440764_10026",
    "train/n01440764/x-1",
    "a=b+c",
    "0",
    "k" * naming.MAX_KEY_BYTES,
    "a/__b__/c",
]
BAD_KEYS = [
    "",
    "a.b",
    "a b",
    "ä",
    "/a",
    "a/",
    "a//b",
    "../a",
    "a\n",
    "a@1",
    "a\0",
    "٣",
    "____/a",
    "__background__/a/b",
]


@pytest.mark.parametrize("key", [*GOOD_KEYS, *BAD_KEYS, "k" * (naming.MAX_KEY_BYTES + 1)])
def test_a_key_is_ascii_without_a_dot_and_of_limited_length(key):
    assert naming.is_key(key) == (key in GOOD_KEYS)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("jpg", True),
        ("seg.png", True),
        ("a" * 16, True),
        ("", False),
        ("JPG", False),
        (".jpg", False),
        ("a" * 17, False),
        ("a/b", False),
        ("jpg\n", False),
    ],
)
def test_a_field_is_lower_case_and_short(field, expected):
    assert naming.is_field(field) is expected


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", True),
        ("Val-2_b", True),
        ("", False),
        ("a/b", False),
        ("..", False),
        ("x" * 41, False),
        ("a\n", False),
        ("plan", False),
        ("plan-b", True),
        ("versions", False),
        ("columns", False),
        ("column", True),
    ],
)
def test_a_split_is_one_plain_word(split, expected):
    assert naming.is_split(split) is expected


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jpg", True),
        ("train/n01/x_1.seg.png", True),
        ("a@1.cls", True),
        ("a@12/b.cls", False),
        ("a@0.cls", False),
        ("a", False),
        (".jpg", False),
        ("../a.jpg", False),
        ("/a.jpg", False),
        ("a.JPG", False),
        ("a b.jpg", False),
        ("a\0b.jpg", False),
        ("a.jpg\n", False),
        ("a.", False),
    ],
)
def test_a_member_is_a_key_perhaps_a_copy_and_a_field(name, expected):
    assert naming.is_member(name) is expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("train/train-000012.tar", True),
        ("train/train-000012.idx.npy", True),
        ("a/b-1234567.tar", True),
        ("train/train-12.tar", False),
        ("train-000012.tar", False),
        ("train/train-000012.tar.gz", False),
        ("a/b/c-000000.tar", False),
        ("manifest.json", False),
    ],
)
def test_a_shard_file_is_known_by_its_name(path, expected):
    assert naming.is_shard_file(path) is expected


def test_paths_are_frozen():
    assert naming.shard_path("train", "train", 12) == "train/train-000012.tar"
    assert naming.index_path("train/train-000012.tar") == "train/train-000012.idx.npy"
    assert naming.references_path("val", 4) == "plan/shards/val-000004.arrow"


@pytest.mark.parametrize("path", ["train/train-000000.tar", "a", "a..b/c...d", "a b/ü"])
def test_a_path_inside_the_folder_is_taken(path):
    assert naming.is_relative(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "gs://b/o", "a/memory://x", "a\\b", "C:\\x", "..\\a", "a\0b"),
        *("", "..", "../a", "a/../../b", "a/..", "./a", "a//b", "a/", "."),
    ],
)
def test_a_path_that_may_leave_the_folder_on_some_system_is_refused(path):
    assert not naming.is_relative(path)
