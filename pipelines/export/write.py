"""Writes the side files of other readers, from the manifest and the indexes of a shard set; never a
tar.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.export.base import ShardSet, SideFile, SideFormat, prefix_of
from pipelines.export.energon import ENERGON
from pipelines.export.hf import HF
from pipelines.export.shard_lists import TIMM, WIDS
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.storage.base import ABSENT, Storage
from shardset.storage.open import open_storage

FORMATS: dict[str, SideFormat] = {"wids": WIDS, "timm": TIMM, "energon": ENERGON, "hf": HF}

Outcome = Literal["written", "replaced", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """One side file: its reader, its path, its size, and what was done."""

    format: str
    path: str
    num_bytes: int
    outcome: Outcome


def export(
    url: str, formats: Sequence[str], *, output: str | None = None, overwrite: bool = False
) -> list[ExportedFile]:
    """Writes the side files of the readers named in `formats` for the set at `url`.

    A file with the same bytes is left alone. A different one is replaced with `overwrite`, else
    ConfigError. No file of the shard set itself is ever written.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown or not formats:
        raise ConfigError(
            f"no format {(unknown or [''])[0]!r} to export to; there are {', '.join(FORMATS)}"
        )
    loaded = manifests.load_whole(url)
    manifest, storage = loaded.manifest, loaded.storage
    target = storage if output is None else open_storage(output)
    prefixes = {
        name: prefix_of(storage.url, target.url, FORMATS[name].takes, name) for name in formats
    }
    for name in formats:
        FORMATS[name].check(manifest)
    exported: list[ExportedFile] = []
    for name, prefix in prefixes.items():
        files = list(
            FORMATS[name].files(ShardSet(manifest=manifest, storage=storage, prefix=prefix))
        )
        exported += _write_all(target, name, files, overwrite=overwrite)
    return exported


def render(exported: Sequence[ExportedFile]) -> str:
    """One line for each format: its files, or the first and last of many."""
    lines = []
    for name in dict.fromkeys(file.format for file in exported):
        files = [file for file in exported if file.format == name]
        paths = [file.path for file in files]
        shown = paths if len(paths) <= 6 else [*paths[:2], "...", paths[-1]]
        outcomes = Counter(file.outcome for file in files)
        counted = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
        lines.append(
            f"{name}: {counted}, {sum(file.num_bytes for file in files):,} bytes:"
            f" {', '.join(shown)}"
        )
    return "\n".join(lines)


def _write_all(
    target: Storage, name: str, files: list[SideFile], *, overwrite: bool
) -> Iterator[ExportedFile]:
    """Writes the files of one format; checks all paths first, so that a conflict leaves nothing
    half written.
    """
    outcomes = [_outcome(target, file) for file in files]
    taken = [
        file.path for file, outcome in zip(files, outcomes, strict=True) if outcome == "replaced"
    ]
    if taken and not overwrite:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ConfigError(
            f"{target.url}/{taken[0]}{more}: differs from what {name} gets from this manifest;"
            " check it, then give --overwrite to replace it"
        )
    for file, outcome in zip(files, outcomes, strict=True):
        if outcome != "unchanged":
            # A file that appeared since the check is not replaced unasked.
            expected = ABSENT if outcome == "written" else None
            target.write(file.path, file.content, if_generation=expected)
        yield ExportedFile(
            format=name, path=file.path, num_bytes=len(file.content), outcome=outcome
        )


def _outcome(target: Storage, file: SideFile) -> Outcome:
    """What writing the file would do."""
    try:
        same = (
            target.stat(file.path).num_bytes == len(file.content)
            and target.read(file.path) == file.content
        )
    except NotFound:
        return "written"
    return "unchanged" if same else "replaced"
