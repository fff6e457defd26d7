"""Which members of a tar are a sample, alike for `build` and `adopt`: whole ones as webdataset
reads them, or none.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import webdataset

import shardset
from pipelines.build import build
from pipelines.config import AdoptConfig, BuildConfig
from pipelines.report import set_page
from pipelines.sets.adopt import adopt
from pipelines.sources.tar_fields import checked_fields, count_fields
from shardset.errors import ShardsetError, SourceError, TooManyBad
from shardset.format.manifest import Manifest, load
from tests.makers.built import HERE
from tests.makers.images import image_bytes
from tests.makers.stored import quarantined
from tests.makers.tars import tar_bytes

Files = list[tuple[str, bytes]]
PNG = image_bytes(0)
WAYS = ["build", "adopt"]


def sample(number: int) -> Files:
    return [(f"{number:02}.png", PNG), (f"{number:02}.cls", b"%d" % (number % 3))]


def published(way: str, folder: Path, files: Files) -> tuple[Path, Manifest]:
    """Where the set of one tar is, and its manifest."""
    (folder / "t-0.tar").write_bytes(tar_bytes(files))
    if way == "adopt":
        adopt(AdoptConfig(input=str(folder)), HERE)
        return folder, load(str(folder))[0]
    output = folder / "out"
    build(BuildConfig(source="webdataset", input=str(folder / "t-0.tar"), output=str(output)), HERE)
    return output, load(str(output))[0]


def stock(folder: Path) -> dict[str, dict[str, bytes]]:
    samples = webdataset.WebDataset(str(folder / "t-0.tar"), shardshuffle=False)
    return {one["__key__"]: {name: one[name] for name in one if name[0] != "_"} for one in samples}


@pytest.mark.parametrize("way", WAYS)
def test_a_member_without_a_key_ends_no_sample_and_is_listed(way, tmp_path):
    files = [*chain(*map(sample, range(20))), ("20.png", PNG), ("Thumbs", b"x"), ("20.cls", b"2")]
    files = [*chain(*(((f"._{name}", b"Mac"), (name, data)) for name, data in files))]
    place, manifest = published(way, tmp_path, files)
    assert {one.key: one.fields for one in shardset.open(str(place), "t")} == stock(tmp_path)
    assert manifest.split("t").class_totals == [7, 7, 7]
    listed = sorted(entry["name"] for entry in quarantined(place))
    assert listed == sorted(f"t-0.tar/{name}" for name, _ in files if name[0] in ".T")


@pytest.mark.parametrize("way", WAYS)
def test_both_halves_of_a_sample_are_quarantined(way, tmp_path):
    late = [("05.cls", b"2"), ("09.cls", b"0")]
    members = chain(*map(sample, range(30)))
    files = [*(member for member in members if member not in late), *late]
    place, manifest = published(way, tmp_path, files)
    assert sorted(one.key for one in shardset.open(str(place), "t")) == sorted(
        stock(tmp_path).keys() - {"05", "09"}
    )
    entries = quarantined(place)
    assert sorted(entry["name"][8:] for entry in entries) == [
        "05.cls",
        "05.png",
        "09.cls",
        "09.png",
    ]
    assert {entry["reason"].rpartition("; ")[2] for entry in entries} == {
        "pack the tar again with tar --sort=name"
    }
    assert manifest.quarantine.count == 4


@pytest.mark.parametrize("verify", ["none", "header"])
def test_samples_without_a_required_field_are_listed(verify, tmp_path):
    captions = [b"a cat", b" \n", b"", None, b"a dog", "\u732b".encode()]
    files: Files = []
    for number, caption in enumerate(captions):
        files += sample(number)
        files += [] if caption is None else [(f"{number:02}.txt", caption)]
    (tmp_path / "t-0.tar").write_bytes(tar_bytes(files))
    source, output = str(tmp_path / "t-0.tar"), str(tmp_path / "out")
    options: Any = {"source": "webdataset", "input": source, "output": output, "verify": verify}
    build(BuildConfig(**options, require="txt"), HERE)
    found = {one.fields["txt"].decode() for one in shardset.open(output, "t")}
    assert found == {"a cat", "a dog", "\u732b"}
    assert [entry["name"][-2:] for entry in quarantined(tmp_path / "out")] == ["01", "02", "03"]
    assert {entry["reason"] for entry in quarantined(tmp_path / "out")} == {
        "its txt is missing or empty"
    }
    assert load(output).manifest.provenance.options["require"] == "txt"


@pytest.mark.parametrize(("way", "num_late"), [("build", 12), ("build", 30), ("adopt", 30)])
def test_too_many_halves_are_refused_and_never_with_the_advice_to_allow_more(
    way, num_late, tmp_path
):
    whole = chain(*map(sample, range(num_late, 30)))
    images, labels = zip(*map(sample, range(num_late)), strict=True)
    bad = [(f"bad{number}.png", b"<html>") for number in range(6)] if num_late < 30 else []
    with pytest.raises(ShardsetError, match="tar --sort=name") as error:
        published(way, tmp_path, [*bad, *whole, *images, *labels])
    assert isinstance(error.value, SourceError if way == "adopt" else TooManyBad)
    assert "max-bad-fraction" not in str(error.value)


def test_hidden_members_alone_are_no_samples(tmp_path):
    with pytest.raises(
        TooManyBad, match=r"3 of 3 raw samples are bad.*no key before.*nothing is left"
    ):
        published("build", tmp_path, [(f".{number}.png", PNG) for number in range(3)])


UNREAD = {
    "label.txt": lambda n: [(f"{n}.png", PNG), (f"{n}.label.txt", b"1")],
    "output.cls": lambda n: [(f"{n}.input.png", PNG), (f"{n}.output.cls", b"1")],
    "folders": lambda n: [(f"{'cd'[n % 2]}/{n}.png", PNG)],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", UNREAD)
def test_samples_without_a_label_are_counted_with_what_was_looked_for(way, what, tmp_path):
    files = [member for number in range(3) for member in UNREAD[what](number)]
    place, manifest = published(way, tmp_path, [*files, ("4.png", PNG), ("4.cls", b"0")])
    [note] = manifest.provenance.notes
    assert note.startswith(
        "3 of 4 samples have no label; looked for a whole number in cls or label, or under label"
    )
    assert "--source folder" in note
    set_page.write(str(place))
    assert "3 of 4 samples have no label; looked for" in (place / "report.html").read_text()


VIEWS = [f"cam{number}.png" for number in range(3)]
REFUSED = {
    "one sample of all images": [[f"{number:05}.png" for number in range(300)]],
    "one sample in each tar": [["00001.png", "00002.png"], ["00003.png", "00004.png"]],
    "a field for each sample": [[f"{number:04}.png", "cls"] for number in range(40)],
    "prices": [[f"{cents:02}.png" for cents in range(100)] for _ in range(3)],
    "some prices": [["05.png", "10.png"], ["10.png", "15.png"], ["20.png"], ["05.png"]],
    "no extension": [[str(number)] for number in range(9)],
}
TAKEN = {
    "views": [VIEWS] * 9,
    "a number of masks": [["png", *VIEWS[:number]] for number in range(4)],
    "frames of a few clips": [[f"{number}.png" for number in range(16)]] * 2,
    "extensions": [["mp3"], ["mp4"], ["jp2"], ["h5"], ["png", "1.txt"]],
}


@pytest.mark.parametrize("what", [*REFUSED, *TAKEN])
def test_fields_that_are_parts_of_keys_are_refused_and_views_are_not(what):
    counts = count_fields((REFUSED | TAKEN)[what])
    if what in TAKEN:
        assert checked_fields("t", counts) == [*dict.fromkeys(chain(*TAKEN[what]))]
        return
    with pytest.raises(
        SourceError, match=r"t: its fields differ by numbers .*such as 22\.05\.png to 22_05"
    ):
        checked_fields("t", counts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["img.{:05}.png", "run{0}.{0}.png"])
def test_names_with_dots_in_their_keys_are_refused_before_anything_is_published(
    way, name, tmp_path
):
    with pytest.raises(SourceError, match=r"rename files with dots in their keys"):
        published(way, tmp_path, [(name.format(number), PNG) for number in range(20)])
    assert not [*tmp_path.rglob("manifest.json"), *tmp_path.rglob("*-000000.tar")]
