"""Names, lists and differences of the versions of a set, and the addresses that open them."""

import json
import shutil
from pathlib import Path

import pytest

from pipelines.sets import version_history
from shardset.errors import ConfigError, ManifestError
from shardset.format import manifest as manifests
from shardset.format import versions
from tests.makers import documented
from tests.makers.built import append_of, built, config_of, manifest_of
from tests.makers.folders import write_class_folders, write_csv, write_images
from tests.makers.web import WebServer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three versions: pictures of cats and dogs, an owl, and a further cat."""
    folder = tmp_path_factory.mktemp("versions")
    raw = write_class_folders(folder / "raw", ["cat", "dog"], 10, splits=["train", "val"])
    built(config_of(raw, folder / "set", num_shards={"": 1}))
    for name in ("owl", "cat"):
        built(append_of(folder / "set", folder / name, f"train/{name}/x{name}.png"))
    return folder / "set"


@pytest.fixture
def three(made, tmp_path):
    return str(shutil.copytree(made, tmp_path / "set"))


def number_of(address):
    return manifest_of(address).number


def test_an_address_names_a_version_by_number_or_tag(three):
    assert [
        number_of(f"{three}{end}") for end in ("", "@1", "@2", "@3", "/@2", "/manifest.json")
    ] == [3, 1, 2, 3, 2, 3]
    assert version_history.tag(f"{three}@2", "paper").version == 2
    assert version_history.tag(three, "v1.0").version == 3
    assert version_history.tag(f"{three}@2", "paper").version == 2  # once more is no change
    assert number_of(f"{three}@paper") == 2
    with pytest.raises(
        ConfigError, match="another version has the tag 'paper', and tags never move"
    ):
        version_history.tag(three, "paper")
    for name in ("12", "a/b", ".", "", "x" * 65, "ü"):
        with pytest.raises(ConfigError, match="can't be a tag"):
            version_history.tag(three, name)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("@4", "has no version 4"),
        ("@paper", "no version has the tag 'paper'; `shardset log .*` lists the tags"),
        ("@0", "no version has the tag '0'|no manifest there"),
        ("@../x", "no manifest there"),
    ],
)
def test_a_version_that_is_not_there_is_refused_by_name(three, end, message):
    version_history.tag(three, "draft")
    with pytest.raises(ManifestError, match=message):
        manifests.load(three + end)


def test_a_removed_version_and_a_damaged_or_strange_tag_are_named(three):
    version_history.tag(f"{three}@1", "draft")
    (Path(three) / versions.path(1)).unlink()
    with pytest.raises(ManifestError, match=r"version 1 was removed; .* log"):
        manifests.load(f"{three}@draft")
    for tag, message in (
        ('{"version": 2, "digest": "0"}', "has no version draft"),
        ("{}", r"draft\.json: not a tag"),
    ):
        (Path(three) / versions.tag_path("draft")).write_text(tag)
        with pytest.raises(ManifestError, match=message):
            manifests.load(f"{three}@draft")


def test_a_folder_whose_name_ends_like_a_version_is_opened_as_it_is(three):
    (Path(f"{three}@2/plan")).mkdir(parents=True)
    assert number_of(f"{three}@2") == 2  # nothing in it
    (Path(f"{three}@2/plan/build.json")).touch()
    with pytest.raises(ManifestError, match=r"@2/manifest\.json: no manifest there"):
        manifests.load(f"{three}@2")
    shutil.copytree(three, f"{three}@2", dirs_exist_ok=True)
    assert number_of(f"{three}@2") == 3
    assert number_of(f"{three}@2@1") == 1
    with pytest.raises(
        ManifestError,
        match=r"me@work: no such folder; and as version 'work' of .*me: .*no manifest",
    ):
        manifests.load(f"{three}/me@work")


def test_a_view_of_an_older_version_opens_whatever_was_appended(three, tmp_path, said):
    out = str(tmp_path / "cats.parquet")
    said("view", out, "--of", f"{three}@1", "--per-class", 1)
    assert manifests.load(out).without_view().manifest.number == 1
    (Path(three) / versions.path(1)).unlink()
    with pytest.raises(ConfigError, match="is a view of the set with digest"):
        manifests.load(out)


def test_the_log_lists_versions_with_their_samples_and_tags(three, said):
    version_history.tag(f"{three}@2", "paper")
    found = [line.split()[:2] + line.split()[3:] for line in said("log", three).splitlines()]
    assert found == [
        ["version", "3", "train", "22,", "val", "20"],
        ["version", "2", "train", "21,", "val", "20", "@paper"],
        ["version", "1", "train", "20,", "val", "20"],
    ]
    entries = json.loads(said("log", three, "--json"))
    assert [entry["tags"] for entry in entries] == [[], ["paper"], []]


def test_a_web_server_has_versions_tags_and_views_by_their_known_names(three, tmp_path, said):
    version_history.tag(f"{three}@2", "paper")
    said("view", tmp_path / "cats.parquet", "--of", f"{three}@1", "--per-class", 1)
    with WebServer(tmp_path) as server:
        url = f"{server.url}/set"
        assert [number_of(f"{url}{end}") for end in ("", "@1", "@paper")] == [3, 1, 2]
        assert manifests.load(f"{server.url}/cats.parquet").without_view().manifest.number == 1
        assert (
            version_history.diff_lines(version_history.diff(f"{url}@2", url))[-1]
            == "1 sample differ"
        )
        (Path(three) / versions.path(1)).unlink()
        *entries, last = said("log", url).splitlines()
        assert [entry.split()[1] for entry in entries] == ["3", "2"]
        assert last == "tags: a web server lists none; SET@TAG finds one"
        for end, message in (("@1", "version 1 was removed"), ("@draft", "no version has the tag")):
            with pytest.raises(ManifestError, match=message):
                manifests.load(url + end)


def test_a_difference_names_what_came_went_moved_and_changed(three, tmp_path, said):
    changes = "train, cat: 1 added\ntrain, owl: 1 added\n2 samples differ\n"
    assert said("diff", f"{three}@1", three) == changes
    assert [sample.kind for sample in version_history.diff(three, f"{three}@2")] == ["removed"]
    assert version_history.diff_lines(version_history.diff(three, three)) == ["the same samples"]
    raw = write_images(tmp_path / "raw", ["0.png", "1.png", "3.png"])
    for name, dog, image in (("a", "dog", "1.png"), ("b", "cat", "3.png")):
        shutil.copy(raw / image, raw / "2.png")
        rows = [(0, "cat", "train"), (1, dog, "train"), (2, "dog", "val"), (3, "dog", "train")]
        listing = [(f"{number}.png", label, split, f"k{number}") for number, label, split in rows]
        source = write_csv(raw / "list.csv", ["path", "label", "split", "key"], listing)
        built(config_of(source, tmp_path / name, source="listing", num_shards={"": 1}))
    found = json.loads(said("diff", tmp_path / "a", tmp_path / "b", "--json"))
    assert [[*sample.values()] for sample in found] == [
        ["relabelled", "train", "k1", "dog", "cat"],
        ["changed", "val", "k2", "dog", "dog"],
    ]


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_stand(tmp_path):
    write_class_folders(tmp_path / "photos", ["cat", "dog"], 5)
    write_images(
        tmp_path / "photos-june",
        [f"{name}/june{n}.jpg" for name in ("ant", "dog") for n in range(4)],
    )
    built(config_of(tmp_path / "photos", tmp_path / "shards", num_shards={"": 1}))
    (tmp_path / "keys.txt").write_text("cat/001\nant/june2\n")
    said = [
        documented.run(documented.words_of(command, {"gs://bucket/set": "shards"}), tmp_path)
        for command in documented.commands_of("docs/how-to/versions.md")
    ]
    assert "0 not repaired" in said[1]
    assert "paper is version 2" in said[2]
    assert said[3].count("version") == 2
    assert said[4] == "the same samples\n"
    assert "2 samples dropped" in said[5]
    assert "not reached: object versions" in said[6]
    assert number_of(str(tmp_path / "shards")) == 3
