"""A storage that refuses deletes, by a retention policy, a hold or for want of a right: what is
published is done, and what stays is told.
"""

import json
import uuid

import pytest

import shardset
from shardset.errors import StorageError, TransientError
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.makers.built import HERE, verified
from tests.makers.folders import write_class_folders, write_images
from tests.makers.images import image_bytes

KEPT = "that nothing needs any more can't be removed and stay: "


class Refusal:
    """Whether deletes are refused, and how many were."""

    is_on, num_refused = True, 0


@pytest.fixture
def retained(monkeypatch):
    """The URL of an empty folder whose storage refuses deletes while the second value is on."""
    refusal, delete = Refusal(), MemoryStorage.delete

    def refuse(self, name, *, generation=None):
        if refusal.is_on and name in {stat.name for stat in self.list(name)}:
            refusal.num_refused += 1
            raise StorageError(f"{self.url}/{name}: is subject to the bucket's retention policy")
        delete(self, name, generation=generation)

    monkeypatch.setattr(MemoryStorage, "delete", refuse)
    return f"memory://{uuid.uuid4().hex}/set", refusal


def keys_in(url):
    return {sample.key for sample in shardset.open(url, "train")}


def test_each_verb_ends_well_tells_what_stays_and_removes_it_once_it_may(retained, tmp_path, said):
    url, refusal = retained
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train"])
    more = write_images(tmp_path / "more", ["train/cat/new.jpg"])
    build = "build", "--source=folder", f"--input={raw}", f"--output={url}", *HERE
    replacing = *build, "--overwrite", "--seed=9"
    append = "append", url, "--source=folder", f"--input={more}", *HERE
    said(*build)
    for words in (replacing, replacing):
        before = refusal.num_refused
        assert KEPT in said(*words), words
        assert refusal.num_refused > before
        verified(url)
    assert KEPT in json.loads(said(*append, "--json"))["notes"][-1]
    said(*append)
    verified(url)
    assert len(keys_in(url)) == 9
    (tmp_path / "keys").write_text("train/cat/000\n")
    compact = "compact", url, "--drop-keys", tmp_path / "keys", "--grace=0"
    for _ in range(2):
        found = said(*compact)
        assert KEPT in found
        assert "give the same command again" in found
        assert "train/cat/000" not in keys_in(url)
        verified(url)
    assert "train/cat/000" in keys_in(f"{url}@1")
    refusal.is_on = False
    assert KEPT not in said(*compact)
    assert [stat.name for stat in open_storage(url).list("versions/")] == []
    write_images(more, ["train/cat/newer.jpg"])
    assert KEPT not in said(*append)
    verified(url)


def test_a_storage_that_stops_answering_is_asked_no_more(tmp_path, said, monkeypatch):
    raw = write_class_folders(tmp_path / "raw", ["cat", "dog"], 4, splits=["train"])
    asked = []

    def fail(self, name, *, generation=None):
        asked.append(name)
        raise TransientError(f"{self.url}/{name}: gave up after 9 tries")

    monkeypatch.setattr(MemoryStorage, "delete", fail)
    url = f"memory://{uuid.uuid4().hex}/set"
    build = "build", "--source=folder", f"--input={raw}", f"--output={url}", *HERE
    said(*build)
    found = said(*build, "--overwrite", "--seed=9")
    assert KEPT in found
    assert "gave up after 9 tries" in " ".join(found.split())  # lines may be wrapped
    assert len(asked) == 3  # before the build, at the commit and at the end
    assert len(keys_in(url)) == 8


def test_an_exception_in_a_writer_s_block_is_not_replaced_by_a_refused_delete(retained):
    url, _ = retained

    def fail() -> None:
        with shardset.Writer(url, samples_per_shard=1) as writer:
            for number in range(3):
                writer.write(image=image_bytes(number), label=number)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "train/train-000000.tar stays: " in caught.value.__notes__[0]
