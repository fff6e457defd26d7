"""The page about a shard set: the same for the same set, bounded, honest about damage, never in the
way of a build.
"""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from PIL import Image

from pipelines import cli
from pipelines.check.verify import verify
from pipelines.report import collect, set_page
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers import odd_images
from tests.makers.built import HERE
from tests.makers.folders import write_class_folders
from tests.makers.once import DamagesOnce
from tests.makers.shardset import (
    image_sample,
    new_set,
    png_samples,
    publish,
    put,
    quarantine,
)


def picture(seed: int, width: int = 48, height: int = 32) -> bytes:
    return odd_images.encoded(odd_images.picture(seed, (width, height)), "PNG")


def sample(
    split: str, serial: int, content: bytes, *, label: int | None = None, copy: int = 0
) -> StoredSample:
    made = image_sample(split, serial, content, "png", 10)
    label = made.label if label is None else label
    fields = (("png", content), ("cls", str(label).encode()))
    key = naming.copy_key(made.key, copy)
    return replace(made, key=key, fields=fields, label=label, copy=copy)


def samples(split: str, seeds: range) -> list[StoredSample]:
    return [sample(split, serial, picture(seed)) for serial, seed in enumerate(seeds)]


def stored(num_classes: int = 10, **splits: range | list[StoredSample]) -> tuple[Storage, Manifest]:
    """A set in memory of these samples, or pictures from seeds; without them, of eight pictures."""
    made = {
        name: samples(name, found) if isinstance(found, range) else found
        for name, found in (splits or {"train": range(8)}).items()
    }
    loaded = manifests.load(new_set(made, num_classes=num_classes))
    return loaded.storage, loaded.manifest


def collected(storage: Storage, manifest: Manifest, max_images: int = 1000) -> collect.ReportData:
    return collect.collect(manifests.LoadedSet(manifest, storage), max_images=max_images)


def sentences(data: collect.ReportData) -> list[str]:
    """The summary of the page."""
    return re.findall(r'class="mark">[^<]*</span><span>([^<]*?) ?<', text_of(data))


def text_of(data: collect.ReportData) -> str:
    return set_page.render(data).decode()


def test_the_page_is_beside_the_manifest_disturbs_nothing_and_is_always_the_same():
    pages = []
    for _ in range(2):
        storage, _ = stored(train=range(12), test=range(20, 26))
        before = storage.read(naming.MANIFEST)
        written = set_page.write(storage.url)
        assert written.path == f"{storage.url}/report.html"
        assert (len(written.data.images), written.data.damage) == (18, [])
        assert storage.read(naming.MANIFEST) == before
        page = storage.read("report.html")
        assert len(page) == written.num_bytes
        pages.append(page.replace(storage.url.split("/")[-2].encode(), b"ID"))
    assert pages[0] == pages[1]
    assert verify(storage.url, deep=True).problems == ()


def rows_of(text: str, caption: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    body = text.split(f"<caption>{caption}</caption>")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in body.split("</tr>")[:-1]]


def test_the_page_counts_samples_by_split_and_class_and_shows_some_of_each():
    found = collected(*stored(train=range(40), test=range(50, 60)))
    text = text_of(found)
    splits = [["test", "10", "2"], ["train", "40", "2"]]
    assert [row[:3] for row in rows_of(text, "Splits")] == splits
    assert rows_of(text, "Samples of each class") == [
        [f"{n} class {n} ", "1", "4", ""] for n in range(10)
    ]
    assert sorted(found.by_class) == list(range(10))
    for label, these in found.by_class.items():
        assert len(these) == 5
        for one in these:
            assert found.sample(one)["label"] == label
            assert f'alt="{found.sample(one)["key"]}, class {label}"' in text


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
    assert len(set_page.render(found)) < 6 * 2**20


def test_images_of_one_content_are_found_without_reading_them_and_repeats_of_the_build_are_not():
    same = picture(3)
    train = [*samples("train", range(10)), sample("train", 10, same, label=4)]
    train.append(sample("train", 0, picture(0), copy=1))
    test = [*samples("test", range(20, 24)), sample("test", 4, same, label=123)]
    found = collected(*stored(num_classes=124, train=train, test=test), max_images=0)
    [group] = found.duplicates
    keys = {found.sample(one)["key"] for one in group.samples}
    assert keys == {"test-000004", "train-000003", "train-000010"}
    assert (group.num_splits, group.num_labels) == (2, 3)
    assert "1 image is in several splits: evaluation meets what was trained on." in sentences(found)
    assert "1 image has more than one label." in sentences(found)
    assert "under different labels and in several splits" in text_of(found)


