"""Tars of others become a set where they are: what stock webdataset reads, sample by sample, or a
reason.
"""

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

import shardset
from pipelines.config import AdoptConfig
from pipelines.sets.adopt import adopt
from pipelines.sources import open_source
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.storage.local import LocalStorage
from shardset.storage.open import open_storage
from tests.makers.built import HERE, add, built, config_of, forget, inspected, verified
from tests.makers.folders import write_images
from tests.makers.images import image_bytes
from tests.makers.shardset import encode, png_samples, put, write_shard_set
from tests.makers.stored import files_of
from tests.makers.tars import plain, special, tar_bytes, tar_of

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "posix": tarfile.PAX_FORMAT}
DEEP = "a" * 60 + "/" + "b" * 80


def adopted(folder: Path | str, **options: Any) -> manifests.Manifest:
    adopt(AdoptConfig(**{"input": str(folder), **options}), HERE)
    return manifests.load(str(folder).partition("/t-")[0])[0]


def stock(folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    """What webdataset reads from all tars of a folder, in order."""
    tars = sorted(map(str, folder.rglob("*.tar")))
    samples = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False)
    return [
        (one["__key__"], {name: one[name] for name in one if name[0] != "_"}) for one in samples
    ]


def ours(folder: Path | str, split: str = "t") -> list[tuple[str, dict[str, bytes]]]:
    return [(sample.key, sample.fields) for sample in shardset.open(str(folder), split)]


def keys(*serials: int) -> list[str]:
    return [f"{serial:04d}" for serial in serials]


def test_a_missing_part_of_a_folder_is_refused_by_name_unless_that_is_allowed(tmp_path):
    for number in (0, 2):
        tar = tar_bytes({f"{number}.png": image_bytes(number)})
        add(tmp_path, f"t-{number:05d}-of-00003.tar", tar)
    with pytest.raises(SourceError, match=r"missing: t-00001-of-00003.*--allow-missing-parts"):
        adopted(tmp_path)
    config = config_of(tmp_path, tmp_path / "out", source="webdataset")
    with pytest.raises(SourceError, match="missing: t-00001-of-00003"):
        open_source(config).survey()
    adopt(AdoptConfig(input=str(tmp_path), allow_missing_parts=True), HERE)
    assert len(ours(tmp_path)) == 2


def patterns(manifest: manifests.Manifest) -> dict[str, list[str]]:
    """The tars that the groups of each split name."""
    return {
        name: [group.shards for group in split.groups] for name, split in manifest.splits.items()
    }


def members(number: int, num_samples: int = 4, prefix: str = "") -> list[tuple[str, bytes]]:
    """A sample is an image, its label and, if it is even, a text."""
    found = []
    for serial in range(number * num_samples, (number + 1) * num_samples):
        found += [
            (f"{prefix}{serial:04d}.PNG", image_bytes(serial)),
            (f"{prefix}{serial:04d}.cls", b"%d\n" % (serial % 3)),
        ]
        found += [(f"{prefix}{serial:04d}.seg.txt", b"text")] if serial % 2 == 0 else []
    return found


def write_tar(
    folder: Path, number: int, files: list[tuple[str, bytes]], how: str, format: str
) -> None:
    path, raw = folder / f"t-{number:03d}.tar", folder / f"raw{number}"
    if how == "tarfile":
        path.write_bytes(tar_bytes(files, FORMATS[format]))
        return
    for name, content in files:
        add(raw, name, content)
    command = f"tar --format={format} --sort=name -C {raw} -cf {path} ."
    subprocess.run(command.split(), check=True)


