"""The page about a shard set: the same for the same set, bounded, honest about damage, never in the
way of a build.
"""

import itertools
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipelines import cli
from pipelines.check.verify import verify
from pipelines.report import collect
from pipelines.report import page as report
from pipelines.report.page import findings
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers import odd_images
from tests.makers.folders import write_class_folders
from tests.makers.once import DamagesOnce
from tests.makers.shardset import (
    image_sample,
    png_samples,
    publish,
    put,
    quarantine,
    write_shard_set,
)

HERE = ["--direct_running_mode=in_memory"]
_counter = itertools.count()


def picture(seed: int, width: int = 48, height: int = 32) -> bytes:
    return odd_images.encoded(odd_images.picture(seed, (width, height)), "PNG")


def sample(
    split: str, serial: int, content: bytes, *, label: int | None = None, copy: int = 0
) -> StoredSample:
    made = image_sample(split, serial, content, "png", 10)
    label = made.label if label is None else label
    key = naming.copy_key(made.key, copy)
    fields = (("png", content), ("cls", str(label).encode()))
    return StoredSample(key=key, fields=fields, label=label, source=serial, copy=copy)


def samples(split: str, seeds: range) -> list[StoredSample]:
    return [sample(split, serial, picture(seed)) for serial, seed in enumerate(seeds)]


def stored(num_classes: int = 10, **splits: list[StoredSample]) -> tuple[Storage, Manifest]:
    storage = open_storage(f"memory://report-{next(_counter)}/set")
    return storage, write_shard_set(storage, splits, num_shards=2, num_classes=num_classes)


def collected(storage: Storage, manifest: Manifest, **given: object) -> collect.ReportData:
    return collect.collect(manifests.LoadedSet(manifest, storage), **{"max_images": 1000, **given})


def sentences(data: collect.ReportData) -> list[str]:
    return [finding.text for finding in findings(data)]


def text_of(data: collect.ReportData) -> str:
    return report.render(data).decode()


def test_the_page_is_beside_the_manifest_disturbs_nothing_and_is_always_the_same():
    pages = []
    for _ in range(2):
        storage, _ = stored(train=samples("train", range(12)), test=samples("test", range(20, 26)))
        before = storage.read(naming.MANIFEST)
        written = report.write(storage.url)
        assert written.path == f"{storage.url}/report.html"
        assert (len(written.data.images), written.data.damage) == (18, [])
        assert storage.read(naming.MANIFEST) == before
        pages.append(storage.read("report.html"))
    assert pages[0] == pages[1]
    assert len(pages[0]) == written.num_bytes
    assert verify(storage.url, deep=True).problems == ()


def rows_of(text: str, caption: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    body = text.split(f"<caption>{caption}</caption>")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in body.split("</tr>")[:-1]]


def test_the_page_counts_samples_by_split_and_class_and_shows_some_of_each():
    storage, manifest = stored(
        train=samples("train", range(40)), test=samples("test", range(50, 60))
    )
    found = collected(storage, manifest)
    text = text_of(found)
    assert [row[:3] for row in rows_of(text, "Splits")] == [
        ["train", "40", "2"],
        ["test", "10", "2"],
    ]
    assert rows_of(text, "Samples of each class") == [
        [f"{n} class {n} ", "4", "1", ""] for n in range(10)
    ]
    assert sorted(found.by_class) == list(range(10))
    for label, these in found.by_class.items():
        assert len(these) == 5
        for one in these:
            assert found.catalog.rows["label"][one] == label
            assert f'alt="{found.catalog.key(one)}, class {label}"' in text


