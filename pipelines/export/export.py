"""Writes the side files of other readers beside a shard set, from its manifest and indexes; never a tar again."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipelines.export import FORMATS
from pipelines.export.base import ShardSet, SideFile, prefix_of
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.format import naming
from shardset.format.manifest import Manifest
from shardset.storage.base import ABSENT, Storage
from shardset.storage.open import open_storage

Outcome = Literal["written", "replaced", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One side file: for which reader, where, how large, and what was done."""

    format: str
    path: str
    num_bytes: int
    outcome: Outcome


def export(url: str, formats: Sequence[str], *, output: str | None = None, overwrite: bool = False) -> list[Exported]:
    """Writes what the readers named in `formats` want to have beside the tars of the set at `url`.

    A file that stands there with the same bytes is left alone; another one is replaced with `overwrite` only, else
    ConfigError. Nothing of the shard set itself is ever written.
    """
    _check_formats(formats)
    manifest, storage = manifests.load(url)
    target = storage if output is None else open_storage(output)
    places = {name: prefix_of(storage.url, target.url, FORMATS[name].place, name) for name in formats}
    for name in formats:
        FORMATS[name].check(manifest)
    done: list[Exported] = []
    for name, prefix in places.items():
        found = ShardSet(manifest=manifest, storage=storage, prefix=prefix)
        _refuse_ours(manifest, target.url == storage.url, made := list(FORMATS[name].files(found)))
        done += _put_all(target, name, made, overwrite=overwrite)
    return done


def to_json(done: Sequence[Exported]) -> str:
    """All files as a JSON array."""
    return json.dumps(msgspec.to_builtins(list(done)), indent=1)


def render(done: Sequence[Exported]) -> str:
    """One line for each format: its files, or the first and last of many."""
    return "\n".join(_line(name, [one for one in done if one.format == name]) for name in FORMATS if _has(done, name))


def _has(done: Sequence[Exported], name: str) -> bool:
    return any(one.format == name for one in done)


def _line(name: str, done: list[Exported]) -> str:
    paths = [one.path for one in done]
    shown = paths if len(paths) <= 6 else [*paths[:2], "...", paths[-1]]
    outcomes = {one.outcome: sum(other.outcome == one.outcome for other in done) for one in done}
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    return f"{name}: {counted}, {sum(one.num_bytes for one in done):,} bytes: {', '.join(shown)}"


def _check_formats(formats: Sequence[str]) -> None:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"no format {(unknown or [''])[0]!r} to export to; there are {', '.join(FORMATS)}")


def _refuse_ours(manifest: Manifest, same_folder: bool, made: list[SideFile]) -> None:
    shards = (shard for split in manifest.splits.values() for shard in split.shards)
    ours = {naming.MANIFEST, manifest.quarantine.path, *(path for s in shards for path in (s.path, s.index.path))}
    assert not same_folder or not ours.intersection(file.path for file in made)


def _put_all(target: Storage, name: str, made: list[SideFile], *, overwrite: bool) -> Iterator[Exported]:
    """Looks at all places first: a file in the way is found before anything is written."""
    outcomes = [_outcome(target, file) for file in made]
    taken = [file.path for file, outcome in zip(made, outcomes, strict=True) if outcome == "replaced"]
    if taken and not overwrite:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ConfigError(
            f"{target.url}/{taken[0]}{more}: something else stands there than what {name} gets from this manifest; "
            "look at it, then give --overwrite to replace it"
        )
    for file, outcome in zip(made, outcomes, strict=True):
        if outcome != "unchanged":
            with target.writer(file.path, if_generation=ABSENT if outcome == "written" else None) as writer:
                writer.write(file.content)
        yield Exported(format=name, path=file.path, num_bytes=len(file.content), outcome=outcome)


def _outcome(target: Storage, file: SideFile) -> Outcome:
    try:
        same = target.stat(file.path).num_bytes == len(file.content) and target.read(file.path) == file.content
    except NotFound:
        return "written"
    return "unchanged" if same else "replaced"
