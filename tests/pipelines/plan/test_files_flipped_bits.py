"""A bit that is flipped where a build reads back what it wrote: healed if it comes once, named if
it stays.
"""

import re
import uuid

import pytest

from pipelines.begin import prepare
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.runners import beam_options, on_beam
from pipelines.write.set_files import listed_by
from shardset.errors import ManifestError, ShardsetError
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.storage.open import open_storage
from tests.makers.doors import changing
from tests.makers.folders import write_images, write_jsonl
from tests.makers.stored import files_of

HERE = ["--direct_running_mode=in_memory"]
KINDS = {
    "what is built": paths.BUILD,
    "the survey": paths.SURVEY,
    "a unit": paths.unit_path(0),
    "a summary": paths.summary_path(0),
    "a spool": paths.spool_path(0),
    "the plan": paths.PLAN,
    "references of a shard": paths.references_path("train/train-000001.tar"),
}
"""Of the frame of a file, tests/pipelines/plan/test_files.py flips every bit."""
STAYING = {"the survey": "first", "the plan": "last"}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A listing with long metadata (a spool), a key wanted twice, and an image that is none."""
    folder = write_images(
        tmp_path_factory.mktemp("flips") / "raw", [f"{number}.png" for number in range(6)]
    )
    (folder / "5.png").write_bytes(b"<html>404</html>")
    rows = [
        {"path": f"{number}.png", "label": 0, "note": "n" * 2000}
        for number in (0, 1, 2, 3, 4, 5, 1)
    ]
    return write_jsonl(folder / "all.jsonl", rows)


@pytest.fixture(scope="module")
def undisturbed(raw):
    return made(raw, open_storage(f"memory://{uuid.uuid4().hex}"))


def made(raw, storage, seed=0):
    """The files of a build there."""
    config = BuildConfig(
        source="listing",
        input=str(raw),
        output=storage.url,
        num_shards={"": 2},
        max_bad_fraction=0.5,
        seed=seed,
        overwrite=bool(seed),
    )
    prepared = prepare(config, storage)
    on_beam.run(prepared, beam_options.beam_options(HERE, storage))
    return files_of(storage.url)


class Flips:
    """Flips a bit of what is read of one object: each range the first time, or always."""

    def __init__(self, name, place, *, once):
        self.name, self.place, self.once = name, place, once
        self.seen = set()
        self.count = 0

    def __call__(self, call, data):
        if call.split(" ")[0] != self.name or not data or (self.once and call in self.seen):
            return data
        self.seen.add(call)
        self.count += 1
        at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[self.place]
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_a_bit_that_is_flipped_once_in_each_file_changes_nothing(raw, undisturbed):
    inner = open_storage(f"memory://{uuid.uuid4().hex}")
    flips = [Flips(name, "middle", once=True) for name in KINDS.values()]

    def flipped(call, data):
        for flip in flips:
            data = flip(call, data)
        return data

    assert made(raw, changing(inner, uuid.uuid4().hex, flipped)) == undisturbed
    assert all(flip.count for flip in flips)
    assert verify(inner.url, deep=True).problems == ()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), STAYING.items())
def test_a_bit_that_stays_flipped_is_named_and_nothing_is_published(raw, undisturbed, kind, place):
    inner, flips = (
        open_storage(f"memory://{uuid.uuid4().hex}"),
        Flips(KINDS[kind], place, once=False),
    )
    with pytest.raises(ShardsetError, match=re.escape(KINDS[kind])) as caught:
        made(raw, changing(inner, uuid.uuid4().hex, flips))
    assert "remove plan/ at the output" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ManifestError):
        manifests.load(inner.url)
    assert made(raw, inner) == undisturbed  # it was flipped on its way only


@pytest.mark.slow
def test_the_manifest_of_a_replaced_set_is_compared_before_its_files_are_removed(raw):
    inner, flips = (
        open_storage(f"memory://{uuid.uuid4().hex}"),
        Flips(paths.REPLACED, "middle", once=False),
    )
    made(raw, inner)
    with pytest.raises(ShardsetError, match=r"replaced\.json.*remove plan/ at the output"):
        made(raw, changing(inner, uuid.uuid4().hex, flips), seed=1)
    assert verify(inner.url, deep=True).problems == ()
    made(raw, inner, seed=1)
    manifest = manifests.load(inner.url)[0]
    assert files_of(inner.url).keys() == {naming.MANIFEST, *listed_by(manifest)}
