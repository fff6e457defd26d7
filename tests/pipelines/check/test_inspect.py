"""Looking into a shard set: tables, a sample by key, by original name and back."""

import io
import json
import re
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from pipelines import cli
from pipelines.check.inspect import NO_NAME, find_label, inspect, overview
from pipelines.check.render import render_overview, render_samples
from shardset import terminal
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import ClassInfo, LoadedSet
from shardset.format.rows import Origin
from tests.makers.built import inspected
from tests.makers.shardset import new_set, png_samples, publish, quarantine

NAME = "raw/{}/bild {}.PNG"


def made(*, built: bool = True) -> LoadedSet:
    """Splits train (7 samples, the last a copy of the first) and val (4), two shards each, four
    classes.
    """
    samples = {
        name: [
            replace(sample, origin=Origin(NAME.format(name, sample.serial) if built else None))
            for sample in png_samples(name, number, size=8, num_classes=4)
        ]
        for name, number in (("train", 7), ("val", 4))
    }
    first = samples["train"][0]
    samples["train"][6] = replace(first, key=naming.copy_key(first.key, 1), copy=1)
    manifest, storage, _ = manifests.load(new_set(samples, num_classes=4))
    classes = [ClassInfo(label=n, name=f"cat {n}", wnid=f"n0000{n}") for n in range(4)]
    provenance = replace(manifest.provenance, source="folder" if built else "writer")
    changes = {"classes": classes, "fixes": {"cmyk-to-rgb": 3}, "provenance": provenance}
    return LoadedSet(publish(storage, replace(manifest, **changes)), storage)


def shown(renderable: object, width: int = 240) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(renderable)
    return out.getvalue()


def test_the_overview_counts_splits_shards_and_classes():
    loaded = made()
    found = overview(loaded, "here")
    splits = [(one.name, one.num_samples, one.smallest, one.largest) for one in found["splits"]]
    assert splits == [("train", 7, 3, 4), ("val", 4, 2, 2)]
    counts = [row["counts"] for row in found["classes"]]
    assert counts == [{"train": train, "val": 1} for train in (3, 2, 1, 1)]
    shards = [(row["split"], row["number"], row["first_id"]) for row in found["shards"]]
    assert shards == [("train", 0, 0), ("train", 1, 3), ("val", 0, 0), ("val", 1, 2)]
    assert found["fixes"] == {"cmyk-to-rgb": 3}
    found = overview(loaded, "here", split="train", label=1)
    assert [split.name for split in found["splits"]] == ["train"]
    assert [(row["label"], row["counts"]) for row in found["classes"]] == [(1, {"train": 2})]


def test_the_samples_of_a_shard_are_in_order_with_their_names_and_byte_ranges():
    storage = made().storage
    samples = inspected(storage.url, split="train", shard=1)
    first = [(s.position, s.id, s.key) for s in samples[:2]]
    assert first == [(0, 3, "train-000003"), (1, 4, "train-000004")]
    assert [s.name for s in samples] == [NAME.format("train", n) for n in (3, 4, 5, 0)]
    offset, size = samples[2].byte_ranges["cls"]
    tar = storage.read(samples[2].shard)
    assert tar[offset : offset + size] == str(samples[2].label).encode()
    assert samples[2].class_name == f"cat {samples[2].label}"


def test_a_sample_and_its_copies_are_found_by_key_and_by_name():
    url = made().storage.url
    [by_key] = inspected(url, key="train-000004")
    assert by_key.name == NAME.format("train", 4)
    assert inspected(url, name=by_key.name) == [by_key]
    copies = inspected(url, key="train-000000")
    assert [(s.key, s.copy) for s in copies] == [("train-000000", 0), ("train-000000@1", 1)]
    assert inspected(url, name=NAME.format("train", 0)) == copies
    assert inspected(url, key="train-000000@1") == copies[1:]
    # the last part of a name suffices, and part of a part does not
    for split, keys in ((None, ["train-000002", "val-000002"]), ("val", ["val-000002"])):
        assert [s.key for s in inspected(url, name="bild 2.PNG", split=split)] == keys
    asked: Any
    for asked in ({"key": "caf\udce9"}, {"key": "ü"}, {"key": "train-00000"}, {"name": "2.PNG"}):
        with pytest.raises(ConfigError, match=r"no sample (has the key|was made from '2\.PNG')"):
            inspect(url, **asked)


def entry(name: str, reason: str) -> bytes:
    return json.dumps({"name": name, "split": "train", "reason": reason}).encode()


@pytest.mark.parametrize("built", [True, False])
def test_the_name_of_a_quarantined_file_is_found_with_the_reason_and_another_is_said_to_be_unknown(
    built,
):
    manifest, storage, _ = made(built=built)
    quarantine(
        storage, manifest, entry("cat/uncut.png", "no"), entry("cat/cut.png", "is cut at byte 3")
    )
    unknown = "does not list it; check the spelling" if built else "no build made this set"
    known = (
        r"no sample was made from '{}'; .*\.jsonl says why: cat/cut\.png \(split train\): is cut"
    )
    for asked, split, message in (
        ("cat/cut.png", None, known.format("cat/cut.png")),
        ("cut.png", None, known.format("cut.png")),
        ("other.png", None, unknown),
        ("cut.png", "val", unknown),
    ):
        with pytest.raises(ConfigError, match=message):
            inspect(storage.url, name=asked, split=split)
    storage.delete(naming.quarantine_path())
    assert not built or inspect(storage.url, name=NAME.format("train", 1))
    with pytest.raises(NotFound, match=r"quarantine\.jsonl"):
        inspect(storage.url, name="cut.png")


