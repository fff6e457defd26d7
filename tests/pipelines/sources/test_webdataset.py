import gzip
import tarfile

import pytest

from pipelines.plan.index import fields_of
from pipelines.sources.webdataset import WebDataset, find_tars
from shardset.errors import ConfigError, SourceError
from shardset.storage.open import open_storage
from tests.makers.built import built, config_of
from tests.makers.imagenet import put
from tests.makers.odd_images import LFS_POINTER, jpeg
from tests.makers.shardset import png_samples, write_shard_set
from tests.makers.spools import contents, everything
from tests.makers.tars import plain, special, tar_bytes, tar_of

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def members(first: int, stop: int) -> dict[str, bytes]:
    found = {}
    for number in range(first, stop):
        found |= {f"{number:04d}.jpg": jpeg(number), f"{number:04d}.cls": b"%d" % (number % 3)}
    return found


def one_tar(tmp_path, data: bytes) -> WebDataset:
    put(tmp_path, {"train-000000.tar": data})
    return WebDataset(*find_tars(str(tmp_path / "train-000000.tar")))


@pytest.mark.parametrize("format", FORMATS)
def test_samples_come_in_order_with_labels_and_bytes(tmp_path, format):
    put(tmp_path, {"train/._train-0.tar": b"a hidden resource fork"})
    for shard in (0, 1):
        tar = tar_bytes(members(4 * shard, 4 * shard + 4), format)
        put(tmp_path, {f"train/train-{shard}.tar": tar})
    source = WebDataset(*find_tars(str(tmp_path)))
    survey, samples, rejected = everything(source)
    assert (rejected, survey.classes) == ([], None)
    for number, found in enumerate(samples):
        expected = (f"{number:04d}", "train", number % 3, "jpg")
        assert (found.key, found.split, found.label, found.image) == expected
        assert contents(source, found) == {"jpg": jpeg(number), "cls": b"%d" % (number % 3)}
    assert len(samples) == 8
    assert samples[0].name == "train/train-0.tar/0000"


def test_all_fields_are_kept_in_member_order_under_lower_case_names_and_long_texts_where_they_are(
    tmp_path,
):
    long, longer = b" " * 9000 + b"{}", b"n" * 9000
    files = {"a/x.TXT": b"hi", "a/x.seg.png": b"s", "a/x.JPEG": b"j"}
    files |= {"a/x.npy": longer, "a/x.json": long}
    source = one_tar(tmp_path, tar_bytes({**files, "a/x.cls": b" 7\n"}))
    _, [sample], _ = everything(source)
    assert list(contents(source, sample).items()) == [
        *zip(("txt", "seg.png", "jpeg", "npy", "json"), files.values(), strict=True),
        ("cls", b"7"),
    ]
    assert (sample.key, sample.image, sample.label) == ("a/x", "jpeg", 7)
    in_memory = [field for field, held in sample.fields.items() if isinstance(held, bytes)]
    assert in_memory == ["txt", "cls"]


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ({}, -1),
        ({"json": b'{"label": 4}'}, 4),
        ({"txt": b"t" * 4097, "json": b'{"label": 3}' + b" " * 9000}, 3),
        *(({"json": json}, -1) for json in (b'{"label": true}', b'{"label": "cat"}', b"[3]")),
        *(({"json": b'{"label": %s}' % text}, 3) for text in (b'"3"', b"3.0", b'null, "cls": 3')),
        ({"label": b"3\n"}, 3),
        *(({"label": text}, -1) for text in (b"cat", b"\xff\xd8")),
        ({"cls": b"3.0"}, 3),
        ({"json": b'{"label": 4}', "cls": b"5"}, 5),
        ({"cls": b" 07 "}, 7),
        ({"cls": b" -1 "}, -1),
    ],
)
def test_a_label_comes_from_cls_then_from_json_and_cls_says_it_in_bare_digits(
    tmp_path, files, label
):
    members = {f"x.{field}": content for field, content in {"jpg": b"j", **files}.items()}
    _, [sample], _ = everything(one_tar(tmp_path, tar_bytes(members)))
    assert sample.label == label
    found = dict(fields_of(sample))
    assert found.get("cls") == (b"%d" % label if label >= 0 else None)
    assert {*found, "cls"} == {"jpg", "cls", *files}


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ([("README", b"1")], "no dot in its name"),
        ([("a/.hidden", b"1")], "no key before its first dot"),
        ([("x.jp g", b"1")], "'jp g' can't be a field name"),
        ([("x.jpg", b"1"), ("x.JPG", b"2")], "has the field 'jpg' twice"),
        ([("x.cls", b"cat")], "cls is b'cat'"),
        ([("x.cls", b"99999999999999999999")], "expected a label from 0"),
        ([("x.cls", b"-1")], "only a cls of -1"),
        ([("x.json", b"{")], "json can't be parsed"),
        ([(special("x.jpg", tarfile.SYMTYPE, "0000.jpg"), b"")], "is a link to '0000.jpg'"),
    ],
)
def test_what_is_no_sample_is_rejected_with_its_reason_and_the_rest_is_kept(
    tmp_path, group, reason
):
    pairs = [*members(0, 2).items(), *group, *members(2, 3).items()]
    infos = [(plain(at, data) if isinstance(at, str) else at, data) for at, data in pairs]
    _, samples, rejected = everything(one_tar(tmp_path, tar_of(infos)))
    assert [sample.key for sample in samples] == ["0000", "0001", "0002"]
    assert len(rejected) == 1
    assert reason in rejected[0].reason
    first = infos[len(members(0, 2))][0]
    assert rejected[0].name == f"train-000000.tar/{first.name}"