def test_a_compressed_copy_in_another_split_is_shown_beside_its_original():
    jpeg = odd_images.encoded(odd_images.picture(5), "JPEG", quality=60)
    copy = image_sample("test", 3, jpeg, "jpg", 10)
    test = [*samples("test", range(30, 33)), copy]
    found = collected(*stored(train=range(10), test=test))
    (pair,) = found.near_duplicates
    keys = {found.sample(pair.left)["key"], found.sample(pair.right)["key"]}
    assert keys == {copy.key, "train-000005"}
    assert "1 image looks much like an image of another split." in sentences(found)


def test_sizes_are_counted_of_only_so_many_images_and_the_page_says_so():
    wide = [sample("train", serial, picture(serial, width=20 + serial // 3)) for serial in range(8)]
    text = text_of(collected(*stored(train=wide, test=range(8))))
    assert rows_of(text, "Sizes of the decoded images, in pixels") == [
        ["test", "8", "48 x 32 (100%)", "32", "32", "32"],
        ["train", "8", "20 x 32 (38%)", "20", "21", "22"],
    ]
    found = collected(*stored(train=range(40), test=range(50, 54)), max_images=10)
    assert len(found.images) == 10
    assert sum(found.sample(one)["key"].startswith("test") for one in found.images) == 4
    assert "10 images of 44 were decoded" in text_of(found)


TAR, INDEX = "train/train-000001.tar", "train/train-000001.parquet"


@pytest.mark.parametrize(
    ("where", "content", "sentence", "num_left"),
    [
        (f"{TAR}, sample train-000004", b"damage", "its CRC32C differs from the index", 7),
        (TAR, None, "is missing", 4),
        (TAR, b"", "can't be read", 4),
        (INDEX, b"damage", f"the index of shard {TAR} is damaged", 4),
        (INDEX, None, "is missing", 4),
    ],
    ids=["a changed image", "no shard", "a cut shard", "a changed index", "no index"],
)
def test_damage_is_named_and_the_page_made_of_the_rest(where, content, sentence, num_left):
    (storage, manifest), name = stored(), where.partition(",")[0]
    if content is None:
        storage.delete(name)
    else:
        data = storage.read(name)
        put(storage, name, data[:700] + content + data[706:] if content else data[:1000])
    found = collected(storage, manifest)
    (damage,) = found.damage
    assert damage.where == where
    assert sentence in damage.sentence
    assert len(found.images) == num_left
    assert damage.where in text_of(found)
    assert sentences(found)[0].startswith("1 place could not be read")


def test_damage_that_comes_once_changes_nothing_of_the_page():
    storage, manifest = stored()
    # a flipped bit in the middle of this line makes it no JSON
    line = b'{"name": "a.jpg", "split": "train", "reason": "cut"}'
    manifest = quarantine(storage, manifest, line)
    page_of = text_of(collected(storage, manifest))
    for turn in range(3):
        once = DamagesOnce(storage, turn=turn)
        assert text_of(collected(once, manifest)) == page_of
        assert turn == 2 or {shard.path for shard in manifest.shards} <= {*once.damaged}


def test_a_set_without_images_or_classes_or_of_damage_alone_has_a_page():
    words = [
        StoredSample(key=f"k{n}", fields=(("txt", b"words"),), label=-1, serial=n) for n in range(5)
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
    deep = odd_images.encoded(Image.new("F", (8, 8)), "TIFF")
    deeps = [image_sample("deep", n, deep, "tif", 10) for n in range(2)]
    words = [
        StoredSample(key=f"text{n}", fields=(("txt", b"same"),), label=-1, serial=n)
        for n in range(2)
    ]
    cut = sample("train", 7, picture(7)[:200])
    found = collected(*stored(train=[*deeps, *words, *samples("train", range(4)), cut]))
    keys = [damage.where.rpartition(" ")[2] for damage in found.damage]
    assert keys == ["deep-000000", "deep-000001", "train-000007"]
    assert all(damage.sentence.startswith("can't be decoded: ") for damage in found.damage)
    assert len(found.images) == 4
    assert len(found.duplicates) == 1
    assert "no picture" in text_of(found)


def test_a_page_replaces_only_a_page_or_an_empty_file(tmp_path, said):
    storage = open_storage(new_set(samples("train", range(4)), tmp_path))
    put(storage, "report.html", b"<!DOCTYPE html><title>shardset, a comparison</title>")
    for name in ("manifest.json", "report.html"):
        theirs = storage.read(name)
        refused = said("report", tmp_path, "--output", tmp_path / name, code=2)
        assert f"{tmp_path}/{name}: not a page of shardset; choose another --output" in refused
        assert storage.read(name) == theirs
    assert "not a page of shardset" in said("report", tmp_path, code=2)
    put(storage, "report.html", b"")
    for _ in range(2):
        said("report", tmp_path)
    with pytest.raises(ConfigError, match=r"names a folder, expected a file in it$"):
        set_page.write(storage.url, f"{tmp_path}/")


def test_the_verb_says_where_the_page_is_and_returns_1_for_damage(tmp_path, said):
    storage, manifest = stored()
    words = "report", storage.url, "--output", tmp_path / "page.html"
    assert "no manifest there" in said("report", "memory://nothing/here", code=2)
    assert said(*words).startswith(f"report: {tmp_path}/page.html (")
    assert (tmp_path / "page.html").read_bytes().startswith(b"<!DOCTYPE html>")
    shard = manifest.splits["train"].shards[0].path
    storage.delete(shard)
    found = json.loads(said(*words, "--json", code=1))
    assert [one["where"] for one in found["damage"]] == [shard]
    assert (found["num_images_decoded"], found["duplicates"]) == (4, 0)


def entry(name: object, **values: object) -> bytes:
    return json.dumps({"name": name, "split": "train", "reason": "truncated", **values}).encode()


@pytest.mark.parametrize("line", [b"{broken", b"\xff\xfe", entry([1], reason={"a": 2})])
def test_the_quarantine_is_listed_and_a_broken_or_missing_list_does_not_stop_the_report(line):
    lines = [entry("text.jpg", reason="text"), entry("a.jpg"), entry("b.jpg")]
    storage, manifest = stored()
    text = text_of(collected(storage, quarantine(storage, manifest, *lines)))
    assert rows_of(text, "Reasons") == [["train", "truncated", "2"], ["train", "text", "1"]]
    names = [row[0] for row in rows_of(text, "Quarantined raw samples")]
    assert names == ["text.jpg", "a.jpg", "b.jpg"]
    manifest = quarantine(storage, manifest, line, entry("b.png"))
    found = collected(storage, manifest)
    assert "b.png" in text_of(found)
    assert len(found.rejected) + len(found.damage) == 2
    storage.delete("quarantine.jsonl")
    assert [one.where for one in collected(storage, manifest).damage] == ["quarantine.jsonl"]


SMALL = ["--source=folder", "--num-shards=2", "--max-bad-fraction=0.5", *HERE]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, a CMYK JPEG that is put right and a cut PNG that is not."""
    folder = write_class_folders(
        tmp_path_factory.mktemp("raw"), ["cat", "dog"], 6, splits=["train", "test"]
    )
    (folder / "train/cat/cmyk.jpg").write_bytes(odd_images.cmyk())
    (folder / "train/cat/cut.png").write_bytes(picture(1)[:300])
    return folder


def test_a_build_ends_with_a_page_and_an_overwriting_one_removes_it(raw, tmp_path, said):
    words = "build", "--input", raw, "--output", tmp_path / "set", *SMALL
    assert json.loads(said(*words, "--json"))["report"] == f"{tmp_path / 'set'}/report.html"
    first = (tmp_path / "set/report.html").read_text()
    assert "cmyk-to-rgb" in first
    assert "train/cat/cut.png" in first
    said(*words, "--overwrite", "--seed", 6, "--no-report")
    assert not (tmp_path / "set/report.html").exists()


def test_a_report_that_fails_is_a_warning_and_the_build_is_done(raw, tmp_path, capsys):
    (tmp_path / "set/report.html").mkdir(parents=True)
    assert cli.main(["build", f"--input={raw}", f"--output={tmp_path}/set", *SMALL]) == 0
    found = capsys.readouterr()
    assert re.search(r"warning: no report was made \(.*; the shard set is finished", found.err)
    assert "report:" not in found.out


def test_of_a_huge_set_only_some_shards_are_read():
    loaded = manifests.load(new_set(samples("train", range(24)), num_shards=6))
    found = collect.collect(loaded, max_images=1000, max_samples=10)
    assert found.samples["id"].to_pylist() == [*range(4), *range(12, 16)]
    assert found.num_left_out == 16
    assert any("16 samples are not in them" in text for text in sentences(found))