def write_tars(folder: Path, *numbers: int) -> None:
    for number in numbers:
        add(folder, f"t-{number}.tar", tar_bytes(members(number)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["tar", "tarfile"])
def test_a_set_of_tars_of_others_is_what_webdataset_reads(how, format, tmp_path):
    for number, prefix in enumerate(["", "train/x/", f"{DEEP}/"]):
        write_tar(tmp_path, number, members(number, prefix=prefix), how, format)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.tar")}
    manifest = adopted(tmp_path / "t-{000..002}.tar")
    assert ours(tmp_path) == stock(tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert patterns(manifest) == {"t": ["t-{000..002}.tar"]}
    assert manifest.split("t").groups[0].promises == ["equal"]
    assert [info.name for info in manifest.classes] == ["0", "1", "2"]
    verified(tmp_path)
    assert [sample.label for sample in inspected(tmp_path, shard=1)] == [1, 2, 0, 1]
    with shardset.Stream(str(tmp_path), "t", batch_size=4, image_size=16, with_key=True) as stream:
        read = [key for batch in stream for key in batch["key"]]
    assert sorted(read) == sorted(key for key, _ in stock(tmp_path))


@pytest.mark.gcs
def test_tars_in_a_bucket_are_read_once_and_where_they_are(gcs_root, tmp_path):
    storage = open_storage(gcs_root)
    for number in range(2):
        put(storage, f"t-{number}.tar", tar_bytes(members(number), tarfile.PAX_FORMAT))
    adopted(f"{gcs_root}/t-{{0..1}}.tar")
    assert [key for key, _ in ours(gcs_root)] == keys(*range(8))
    verified(gcs_root)


def files(*names: str) -> list[tarfile.TarInfo]:
    return [plain(name, b"x") for name in names]


ODD = {
    "a hard link": ([*files("0.txt"), special("1.txt", tarfile.LNKTYPE, "0.txt")], "is a link"),
    "no key between": (files("0.a", "README", "0.b", "1.a"), "no dot"),
    "a field twice": (files("0.txt", "0.TXT", "1.txt"), "twice"),
    "a long name": (files("k" * 1024 + ".txt", "1.txt"), "over 1024 bytes"),
    "what webdataset skips": (files("__a__/0.txt", "1.txt"), "__metadata__"),
    "no ASCII": (files("ä.txt", "1.txt"), "not ASCII"),
    "a class in words": (files("0.cls", "1.txt"), "expected a label"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_read_exactly_is_listed_and_never_skipped(what, tmp_path):
    infos, reason = ODD[what]
    tar = tar_of([(info, b"x" * info.size) for info in infos], tarfile.PAX_FORMAT)
    add(tmp_path, "t-0.tar", tar)
    manifest = adopted(tmp_path)
    entries = [*map(json.loads, (tmp_path / "quarantine.jsonl").read_bytes().splitlines())]
    assert len(entries) == manifest.quarantine.count == 1
    assert reason in entries[0]["reason"]
    assert entries[0]["object"] == "t-0.tar"
    num_left = 1 + (what == "no key between")
    assert manifest.split("t").num_samples == num_left == len(ours(tmp_path))
    verified(tmp_path)


GOOD = tar_bytes([("0.txt", b"x" * 3000)])


BAD = {
    "truncated": (GOOD[:2000], "cut"),
    "nothing": (b"", "cut"),
    "odd": (tar_bytes([("README", b"x")]), "holds no sample .*no dot"),
    "many fields": (tar_bytes([(f"{n}.f{n}", b"x") for n in range(901)]), "more than 900 fields"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_a_bad_tar_is_named_and_the_others_are_kept(data, reason, tmp_path):
    write_tars(tmp_path, 7, 8, 10)
    add(tmp_path, "t-9.tar", data)
    with pytest.raises(SourceError, match=f"t-9.tar.*{reason}"):
        adopted(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    (tmp_path / "t-9.tar").unlink()
    manifest = adopted(tmp_path)
    assert patterns(manifest) == {"t": ["t-{7..8}.tar", "t-{10..10}.tar"]}
    assert [key for key, _ in ours(tmp_path)] == keys(*range(28, 36), *range(40, 44))
    verified(tmp_path)


def test_sparse_members_are_listed(tmp_path):
    with (tmp_path / "0.bin").open("wb") as file:
        file.truncate(1 << 20)
    add(tmp_path, "1.txt", b"x")
    for number, how in enumerate(["gnu", "posix"]):
        tar = ["tar", f"--format={how}", "-C", tmp_path, "-Scf", tmp_path / f"t-{number}.tar"]
        subprocess.run([*tar, "0.bin", "1.txt"], check=True)
    assert adopted(tmp_path).split("t").num_samples == 2
    assert (tmp_path / "quarantine.jsonl").read_bytes().count(b"is a sparse file") == 2


def test_empty_members_odd_keys_and_long_members_are_read_exactly(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (700, 1600, 3), np.uint8)
    files = [
        ("./a b/0.txt", b""),
        ("./a b/0.png", big := encode(noise, "png")),
        ("./a b/1.bin", big[1:]),
        ("./a b/1.cls", b" 007\n"),
    ]
    assert len(big) > 3 << 20
    add(tmp_path, "t-0.tar", tar_bytes(files, tarfile.GNU_FORMAT))
    assert adopted(tmp_path).split("t").class_totals == [0] * 7 + [1]
    assert ours(tmp_path) == stock(tmp_path)
    verified(tmp_path)
    sample, _ = inspected(tmp_path, shard=0)
    assert (sample.width, sample.height) == (1600, 700)


def test_tars_with_different_fields_are_one_group(tmp_path, said):
    image = image_bytes(0)
    add(tmp_path, "t-0.tar", tar_bytes([("0.png", image), ("0.txt", b"x"), ("0.cls", b"3")]))
    more = [("1.json", b'{"label": 1}'), ("1.txt", b"y"), ("2.txt", b"z")]
    add(tmp_path, "t-1.tar", tar_bytes(more))
    manifest = adopted(tmp_path)
    assert patterns(manifest) == {"t": ["t-{0..1}.tar"]}
    assert manifest.split("t").fields == ["cls", "png", "txt", "json"]
    assert ours(tmp_path) == stock(tmp_path)
    for verb, *flags in (["report"], ["export", "--to", "hf,wids"]):
        said(verb, tmp_path, *flags)
    assert "3 samples" in said("verify", tmp_path, "--deep")


def test_the_manifest_may_lie_above_the_tars_and_nowhere_else(tmp_path):
    add(tmp_path, "in/put/t-0.tar", GOOD)
    with pytest.raises(
        ConfigError,
        match=r"names tars in its own folder and below; give .*in/put, a folder above it",
    ):
        adopted(tmp_path / "in/put", output=str(tmp_path / "in/pu"))
    adopt(AdoptConfig(input=f"{tmp_path}/in/put", output=str(tmp_path)), HERE)
    assert patterns(verified(tmp_path)) == {"t": ["in/put/t-{0..0}.tar"]}
    assert [key for key, _ in ours(tmp_path)] == ["0"]


def test_kills_leave_no_manifest_and_lose_no_finished_index(tmp_path, monkeypatch):
    write_tars(tmp_path, 0, 1, 2)
    write = LocalStorage.writer
    for dies_at in ("t-1.parquet", "plan/tars/t-1.tar.json", "t/shards.npy", "manifest.json"):

        def writer(self, name, dies_at=dies_at, **options):
            if name == dies_at:
                raise KeyboardInterrupt
            return write(self, name, **options)

        monkeypatch.setattr(LocalStorage, "writer", writer)
        with pytest.raises((KeyboardInterrupt, RuntimeError)):  # the second from a worker
            adopted(tmp_path)
        assert not (tmp_path / "manifest.json").exists()
        monkeypatch.undo()
    first = (tmp_path / "t-0.parquet").stat().st_mtime_ns
    assert adopted(tmp_path).split("t").num_samples == 12
    assert (tmp_path / "t-0.parquet").stat().st_mtime_ns == first
    assert ours(tmp_path) == stock(tmp_path)


def test_a_rerun_reads_only_tars_that_changed_or_are_new(tmp_path):
    write_tars(tmp_path, 0, 1, 2)
    first = adopted(tmp_path)
    assert adopted(tmp_path) == first
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    add(tmp_path, "t-1.tar", tar_bytes(members(5)))
    add(tmp_path, "t-3.tar", tar_bytes(members(6)))
    with pytest.raises(
        ConfigError, match=r"finished before, from other input; remove manifest\.json"
    ):
        adopted(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert adopted(tmp_path).split("t").num_samples == 16
    changed = {
        path.name
        for path in tmp_path.glob("*.parquet")
        if times.get(path.name) != path.stat().st_mtime_ns
    }
    assert changed == {"t-1.parquet", "t-3.parquet"}
    assert ours(tmp_path) == stock(tmp_path)


def test_folders_or_names_are_splits_and_numbers_are_in_their_order(tmp_path):
    names = [
        "train/a-9.tar",
        "train/a-10.tar",
        "train/a-11.tar",
        "val-00000-of-00002.tar",
        "val-00001-of-00002.tar",
    ]
    for number, name in enumerate(names):
        add(tmp_path, name, tar_bytes(members(number, 2)))
    assert patterns(adopted(tmp_path)) == {
        "train": ["train/a-{9..9}.tar", "train/a-{10..11}.tar"],
        "val": ["val-{00000..00001}-of-00002.tar"],
    }
    assert [key for key, _ in ours(tmp_path, "train")] == keys(*range(6))
    (tmp_path / "manifest.json").unlink()
    assert adopted(tmp_path, split="all").split("all").num_samples == 10


def test_a_name_without_a_number_is_refused(tmp_path):
    add(tmp_path, "train.tar", GOOD)
    with pytest.raises(ConfigError, match=r"'train.tar': a manifest can't name this tar"):
        adopted(tmp_path)
    (tmp_path / "train.tar").rename(tmp_path / "my train-0.tar")
    with pytest.raises(ConfigError, match="'my train' can't name a split"):
        adopted(tmp_path)
    assert patterns(adopted(tmp_path, split="t")) == {"t": ["my train-{0..0}.tar"]}


def test_no_change_touches_adopted_tars(tmp_path):
    add(tmp_path, "t-0.tar", GOOD)
    adopted(tmp_path)
    raw = write_images(tmp_path / "raw", ["train/a/0.png"])
    for change in (
        lambda: built(config_of(raw, tmp_path, overwrite=True)),
        lambda: built(config_of(raw, tmp_path, append="store")),
        lambda: forget(tmp_path, "a"),
    ):
        with pytest.raises(ConfigError, match="adopted: shardset neither changes nor removes them"):
            change()
    assert (tmp_path / "t-0.tar").read_bytes() == GOOD


def test_a_set_that_was_built_and_columns_are_left_alone(tmp_path):
    storage = open_storage(str(tmp_path))
    write_shard_set(storage, {"t": png_samples("t", 4)})
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match="another shard set is there already"):
        adopted(tmp_path)
    assert files_of(tmp_path) == before
    others = tmp_path / "others"
    add(others, "columns/x/t/t-0.tar", GOOD)
    with pytest.raises(SourceError, match="holds only tars of columns"):
        adopted(others)
    add(others, "t-0.tar", GOOD)
    assert adopted(others).split("t").num_samples == 1


def test_the_command_adopts_and_estimate_says_what_follows(tmp_path, said):
    write_tars(tmp_path, 0, 1)
    answer = json.loads(said("adopt", "--input", f"{tmp_path}/t-{{0..1}}.tar", "--json", *HERE))
    assert (answer["num_samples"], answer["quarantined"]) == ({"t": 8}, 0)
    found = json.loads(said("estimate", tmp_path, "--split", "t", "--json"))
    assert "Nobody promises that these tars are mixed" in found["advice"][0]
