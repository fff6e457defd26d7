"""Writes the side files of other readers, from the manifest of a shard set; never a tar."""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.export.formats import FORMATS
from shardset.errors import ConfigError, NotFound
from shardset.format import manifest as manifests
from shardset.program import did_you_mean
from shardset.storage.base import ABSENT, Storage
from shardset.storage.open import is_address, open_storage

Outcome = Literal["written", "replaced", "unchanged"]


@dataclass(frozen=True, slots=True)
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
    ConfigError before anything is written. No file of the shard set itself is ever written.
    """
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"no format {name!r}{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}"
            )
    manifest, storage, _ = manifests.load_whole(url)
    target = storage if output is None else open_storage(output)
    files = [
        (ExportedFile(name, path, len(content), _outcome(target, path, content)), content)
        for name in formats
        for path, content in FORMATS[name](manifest, _prefix(storage.url, target.url, name))
    ]
    for file, _ in files:
        if file.outcome == "replaced" and not overwrite:
            raise ConfigError(
                f"{target.url}/{file.path}: differs from what {file.format} gets from this"
                " manifest; check it, then give --overwrite to replace it"
            )
    for file, content in files:
        if file.outcome != "unchanged":
            # A file that appeared since the check is not replaced unasked.
            expected = ABSENT if file.outcome == "written" else None
            target.write(file.path, content, if_generation=expected)
    return [file for file, _ in files]


def lines(exported: Sequence[ExportedFile]) -> list[str]:
    """A line for each file."""
    return [
        f"{file.format}: {file.path}, {file.num_bytes:,} bytes, {file.outcome}" for file in exported
    ]


def _prefix(url: str, output: str, name: str) -> str:
    """The prefix that leads from the folder `output` to the tars of `url`; ConfigError if nothing
    that the format takes does.
    """
    if output == url:
        return ""
    if is_address(url) and name == "wids":
        return f"{url}/"
    if name in ("rfdetr", "openclip"):  # which have no paths
        raise ConfigError(f"{name} looks for the tars beside its file; leave --output out")
    if not (is_address(url) or is_address(output)):
        # a link's .. is its target's
        return os.path.relpath(os.path.realpath(url), os.path.realpath(output)) + "/"
    raise ConfigError(
        f"{name} takes relative paths to the tars, and none leads from {output} to {url}; leave"
        " --output out, or copy the set first"
    )


def _outcome(target: Storage, path: str, content: bytes) -> Outcome:
    """The effect of writing the file."""
    try:
        return "unchanged" if target.read(path) == content else "replaced"
    except NotFound:
        return "written"
