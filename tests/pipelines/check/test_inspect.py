"""Looking into a shard set: tables, a sample by key, by original name and back."""

import dataclasses
import io
import itertools
import json

import msgspec
import pytest
from rich.console import Console

from pipelines import cli
from pipelines.check import inspect, lookups, overview, render
from pipelines.check.inspect import Question
from shardset.errors import ConfigError, DamagedShard, ManifestError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, Manifest, Quarantine
from shardset.format.tar import StoredSample
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, put, references, write_shard_set

_counter = itertools.count()
NAME = "raw/{}/bild {}.PNG"


def made(*, with_plan: bool = True) -> tuple[Storage, Manifest]:
    """Splits train (7 samples, the last a copy of the first) and val (4), two shards each, four classes."""
    storage = open_storage(f"memory://inspect-{next(_counter)}/set")
    samples = {
        "train": png_samples("train", 7, size=8, num_classes=4),
        "val": png_samples("val", 4, size=8, num_classes=4),
    }
    samples["train"][6] = _copy(samples["train"][0])
    manifest = write_shard_set(storage, samples, num_shards=2, num_classes=4)
    classes = [ClassInfo(label=n, name=f"cat {n}", wnid=f"n0000{n}") for n in range(4)]
    manifest = manifests.seal(msgspec.structs.replace(manifest, classes=classes, fixes={"cmyk-to-rgb": 3}))
    put(storage, naming.MANIFEST, manifests.to_json(manifest))
    if with_plan:
        for split, found in samples.items():
            _write_plan(storage, manifest, split, found)
    return storage, manifest


def _copy(sample: StoredSample) -> StoredSample:
    return StoredSample(
        key=naming.copy_key(sample.key, 1), fields=sample.fields, label=sample.label, source=sample.source, copy=1
    )


def _write_plan(storage: Storage, manifest: Manifest, split: str, samples: list[StoredSample]) -> None:
    for number, shard in enumerate(manifest.splits[split].shards):
        mine = samples[shard.first_id : shard.first_id + shard.num_samples]
        names = [NAME.format(split, sample.source) for sample in mine]
        put(storage, naming.references_path(split, number), references(mine, names))


def shown(renderable: object, width: int = 240) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(renderable)
    return out.getvalue()


def cells(text: str) -> list[str]:
    """The cells of the first row of a table, put together from the lines that they are folded to."""
    lines = [line.split("│")[1:-1] for line in text.split("╇")[-1].split("└")[0].splitlines() if "│" in line]
    return ["".join(part.strip() for part in column) for column in zip(*lines, strict=True)]


def test_the_overview_counts_splits_shards_and_classes():
    storage, manifest = made()
    found = overview.overview(manifest, storage.url)
    assert [(row.name, row.num_samples, row.smallest, row.largest) for row in found.splits] == [
        ("train", 7, 3, 4),
        ("val", 4, 2, 2),
    ]
    assert [row.counts for row in found.classes] == [
        {"train": 3, "val": 1},
        {"train": 2, "val": 1},
        {"train": 1, "val": 1},
        {"train": 1, "val": 1},
    ]
    assert [(row.split, row.number, row.first_id) for row in found.shards] == [
        ("train", 0, 0),
        ("train", 1, 3),
        ("val", 0, 0),
        ("val", 1, 2),
    ]
    assert found.fixes == {"cmyk-to-rgb": 3}


def test_the_overview_of_one_split_and_one_class():
    storage, manifest = made()
    found = overview.overview(manifest, storage.url, split="train", label=1)
    assert [row.name for row in found.splits] == ["train"]
    assert [(row.label, row.counts) for row in found.classes] == [(1, {"train": 2})]


