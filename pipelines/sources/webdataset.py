"""Existing WebDataset tars (PAX, GNU or USTAR), with all their fields."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import asdict

from pipelines.sources.base import RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.formats.tar_samples import samples_of
from pipelines.sources.objects import advice_in, is_hidden, is_text, printable
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.format.naming import MANIFEST, is_split
from shardset.storage.base import Stat, Storage
from shardset.storage.open import is_address, open_storage

MAX_EXPANDED = 100_000
DEFAULT_SPLIT = "train"

_NO_SPLIT = f"the names of some tars say no split: their samples go to split {DEFAULT_SPLIT}"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"[-_.]?\d*(-of-\d+)?\.tar$", re.ASCII)


def find_tars(url: str) -> tuple[Storage, tuple[str, ...]]:
    """The folder that an --input value means, and the tars that it names there; none if it names the folder itself.

    `gs://b/set` is a folder, and so is the manifest in it; `x.tar` is one tar; `x-{000..009}.tar`, `{a,b}.tar` and
    `x.tar::y.tar` are several. Raises ConfigError if they have no folder in common, SourceError if they are compressed.
    """
    urls = list(dict.fromkeys(one for part in url.split("::") for one in _expand(part)))
    for one in urls:
        _refuse_compressed(one)
    if len(urls) == 1 and not urls[0].endswith(".tar"):
        return open_storage(urls[0].removesuffix(f"/{MANIFEST}")), ()
    if odd := [one for one in urls if not one.endswith(".tar")]:
        raise ConfigError(f"{odd[0]}: expected a name that ends in .tar; list tars, or give one folder")
    folder = _common_folder(urls)
    return open_storage(folder or "."), tuple(one[len(folder) :].lstrip("/") for one in urls)


@dataclass(frozen=True, slots=True)
class WebDataset:
    """Tars of samples, which are adjacent members with the same key. One unit per tar.

    `tars` are names in the input folder; empty means all `*.tar` below it. The split is the first folder of a tar's
    path, or the tar's name without its number. The manifest of a shard set in the folder decides both, and names the
    classes.
    """

    input: Storage
    tars: tuple[str, ...] = ()

    name: ClassVar[str] = "webdataset"

    def survey(self) -> Survey:
        """The tars with their splits; raises SourceError naming those that are missing."""
        known = self.manifest()
        if known:
            tars = _known(self.input, known)
            splits = {shard.path: name for name, split in known.splits.items() for shard in split.shards}
        else:
            tars = _named(self.input, self.tars) if self.tars else _below(self.input)
            splits = {tar.name: _split_in(tar.name) for tar in tars}
        return Survey(
            units=[_unit(tar, splits[tar.name] or DEFAULT_SPLIT) for tar in tars],
            classes=(known.classes or None) if known else None,
            notes=[] if all(splits.values()) else [_NO_SPLIT],
            objects={tar.name: tar.num_bytes for tar in tars},
            all_tars=not known and not self.tars,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of one tar in its order; raises SourceError if the tar is damaged."""
        yield from samples_of(self.input, Stat(**unit["tar"]), unit["split"])

    def manifest(self) -> Manifest | None:
        """The manifest of the input folder if that is a shard set; None if it is not, or tars were named."""
        if self.tars or not any(stat.name == MANIFEST for stat in self.input.list(MANIFEST)):
            return None
        data = self.input.read(MANIFEST)
        where = f"{self.input.url}/{MANIFEST}"
        return manifests.opened(self.input, manifests.parse(data, where)) if _is_ours(data) else None


def _unit(tar: Stat, split: str) -> Unit:
    if not is_text(tar.name):
        raise SourceError(f"{printable(tar.name)}: the name of this tar is not valid UTF-8; rename it")
    if not is_split(split):
        raise SourceError(f"{tar.name}: {split!r} can't name a split (letters, digits, - and _, not plan); rename it")
    return {"tar": asdict(tar), "split": split}


def _split_in(tar: str) -> str:
    folder, _, rest = tar.partition("/")
    return folder if rest else _NUMBER.sub("", tar)


def _is_ours(data: bytes) -> bool:
    """Whether this is a manifest of ours or damaged, which parsing it then says."""
    try:
        head = json.loads(data)
    except (ValueError, RecursionError):
        return data.lstrip().startswith((b"{", b"["))
    return isinstance(head, dict) and head.get("kind") == manifests.KIND


def _below(storage: Storage) -> list[Stat]:
    stats = [stat for stat in storage.list() if not is_hidden(stat.name)]
    tars = [stat for stat in stats if stat.name.endswith(".tar")]
    if not tars:
        for stat in stats:
            _refuse_compressed(f"{storage.url}/{stat.name}")
        raise SourceError(
            f"{storage.url}: no *.tar below it ({len(stats)} other files); give the folder, a tar or a brace pattern"
            + advice_in(storage, "webdataset")
        )
    return tars


def _named(storage: Storage, names: Iterable[str]) -> list[Stat]:
    wanted = list(names)
    stats = {stat.name: stat for stat in storage.list(common_start(wanted))}
    if missing := [name for name in wanted if name not in stats]:
        first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise SourceError(
            f"{storage.url}: {len(missing)} of {len(wanted)} tars are missing: {first}; fetch them or correct --input, "
            "where {000..099} and {a,b} are patterns, and * and ? are not"
        )
    return [stats[name] for name in wanted]


def _known(storage: Storage, manifest: Manifest) -> list[Stat]:
    sizes = {shard.path: shard.num_bytes for split in manifest.splits.values() for shard in split.shards}
    tars = _named(storage, sizes)
    for tar in tars:
        if tar.num_bytes != sizes[tar.name]:
            raise SourceError(
                f"{storage.url}/{tar.name}: {tar.num_bytes} bytes, its manifest says {sizes[tar.name]}; "
                "fetch the shard set again"
            )
    return tars


def _refuse_compressed(url: str) -> None:
    if url.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise SourceError(f"{url}: a compressed tar can't be read by range; unpack it first, e.g. `gunzip {url}`")


def _expand(pattern: str) -> list[str]:
    """`a{1..2}{x,y}` as a1x, a1y, a2x, a2y; raises ConfigError for braces that say neither."""
    braces = _BRACES.search(pattern)
    if not braces:
        return [pattern]
    before, body, after = pattern[: braces.start()], braces[1], pattern[braces.end() :]
    choices: Sequence[int | str] = body.split(",")
    width = 0
    if numbers := _RANGE.fullmatch(body):
        choices = range(int(numbers[1]), int(numbers[2]) + 1)
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
    elif len(choices) == 1:
        raise ConfigError(f"{pattern}: {{{body}}} is neither a range {{000..009}} nor a list {{a,b}}")
    rests = _expand(after)
    if not 0 < len(choices) * len(rests) <= MAX_EXPANDED:
        raise ConfigError(
            f"{pattern}: {len(choices) * len(rests)} names, expected 1 to {MAX_EXPANDED}; give the folder instead"
        )
    return [before + str(choice).zfill(width) + rest for choice in choices for rest in rests]


def common_start(names: list[str]) -> str:
    """What all names begin with."""
    first, last = min(names), max(names)
    return next((first[:at] for at in range(len(first)) if first[at] != last[at : at + 1]), first)


def _common_folder(urls: list[str]) -> str:
    folder, slash, _ = common_start(urls).rpartition("/")
    remote = any(map(is_address, urls))
    if (remote and not is_address(folder)) or (not slash and any(url.startswith("/") for url in urls)):
        raise ConfigError(f"{urls[0]} and {urls[-1]} have no folder in common; build them one by one")
    return folder or slash