@pytest.mark.parametrize(
    ("tar", "split"),
    [
        ("val/anything-0.tar", "val"),
        ("train-000012.tar", "train"),
        ("cifar10_test_3.tar", "cifar10_test"),
        ("test-00000-of-00001.tar", "test"),
        ("00012.tar", "train"),
    ],
)
def test_the_split_is_the_folder_or_the_name_before_the_number(tmp_path, tar, split):
    put(tmp_path, {tar: tar_bytes(members(0, 1))})
    survey, [sample], _ = everything(WebDataset(*find_tars(str(tmp_path)), True))
    assert sample.split == split
    assert survey.notes == (
        ["the names of some tars say no split: their samples go to split train"]
        if tar == "00012.tar"
        else []
    )


def test_tars_of_ray_data_are_built_once_they_lie_in_a_folder_with_the_name_of_the_split(tmp_path):
    raw, name = tmp_path / "raw", f"{'a1' * 16}_{'b2' * 16}_000003_000000.tar"
    put(raw, {name: tar_bytes(members(0, 3))})
    options = {"source": "webdataset", "num_shards": {"": 1}}
    with pytest.raises(SourceError, match=r"can't name a split .* into a folder with the name of"):
        built(config_of(raw, tmp_path / "none", **options))
    (raw / "train").mkdir()
    (raw / name).rename(raw / "train" / name)
    assert built(config_of(raw, tmp_path / "out", **options)).split("train").num_samples == 3


@pytest.mark.parametrize(
    ("pattern", "url", "names"),
    [
        ("/d/train-{009..010}.tar", "/d", ["train-009.tar", "train-010.tar"]),
        ("/d/x{9..10}.tar", "/d", ["x9.tar", "x10.tar"]),
        ("memory://b/{c,d}/{a,b}.tar", "memory://b", ["c/a.tar", "c/b.tar", "d/a.tar", "d/b.tar"]),
        ("/d/a.tar::/d/e/b.tar::/d/a.tar", "/d", ["a.tar", "e/b.tar"]),
        ("/d/one.tar", "/d", ["one.tar"]),
        ("/a.tar::/b.tar", "/", ["a.tar", "b.tar"]),
        ("/d/sub", "/d/sub", []),
    ],
)
def test_an_input_may_be_a_folder_a_tar_a_brace_pattern_or_a_list(pattern, url, names):
    storage, found = find_tars(pattern)
    assert (storage.url, list(found)) == (url, names)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("/d/{x}.tar", "neither a range .*; a folder can.t be called so: rename it"),
        ("/d/{5..3}.tar", "none or too many names"),
        ("/d/{0..999999999}.tar", "none or too many names"),
        ("/d/{0..99999}{0..99999}{0..99999}.tar", "none or too many names"),
        ("memory://a/x.tar::memory://b/y.tar", "no folder in common"),
    ],
)
def test_a_pattern_that_names_no_tars_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        find_tars(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("train-{0..3}.tar", r"2 of 4 tars are missing: train-1.tar, train-3.tar"),
        (
            "train-?.tar",
            r"1 of 1 tars are missing: train-\?.tar; .* patterns, and \* and \? are not",
        ),
        ("empty", r"no \*\.tar below it \(1 other file\)"),
    ],
)
def test_tars_that_are_not_there_are_an_error(tmp_path, pattern, message):
    put(
        tmp_path,
        {"train-0.tar": tar_bytes({}), "train-2.tar": tar_bytes({}), "empty/cat.jpg": b"1"},
    )
    with pytest.raises(SourceError, match=message):
        WebDataset(*find_tars(str(tmp_path / pattern))).survey()


def test_other_files_and_compressed_and_cut_tars_are_an_error_that_says_what_to_do(tmp_path):
    put(tmp_path, {"train-0.tar.gz": b"1"})
    for url in (str(tmp_path), "/d/train-{0..3}.tar.gz"):
        with pytest.raises(SourceError, match="gunzip"):
            WebDataset(*find_tars(url)).survey()
    for data, what in (
        (gzip.compress(tar_bytes(members(0, 9)), mtime=0), "gunzip"),
        (LFS_POINTER, r"train-000000\.tar: a Git LFS pointer instead of a tar; run git lfs pull"),
        (b"\n<!DOCTYPE html>", r"train-000000\.tar: HTML or XML instead of a tar; read it"),
        (tar_bytes(members(0, 2))[:1500], r"train-000000\.tar: cut at byte 1500"),
    ):
        with pytest.raises(SourceError, match=what):
            everything(one_tar(tmp_path, data))


def test_a_shard_set_is_left_to_its_own_source_and_a_manifest_of_another_kind_is_ignored(tmp_path):
    write_shard_set(open_storage(str(tmp_path)), {"train": png_samples("train", 4)}, num_shards=2)
    with pytest.raises(ConfigError, match=r"a shard set.*read it by --source shardset"):
        WebDataset(*find_tars(str(tmp_path))).survey()
    for other in (b"not json", b"[]", b'{"kind": "chrome extension"}'):
        put(tmp_path, {"manifest.json": other})
        assert len(everything(WebDataset(*find_tars(str(tmp_path))))[1]) == 4
