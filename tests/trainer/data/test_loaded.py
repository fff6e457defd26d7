"""A process parses the manifest of its run once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardset.errors import ManifestError
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.shardset import png_samples, write_shard_set
from trainer.data.loaded import load_once
from trainer.data.splits import open_data
from trainer.defaults import resolve
from trainer.flags import ConfigFlags


def made(url: str, num_samples: int) -> str:
    samples = {"train": png_samples("train", num_samples, size=8), "val": png_samples("val", 10, size=8)}
    write_shard_set(open_storage(url), samples, num_shards=2)
    return url


@pytest.mark.parametrize("name", ["", "/manifest.json"])
def test_a_run_without_a_recipe_parses_its_manifest_once(tmp_path: Path, name: str) -> None:
    url = made(str(tmp_path / "set"), 40) + name
    loaded = load_once(url)
    values = {"manifest": url, "run_dir": str(tmp_path / "run")}
    config, _ = resolve(ConfigFlags(recipe=None, values=values, changes=[], fake_data=False))
    data = open_data(config, 0, 1)
    for stream in (data.train, data.evaluation):
        assert isinstance(stream, Stream)
        assert stream.manifest is loaded.manifest


def test_threads_share_a_set_until_it_is_replaced(tmp_path: Path) -> None:
    url = made(str(tmp_path / "set"), 40)
    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(load_once, [url] * 20)
    assert all(other is first for other in others)
    made(url, 50)
    assert load_once(url).manifest.split("train").num_samples == 50
    assert load_once(made(str(tmp_path / "other"), 30)).manifest.split("train").num_samples == 30


def test_a_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no manifest there"):
        load_once(str(tmp_path))