def test_sizes_are_counted():
    wide = [sample("train", serial, picture(serial, width=20 + serial // 3)) for serial in range(8)]
    text = text_of(collected(*stored(train=wide, test=samples("test", range(8)))))
    assert rows_of(text, "Sizes of the decoded images, in pixels") == [
        ["train", "8", "20 x 32 (38%)", "20", "21", "22"],
        ["test", "8", "48 x 32 (100%)", "32", "32", "32"],
    ]


def test_a_page_of_many_classes_stays_below_6_mb():
    storage, manifest = stored(
        num_classes=300, train=png_samples("train", 300, size=96, num_classes=300)
    )
    names = [
        ClassInfo(label=label, name=f"{label} " + "long name " * 50, wnid=f"n{label:08d}")
        for label in range(300)
    ]
    found = collected(storage, publish(storage, replace(manifest, classes=names)))
    assert len(found.by_class) == 300
    assert len(report.render(found)) < 6 * 2**20


def test_images_of_one_content_in_two_splits_under_two_labels_are_found_without_reading_them_all():
    same = picture(3)
    train = [*samples("train", range(10)), sample("train", 10, same, label=4)]
    test = [*samples("test", range(20, 24)), sample("test", 4, same, label=123)]
    storage, manifest = stored(num_classes=124, train=train, test=test)
    found = collected(storage, manifest, max_images=0)
    (group,) = found.duplicates
    assert sorted(found.catalog.key(one) for one in group.samples) == [
        "test-000004",
        "train-000003",
        "train-000010",
    ]
    assert (group.num_splits, group.num_labels) == (2, 3)
    assert "1 image is in several splits: evaluation meets what was trained on." in sentences(found)
    assert "1 image has more than one label." in sentences(found)
    assert "under different labels and in several splits" in text_of(found)


def test_an_image_is_the_same_whatever_else_is_stored_with_it_and_a_repeat_of_the_build_is_not():
    image = picture(99)
    same = [
        StoredSample(
            key=f"same{label}",
            fields=[("png", image), ("json", b"[%d]" % label)],
            label=label,
            source=label,
        )
        for label in range(2)
    ]
    repeat = sample("train", 0, picture(0), copy=1)
    storage, manifest = stored(train=[*samples("train", range(8)), *same, repeat])
    (group,) = collected(storage, manifest).duplicates
    assert (len(group.samples), group.num_labels) == (2, 2)


def test_a_compressed_copy_in_another_split_is_shown_beside_its_original():
    jpeg = odd_images.encoded(odd_images.picture(5), "JPEG", quality=60)
    copy = StoredSample(key="copy", fields=(("jpg", jpeg), ("cls", b"5")), label=5, source=3)
    storage, manifest = stored(
        train=samples("train", range(10)), test=[*samples("test", range(30, 33)), copy]
    )
    found = collected(storage, manifest)
    (pair,) = found.near_duplicates
    assert {found.catalog.key(pair.left), found.catalog.key(pair.right)} == {"copy", "train-000005"}
    assert "1 image looks much like an image of another split." in sentences(found)


def test_only_so_many_images_are_decoded_and_the_page_says_so():
    storage, manifest = stored(
        train=samples("train", range(40)), test=samples("test", range(50, 54))
    )
    found = collected(storage, manifest, max_images=10)
    assert len(found.images) == 10
    assert sum(found.catalog.key(one).startswith("test") for one in found.images) == 4
    assert "10 images of 44 were decoded" in text_of(found)


@pytest.mark.parametrize(
    ("name", "content", "where", "sentence", "num_left"),
    [
        (
            "train/train-000001.tar",
            b"damage",
            ", sample train-000004",
            "its CRC32C is not that of the index",
            7,
        ),
        ("train/train-000001.tar", None, "", "is missing", 4),
        ("train/train-000001.tar", b"", "", "can't be read", 4),
        (
            "train/train-000001.idx.npy",
            b"damage",
            "",
            "the index of shard train/train-000001.tar is damaged",
            4,
        ),
        ("train/train-000001.idx.npy", None, "", "is missing", 4),
    ],
    ids=["a changed image", "no shard", "a cut shard", "a changed index", "no index"],
)
def test_damage_is_named_and_the_page_made_of_the_rest(name, content, where, sentence, num_left):
    storage, manifest = stored(train=samples("train", range(8)))
    if content is None:
        storage.delete(name)
    else:
        data = storage.read(name)
        put(storage, name, data[:700] + content + data[706:] if content else data[:1000])
    found = collected(storage, manifest)
    (damage,) = found.damage
    assert damage.where == name + where
    assert sentence in damage.sentence
    assert len(found.images) == num_left
    assert damage.where in text_of(found)
    assert sentences(found)[0].startswith("1 place could not be read")


def test_damage_that_comes_once_changes_nothing_of_the_page():
    storage, manifest = stored(train=samples("train", range(8)))
    # a flipped bit in the middle of this line makes it no JSON
    line = b'{"name": "a.jpg", "split": "train", "reason": "cut"}'
    manifest = quarantine(storage, manifest, line)
    page_of = text_of(collected(storage, manifest))
    for turn in range(3):
        once = DamagesOnce(storage, turn=turn)
        assert text_of(collected(once, manifest)) == page_of
        assert {shard.path for shard in manifest.splits["train"].shards} <= set(
            once.damaged
        ) or turn == 2


def test_a_set_without_images_or_classes_or_of_damage_alone_has_a_page():
    words = [
        StoredSample(key=f"k{n}", fields=(("txt", b"words"),), label=-1, source=n) for n in range(5)
    ]
    storage, manifest = stored(num_classes=0, only=words)
    text = text_of(collected(storage, manifest))
    assert "No sample has an image." in text
    assert "There is only one split" in text
    assert "Samples of each class" not in text
    for shard in manifest.splits["only"].shards:
        storage.delete(shard.index.path)
    assert "2 places could not be read" in sentences(collected(storage, manifest))[0]


def test_an_image_that_does_not_decode_is_named():
    fields = (("tif", odd_images.encoded(odd_images.Image.new("F", (8, 8)), "TIFF")), ("cls", b"1"))
    number = [StoredSample(key=f"deep{n}", fields=fields, label=1, source=n) for n in range(2)]
    words = [
        StoredSample(key=f"text{n}", fields=(("txt", b"same"),), label=-1, source=2 + n)
        for n in range(2)
    ]
    cut = sample("train", 7, picture(7)[:200])
    storage, manifest = stored(train=[*number, *words, *samples("train", range(4)), cut])
    found = collected(storage, manifest)
    keys = [damage.where.rpartition(" ")[2] for damage in found.damage]
    assert keys == ["deep0", "deep1", "train-000007"]
    assert all(damage.sentence.startswith("can't be decoded: ") for damage in found.damage)
    assert len(found.images) == 4
    assert len(found.duplicates) == 1
    assert "no picture" in text_of(found)


@pytest.mark.parametrize("name", ["manifest.json", "report.html"])
def test_a_page_replaces_only_a_page_or_an_empty_file_unless_forced(tmp_path, capsys, name):
    storage = open_storage(str(tmp_path))
    write_shard_set(storage, {"train": samples("train", range(4))}, num_shards=2)
    if name == "report.html":
        put(storage, name, b"<!DOCTYPE html><title>shardset, a comparison</title>")
    theirs = storage.read(name)
    words = [
        "report",
        str(tmp_path),
        *(["--output", f"{tmp_path}/{name}"] if name != "report.html" else []),
    ]
    assert cli.main(words) == 2
    assert (
        f"{tmp_path}/{name}: not a page of shardset; choose another --output"
        in capsys.readouterr().err
    )
    assert storage.read(name) == theirs
    if name == "report.html":
        assert cli.main([*words, "--force"]) == 0
        assert cli.main(words) == 0
        put(storage, name, b"")
        assert cli.main(words) == 0
        with pytest.raises(ConfigError, match=r"names a folder, expected a file in it$"):
            report.write(storage.url, f"{tmp_path}/")


def test_the_verb_says_where_the_page_is_and_returns_1_for_damage(tmp_path, capsys):
    storage, manifest = stored(train=samples("train", range(8)))
    out = tmp_path / "page.html"
    assert cli.main(["report", "memory://nothing/here"]) == 1
    assert "no manifest there" in capsys.readouterr().err
    assert cli.main(["report", storage.url, "--output", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"report: {out} (")
    assert out.read_bytes().startswith(b"<!DOCTYPE html>")
    shard = manifest.splits["train"].shards[0].path
    storage.delete(shard)
    assert cli.main(["report", storage.url, "--output", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["where"] for one in found["damage"]] == [shard]
    assert (found["num_images_decoded"], found["duplicates"]) == (4, 0)


def entry(name: object, **values: object) -> bytes:
    return json.dumps({"name": name, "split": "train", "reason": "truncated", **values}).encode()


def test_the_quarantine_is_listed_with_its_reasons_most_frequent_first():
    lines = [entry("text.jpg", reason="text"), entry("a.jpg"), entry("b.jpg")]
    storage, manifest = stored(train=samples("train", range(8)))
    text = text_of(collected(storage, quarantine(storage, manifest, *lines)))
    assert rows_of(text, "Reasons") == [["train", "truncated", "2"], ["train", "text", "1"]]
    listed = [("text.jpg", "text"), ("a.jpg", "truncated"), ("b.jpg", "truncated")]
    assert rows_of(text, "Quarantined raw samples") == [
        [name, "train", reason] for name, reason in listed
    ]


@pytest.mark.parametrize("line", [b"{broken", b"\xff\xfe", entry([1], reason={"a": 2})])
def test_a_broken_or_missing_quarantine_list_does_not_stop_the_report(line):
    storage, manifest = stored(train=samples("train", range(8)))
    manifest = quarantine(storage, manifest, line, entry("b.png"))
    found = collected(storage, manifest)
    assert "b.png" in text_of(found)
    assert len(found.rejected) + len(found.damage) == 2
    storage.delete("quarantine.jsonl")
    assert [one.where for one in collected(storage, manifest).damage] == ["quarantine.jsonl"]


def build_page(raw: Path, out: Path | str, *more: str) -> int:
    words = f"build --source=folder --input={raw} --output={out} --num-shards=2".split()
    return cli.main([*words, "--max-bad-fraction=0.5", *more, *HERE])


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, a CMYK JPEG that is put right and a cut PNG that is not."""
    folder = write_class_folders(
        tmp_path_factory.mktemp("raw"), ["cat", "dog"], 6, splits=["train", "test"]
    )
    (folder / "train/cat/cmyk.jpg").write_bytes(odd_images.cmyk())
    (folder / "train/cat/cut.png").write_bytes(picture(1)[:300])
    return folder


def test_a_build_ends_with_a_page_and_an_overwriting_one_removes_it(raw, tmp_path, capsys):
    assert build_page(raw, tmp_path / "set", "--json") == 0
    assert json.loads(capsys.readouterr().out)["report"] == f"{tmp_path / 'set'}/report.html"
    first = (tmp_path / "set/report.html").read_text()
    assert "cmyk-to-rgb" in first
    assert "train/cat/cut.png" in first
    assert build_page(raw, tmp_path / "set", "--overwrite", "--seed", "6", "--no-report") == 0
    assert not (tmp_path / "set/report.html").exists()


def test_a_report_that_fails_is_a_warning_and_the_build_is_done(raw, tmp_path, capsys):
    (tmp_path / "set/report.html").mkdir(parents=True)
    assert build_page(raw, tmp_path / "set") == 0
    found = capsys.readouterr()
    assert re.search(r"warning: no report was made \(.*; the shard set is finished", found.err)
    assert "report:" not in found.out


def test_of_a_huge_set_only_some_shards_are_read():
    storage = open_storage(f"memory://report-{next(_counter)}/set")
    manifest = write_shard_set(storage, {"train": samples("train", range(24))}, num_shards=6)
    found = collected(storage, manifest, max_samples=10)
    assert [one.path for one in found.catalog.shards] == [
        manifest.splits["train"].shards[n].path for n in (0, 3)
    ]
    assert found.catalog.num_left_out == 16
    assert any("16 samples are not in them" in text for text in sentences(found))
