"""Builds in this process, appends and compactions of what they made, and its manifests."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

from pipelines.build import build
from pipelines.check.inspect import inspect
from pipelines.check.verify import verify
from pipelines.config import BuildConfig
from pipelines.plan import paths
from pipelines.sets.compact import compact
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from tests.makers import planned
from tests.makers.folders import write_images

HERE = ["--direct_running_mode=in_memory"]
NOW, DAY = datetime(2026, 1, 1, tzinfo=UTC), timedelta(1)


def config_of(raw: Path | str, output: Path | str, **options) -> BuildConfig:
    options = {"source": "folder", "num_shards": {"": 3}, **options}
    return BuildConfig(input=str(raw), output=str(output), **options)


def built(config: BuildConfig) -> Manifest:
    """Builds a set and reads its manifest."""
    published = build(config, HERE).published
    manifest = manifests.load(config.output)[0]
    assert published is not None
    assert published.digest == manifest.digest
    return manifest


def manifest_of(folder: Path | str) -> Manifest:
    """The manifest of the set at an address."""
    return manifests.load(str(folder)).manifest


def verified(folder: Path | str) -> Manifest:
    """The same of a set in which the deep verification finds nothing."""
    assert verify(str(folder), deep=True).problems == ()
    return manifest_of(folder)


def append_of(output: Path | str, raw: Path, *images: str) -> BuildConfig:
    """An append of these images, which are written to `raw`, as one more shard."""
    return config_of(write_images(raw, images), output, num_shards={"": 1}, append="store")


def forget(folder: Path | str, *keys: str, **options):
    """Compacts a set at NOW, without waiting, unless the options say more."""
    return compact(str(folder), keys, **{"grace": timedelta(0), "now": NOW, **options})


def unfinished(raw: Path, output: Path, tool: str | None = None) -> BuildConfig:
    """A build of which one shard is missing, as if `tool` had begun it."""
    config = config_of(raw, output)
    build(config, HERE)
    for name in (naming.MANIFEST, paths.record_path("train", 2)):
        (output / name).unlink()
    if tool:
        begun = planned.record_of(output, paths.BUILD)
        planned.rewrite(output, paths.BUILD, begun | {"tool": tool})
    return config


def inspected(url: Path | str, **which):
    """What `inspect` answers: samples, or an overview."""
    answer = inspect(str(url), **which)
    return answer if isinstance(answer, dict) else [SimpleNamespace(**row) for row in answer]


def add(raw: Path, name: str, data: bytes) -> None:
    (raw / name).parent.mkdir(parents=True, exist_ok=True)
    (raw / name).write_bytes(data)
