"""Answers one question about a shard set: an overview, or the samples of a shard, of a key or of an original name."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from pipelines.check.lookups import SampleInfo, find_key, find_name, samples_of_shard
from pipelines.check.overview import Overview, find_label, overview
from pipelines.check.render import render_overview, render_samples
from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to look up: at most one of `shard`, `key` and `name`; optionally only in one split or class.

    `class_name` is a name, a wnid or a label.
    """

    split: str | None = None
    shard: int | None = None
    key: str | None = None
    name: str | None = None
    class_name: str | None = None

    def __post_init__(self) -> None:
        if sum(wanted is not None for wanted in (self.shard, self.key, self.name)) > 1:
            raise ConfigError("--shard, --key and --name ask for different things; give one of them")


def inspect(url: str, question: Question) -> Overview | list[SampleInfo]:
    """The answer from the shard set at `url` (its manifest or folder): samples, or an overview if none are asked for.

    Raises ConfigError if there is no such split, class, shard or sample.
    """
    manifest, storage = manifests.load(url)
    split, wanted = question.split, question.class_name
    if split is not None and split not in manifest.splits:
        raise ConfigError(f"no split {split!r} in this shard set; it has {', '.join(sorted(manifest.splits))}")
    label = None if wanted is None else find_label(manifest, wanted)
    if question.key is not None:
        samples = find_key(storage, manifest, question.key, split=split)
    elif question.name is not None:
        samples = find_name(storage, manifest, question.name, split=split)
    elif question.shard is not None:
        samples = samples_of_shard(storage, manifest, split or _only_split(manifest), question.shard)
    else:
        return overview(manifest, url, split=split, label=label)
    return [sample for sample in samples if label in (None, sample.label)]


def render(answer: Overview | Sequence[SampleInfo]) -> RenderableType:
    """The answer as tables for a terminal."""
    return render_overview(answer) if isinstance(answer, Overview) else render_samples(answer)


def _only_split(manifest: Manifest) -> str:
    if len(manifest.splits) != 1:
        raise ConfigError(f"every split has its own shards; add --split {' or --split '.join(sorted(manifest.splits))}")
    return next(iter(manifest.splits))
