import pytest

from pipelines.sources.shardset import ExistingSet
from shardset.errors import SourceError
from shardset.format.manifest import load
from shardset.storage.open import open_storage
from tests.makers.shardset import png_samples, write_shard_set
from tests.makers.spools import read


@pytest.fixture
def source(tmp_path) -> ExistingSet:
    samples = {name: png_samples(name, 5, size=8, num_classes=3) for name in ("train", "holdout")}
    write_shard_set(open_storage(str(tmp_path)), samples, num_classes=3)
    return ExistingSet(str(tmp_path), open_storage(str(tmp_path)))


def test_a_shard_set_keeps_its_splits_classes_and_samples(tmp_path, source):
    assert {(s.split, s.key, s.label) for s in read(source)} == {
        (split, f"{split}-{serial:06d}", serial % 3)
        for split in ("train", "holdout")
        for serial in range(5)
    }
    manifest = load(str(tmp_path)).manifest
    assert source.survey().classes == manifest.classes
    assert source.survey().objects == {shard.path: shard.num_bytes for shard in manifest.shards}


def test_a_shard_set_that_misses_or_exchanged_a_shard_is_an_error(tmp_path, source):
    first = tmp_path / source.survey().units[0]["tar"]["name"]
    first.write_bytes(first.read_bytes() + b"\0")
    with pytest.raises(SourceError, match=rf"{first.name}: \d+ bytes, its manifest says"):
        source.survey()
    first.unlink()
    with pytest.raises(SourceError, match=rf"1 of 4 tars are missing: .*{first.name}"):
        source.survey()