def test_the_samples_of_a_shard_stand_in_order_with_their_names_and_byte_ranges():
    storage, manifest = made()
    samples = lookups.samples_of_shard(storage, manifest, "train", 1)
    assert [(s.position, s.id, s.key) for s in samples[:2]] == [(0, 3, "train-000003"), (1, 4, "train-000004")]
    assert [s.name for s in samples] == [NAME.format("train", n) for n in (3, 4, 5, 0)]
    tar = storage.read(samples[2].shard)
    offset, size = samples[2].byte_ranges["cls"]
    assert tar[offset : offset + size] == str(samples[2].label).encode()
    assert samples[2].class_name == f"cat {samples[2].label}"


def test_a_sample_is_found_by_key_and_from_its_name_back():
    storage, manifest = made()
    (by_key,) = lookups.find_key(storage, manifest, "train-000004")
    assert by_key.name == NAME.format("train", 4)
    assert lookups.find_name(storage, manifest, by_key.name) == [by_key]


def test_the_last_part_of_a_name_suffices_and_part_of_a_part_does_not():
    storage, manifest = made()
    assert [s.key for s in lookups.find_name(storage, manifest, "bild 2.PNG")] == ["train-000002", "val-000002"]
    assert [s.key for s in lookups.find_name(storage, manifest, "bild 2.PNG", split="val")] == ["val-000002"]
    with pytest.raises(ConfigError, match=r"no sample was made from '2\.PNG'"):
        lookups.find_name(storage, manifest, "2.PNG")


def test_copies_are_found_with_their_sample():
    storage, manifest = made()
    assert [(s.key, s.copy) for s in lookups.find_key(storage, manifest, "train-000000")] == [
        ("train-000000", 0),
        ("train-000000@1", 1),
    ]
    assert len(lookups.find_name(storage, manifest, NAME.format("train", 0))) == 2
    assert [s.key for s in lookups.find_key(storage, manifest, "train-000000@1")] == ["train-000000@1"]


@pytest.mark.parametrize("key", ["caf\udce9", "ü"])
def test_no_sample_has_a_key_that_is_not_ascii(key):
    with pytest.raises(ConfigError, match="no sample has the key"):
        lookups.find_key(*made(), key)


def test_a_key_that_only_starts_alike_is_another_key():
    storage, manifest = made()
    with pytest.raises(ConfigError, match="no sample has the key 'train-00000'"):
        lookups.find_key(storage, manifest, "train-00000")