def test_samples_that_no_build_made_are_found_by_key_and_have_no_names():
    url = made(built=False).storage.url
    asked: Any
    for asked in ({"key": "val-000003"}, {"split": "val", "shard": 0}):
        samples: Any = inspect(url, **asked)
        assert {sample["name"] for sample in samples} == {None}
        assert NO_NAME in shown(render_samples(samples))
    with pytest.raises(ConfigError, match=r"no build made this set, so .*; use --key"):
        inspect(url, name="bild 2.PNG")


def test_a_class_is_found_by_label_name_or_wnid_if_there_is_one():
    manifest = made().manifest
    assert {find_label(manifest, wanted) for wanted in ("2", "cat 2", "n00002")} == {2}
    with pytest.raises(ConfigError, match="no class 'dog' among the 4"):
        find_label(manifest, "dog")
    alike = [replace(info, name="crane") for info in manifest.classes]
    with pytest.raises(ConfigError, match="all called 'crane'; give the label"):
        find_label(replace(manifest, classes=alike), "crane")


def test_the_verb_prints_tables_and_json(said, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    url = made().storage.url
    text = said("inspect", url)
    facts = "train/train-000001.tar", "cat 3", "n00003", "3 to 4", "cmyk-to-rgb 3", "quarantined: 0"
    assert all(fact in text for fact in facts)
    assert "cat 3" not in said("inspect", url, "--class", "cat 1")
    monkeypatch.setattr(terminal, "MAX_ROWS", 3)
    samples = said("inspect", url, "--split", "train", "--shard", 1)
    assert "... and 1 more (all of them with --json)" in samples
    monkeypatch.delenv("COLUMNS")  # lines to another program are not folded
    long = new_set(png_samples("train", 2, size=8), f"memory://inspect-{'long' * 40}/set")
    assert said("inspect", long).startswith(f"{long}: version 1, from ")
    assert len(json.loads(said("inspect", url, "--json"))["classes"]) == 4
    for flags, keys in (
        (["--shard=0", "--split=val"], ["val-000000", "val-000001"]),
        (["--shard=0", "--split=val", "--class=1"], ["val-000001"]),
        (["--key=val-000003"], ["val-000003"]),
        (["--name=bild 3.PNG", "--split=train"], ["train-000003"]),
    ):
        answer = json.loads(said("inspect", url, "--json", *flags))
        assert [sample["key"] for sample in answer] == keys


def test_questions_without_an_answer_are_refused(capsys):
    storage = made().storage
    for asked, message in (
        ({"split": "val", "shard": 2}, "no shard 2 in split 'val': it has 2, numbered 0 to 1"),
        ({"shard": 0}, "add --split train or --split val"),
        ({"split": "test"}, "no split 'test' in this shard set; it has train, val"),
    ):
        with pytest.raises(ConfigError, match=message):
            inspect(storage.url, **asked)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["inspect", storage.url, "--key", "a", "--shard", "0"])
    assert "not allowed with argument --key" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "whole"), [(60, True), (40, False)])
def test_a_narrow_terminal_folds_names_and_never_shows_another_number(width, whole):
    empty = overview(made(), "") | {"classes": [], "shards": []}
    sizes: dict = {"num_samples": 1281167, "num_shards": 1024, "smallest": 1252, "largest": 1252}
    sizes |= {"num_bytes": 147897477120, "fields": ["jpg"]}
    row = replace(empty["splits"][0], name="validation", **sizes)
    text = shown(render_overview(empty | {"splits": [row]}), width)
    numbers = re.findall(r"[\d,.…]{5,}", text.partition("classes")[0])
    expected = ["1,281,167", "1,024", "1,252", "147.9"]
    assert (numbers == expected) == whole
    assert all(number in expected or number.endswith("…") for number in numbers)


def test_a_hostile_name_neither_styles_nor_moves_the_terminal_nor_breaks_the_line_of_an_error(
    said,
):
    names = ["[bold red]\x1b[2J", "a\rb"]
    samples = [
        replace(sample, origin=Origin(name))
        for sample, name in zip(png_samples("train", 2, size=8), names, strict=True)
    ]
    loaded = manifests.load(new_set(samples, num_shards=1, num_classes=4))
    manifest, storage, _ = loaded
    found: Any = inspect(storage.url, shard=0)
    assert [sample["name"] for sample in found] == names
    text = shown(render_samples(found))
    assert all(part in text for part in ("[bold red]\\x1b[2J", "a\\rb"))
    assert "\x1b[2J" not in text
    classes = [*manifest.classes[:3], ClassInfo(label=3, name="[red]a\n\x1b[2Jb")]
    publish(storage, replace(manifest, classes=classes))
    refused = said("inspect", storage.url, "--class", "owl", code=2)
    assert refused.endswith(r"class 2, [red]a\n\x1b[2Jb)" + "\n")
