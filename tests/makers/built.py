"""Builds in this process, and their manifests."""

from pathlib import Path

from pipelines.build import build
from pipelines.config import BuildConfig
from pipelines.plan import paths
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from tests.makers import planned

HERE = ["--direct_running_mode=in_memory"]


def config_of(raw: Path | str, output: Path | str, **options: object) -> BuildConfig:
    return BuildConfig(
        **{
            "source": "folder",
            "input": str(raw),
            "output": str(output),
            "num_shards": {"": 3},
            **options,
        }
    )


def built(config: BuildConfig) -> Manifest:
    """Builds a set and reads its manifest."""
    published = build(config, HERE).published
    manifest = manifests.load(config.output)[0]
    assert published is not None
    assert published.digest == manifest.digest
    return manifest


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


def add(raw: Path, name: str, data: bytes) -> None:
    (raw / name).parent.mkdir(parents=True, exist_ok=True)
    (raw / name).write_bytes(data)