def quarantined(storage: Storage, manifest: Manifest, *entries: dict) -> Manifest:
    """The set with a quarantine list."""
    put(storage, naming.quarantine_path(), b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
    listed = Quarantine(count=len(entries), path=naming.quarantine_path())
    return manifests.seal(msgspec.structs.replace(manifest, quarantine=listed))


def entry(name: str, reason: str, split: str = "train") -> dict:
    return {"name": name, "split": split, "reason": reason, "object": name, "offset": 0, "num_bytes": 3}


@pytest.mark.parametrize("with_plan", [True, False])
@pytest.mark.parametrize("name", ["cat/cut.png", "cut.png"])
def test_the_name_of_a_quarantined_file_is_found_with_the_reason(with_plan, name):
    storage, manifest = made(with_plan=with_plan)
    manifest = quarantined(storage, manifest, entry("cat/uncut.png", "no"), entry("cat/cut.png", "is cut at byte 3"))
    expected = rf"no sample was made from '{name}'; quarantine\.jsonl says why: cat/cut\.png \(split train\): is cut at"
    with pytest.raises(ConfigError, match=expected):
        lookups.find_name(storage, manifest, name)


def test_a_name_that_is_neither_stored_nor_quarantined_says_so():
    storage, manifest = made()
    manifest = quarantined(storage, manifest, entry("cat/cut.png", "is cut"))
    for asked, split in (("other.png", None), ("cut.png", "val")):
        with pytest.raises(ConfigError, match=r"and quarantine\.jsonl does not list it; check the spelling"):
            lookups.find_name(storage, manifest, asked, split=split)


def test_a_stored_sample_is_found_by_name_where_the_quarantine_list_is_gone():
    storage, manifest = made()
    manifest = quarantined(storage, manifest, entry("cat/cut.png", "is cut"))
    storage.delete(naming.quarantine_path())
    assert lookups.find_name(storage, manifest, NAME.format("train", 1))
    with pytest.raises(NotFound, match=r"quarantine\.jsonl"):
        lookups.find_name(storage, manifest, "cut.png")


def test_without_the_plan_keys_are_found_and_names_are_said_to_be_gone():
    storage, manifest = made(with_plan=False)
    (sample,) = lookups.find_key(storage, manifest, "val-000003")
    assert sample.name is None
    assert lookups.NO_NAMES in shown(render.render_samples([sample]))
    assert lookups.NO_NAMES in shown(render.render_samples(lookups.samples_of_shard(storage, manifest, "val", 0)))
    with pytest.raises(ConfigError, match="original names are not available"):
        lookups.find_name(storage, manifest, "bild 2.PNG")


def test_the_plan_of_another_build_names_nothing():
    storage, manifest = made()
    put(storage, naming.references_path("val", 0), storage.read(naming.references_path("val", 1)))
    assert [s.name for s in lookups.samples_of_shard(storage, manifest, "val", 0)] == [None, None]
    with pytest.raises(ConfigError, match="of another build"):
        lookups.find_name(storage, manifest, "bild 3.PNG", split="val")


def test_a_damaged_plan_or_index_is_an_error_that_says_where():
    storage, manifest = made()
    put(storage, naming.references_path("val", 0), b"no arrow file at all")
    with pytest.raises(DamagedShard, match=r"plan/shards/val-000000\.arrow: not a plan"):
        lookups.samples_of_shard(storage, manifest, "val", 0)
    put(storage, "val/val-000001.idx.npy", b"no index")
    with pytest.raises(
        DamagedShard, match=r"val-000001\.idx\.npy: 8 bytes with crc32c \S+, expected 548 with \S+; the index of shard"
    ):
        lookups.samples_of_shard(storage, manifest, "val", 1)
    storage.delete("val/val-000001.idx.npy")
    with pytest.raises(NotFound):
        lookups.find_key(storage, manifest, "val-000003")


@pytest.mark.parametrize("wanted", ["2", "cat 2", "n00002"])
def test_a_class_is_found_by_label_name_or_wnid(wanted):
    assert overview.find_label(made()[1], wanted) == 2


def test_an_unknown_or_ambiguous_class_is_refused():
    _, manifest = made()
    with pytest.raises(ConfigError, match="no class 'dog' among the 4"):
        overview.find_label(manifest, "dog")
    twins = [msgspec.structs.replace(info, name="crane") for info in manifest.classes]
    with pytest.raises(ConfigError, match="all called 'crane'; give the label"):
        overview.find_label(msgspec.structs.replace(manifest, classes=twins), "crane")


def test_a_shard_that_is_not_there_is_refused():
    storage, manifest = made()
    with pytest.raises(ConfigError, match="no shard 2 in split 'val': it has 2, numbered 0 to 1"):
        lookups.samples_of_shard(storage, manifest, "val", 2)
    with pytest.raises(ManifestError, match="no split 'test'"):
        lookups.samples_of_shard(storage, manifest, "test", 0)


def test_the_verb_prints_tables(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    storage, _ = made()
    assert cli.main(["inspect", storage.url]) == 0
    text = capsys.readouterr().out
    for expected in ("train/train-000001.tar", "cat 3", "n00003", "3 to 4", "cmyk-to-rgb 3", "quarantined: 0"):
        assert expected in text
    assert cli.main(["inspect", storage.url, "--class", "cat 1"]) == 0
    assert "cat 3" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (["--shard=0", "--split=val"], ["val-000000", "val-000001"]),
        (["--shard=0", "--split=val", "--class=1"], ["val-000001"]),
        (["--key=val-000003"], ["val-000003"]),
        (["--name=raw/val/bild 3.PNG"], ["val-000003"]),
        (["--name=bild 3.PNG", "--split=train"], ["train-000003"]),
    ],
)
def test_the_verb_prints_json(capsys, flags, keys):
    storage, _ = made()
    assert cli.main(["inspect", storage.url, "--json", *flags]) == 0
    assert [sample["key"] for sample in json.loads(capsys.readouterr().out)] == keys


def test_the_json_of_the_overview_holds_every_class(capsys):
    storage, _ = made()
    assert cli.main(["inspect", storage.url, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["classes"]) == 4


def test_questions_that_exclude_each_other_are_refused():
    storage, _ = made()
    with pytest.raises(ConfigError, match="give one of them"):
        inspect.inspect(storage.url, Question(key="a", shard=0))
    with pytest.raises(ConfigError, match="add --split train or --split val"):
        inspect.inspect(storage.url, Question(shard=0))
    with pytest.raises(ConfigError, match="no split 'test' in this shard set; it has train, val"):
        inspect.inspect(storage.url, Question(split="test"))


@pytest.mark.parametrize(("width", "whole"), [(80, True), (60, False), (40, False)])
def test_a_narrow_terminal_folds_cells_and_loses_none_of_their_letters(width, whole):
    storage, manifest = made()
    row = overview.SplitRow(
        name="validation", num_samples=1281167, num_shards=1024, smallest=1252, largest=1252, num_bytes=147897477120,
        mean_bytes=109123.0, fields=["jpg"], num_source_samples=1281167, num_dropped=0, num_repeats=0,
    )  # fmt: skip
    one_row = dataclasses.replace(overview.overview(manifest, storage.url), splits=[row], classes=[], shards=[])
    text = shown(render.render_overview(one_row), width).partition("classes")[0]
    assert cells(text) == ["validation", "1,281,167", "1,024", "1,252", "147,897,477,120", "109,123", "jpg"]
    assert ("147,897,477,120" in text) == whole


def test_lines_to_another_program_are_not_folded(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    storage = open_storage(f"memory://inspect-{'long' * 40}/set")
    write_shard_set(storage, {"train": png_samples("train", 2, size=8)}, num_shards=1)
    cli.main(["inspect", storage.url])
    assert capsys.readouterr().out.startswith(f"{storage.url}: from ")


def test_long_tables_are_cut_and_say_so():
    storage, manifest = made()
    samples = lookups.samples_of_shard(storage, manifest, "train", 1)
    text = shown(render.render_samples(samples, max_rows=3))
    assert "... and 1 more (all of them with --json)" in text
    assert "train-000000@1" not in text


def test_a_hostile_name_in_an_error_stays_in_its_line(capsys):
    storage, manifest = made()
    classes = [*manifest.classes[:3], ClassInfo(label=3, name="[red]a\n\x1b[2Jb")]
    put(storage, naming.MANIFEST, manifests.to_json(manifests.seal(msgspec.structs.replace(manifest, classes=classes))))
    assert cli.main(["inspect", storage.url, "--class", "owl"]) == 2
    assert capsys.readouterr().err.endswith(r"cat 2, [red]a\n\x1b[2Jb, ...)" + "\n")


def test_a_hostile_name_neither_styles_nor_moves_the_terminal():
    storage, manifest = made()
    shard = manifest.splits["val"].shards[0]
    names = ["[bold red]\x1b[2J", "a\rb"]
    samples = [StoredSample(key=f"val-00000{n}", fields=(), label=n, source=n) for n in range(shard.num_samples)]
    put(storage, naming.references_path("val", 0), references(samples, names))
    found = lookups.samples_of_shard(storage, manifest, "val", 0)
    assert [sample.name for sample in found] == names
    text = shown(render.render_samples(found))
    assert "[bold red]\\x1b[2J" in text
    assert "a\\rb" in text
    assert "\x1b[2J" not in text
