"""Existing WebDataset tars (PAX, GNU or USTAR), with all their fields."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from posixpath import commonprefix
from tarfile import TarInfo
from typing import Any, BinaryIO, NamedTuple

from msgspec.structs import asdict

from pipelines.holdout import REST
from pipelines.sources.base import (
    APART,
    HIDDEN,
    Extent,
    RawSample,
    Rejected,
    Spool,
    Survey,
    Unit,
)
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.tar import (
    header_window,
    located,
    read_member,
    reject_reason,
    walk,
)
from pipelines.sources.objects import advice_in, is_hidden, refuse_missing_parts, refuse_odd_name
from shardset.errors import ConfigError, SourceError
from shardset.format import manifest as manifests
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.labels import MAX_LABEL, NO_LABEL, plain_label
from shardset.format.naming import MANIFEST, is_field, split_member
from shardset.program import count, some_of
from shardset.storage.base import Stat, Storage, stat_or_none
from shardset.storage.open import is_absolute, is_address, open_storage

MAX_EXPANDED = 100_000
LABEL_FIELDS = ("cls", "label", "json")
MAX_INLINE_BYTES = 4096
"""A field of up to this size may be kept in memory."""

_READ_BYTES = dict.fromkeys((*LABEL_FIELDS, "txt"), MAX_INLINE_BYTES) | {"json": 1 << 20}
"""Fields that are read if they are no larger; a json may have the label."""

LOOKED_FOR = (
    "a whole number in cls or label, or under label or cls in json; give the field with the labels"
    " such a name; if folders in the tars are classes, unpack the tars and use --source folder"
)
_NO_SPLIT = f"the names of some tars say no split: their samples go to split {REST}"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"[-_.]?\d*(-of-\d+)?\.tar$", re.ASCII)


def find_tars(url: str) -> tuple[Storage, tuple[str, ...]]:
    """The folder that an --input value means, and the tars that it names there; none if it names
    the folder itself.

    `gs://b/set` is a folder; `x.tar` is one tar; `x-{000..009}.tar`,
    `{a,b}.tar` and `x.tar::y.tar` are several. Raises ConfigError if they have no folder in common,
    SourceError if they are compressed.
    """
    urls = list(dict.fromkeys(name for part in url.split("::") for name in _expand(part)))
    for name in urls:
        _refuse_compressed(name)
        if len(urls) > 1 and not name.endswith(".tar"):
            raise ConfigError(
                f"{name}: expected a name that ends in .tar; list tars, or give one folder"
            )
    if not urls[0].endswith(".tar"):
        return open_storage(urls[0]), ()
    prefix = commonprefix(urls)
    folder = prefix[: prefix.rfind("/") + 1]
    is_remote = any(map(is_address, urls))
    if any(map(is_absolute, urls)) and (is_remote > is_address(folder.rstrip("/")) or not folder):
        raise ConfigError(
            f"{urls[0]} and {urls[-1]} have no folder in common; build them one by one"
        )
    return open_storage(folder or "."), tuple(name.removeprefix(folder) for name in urls)


@dataclass(frozen=True, slots=True)
class WebDataset:
    """Tars of samples, which are adjacent members with the same key. One unit per tar.

    `tars` are names in the input folder; empty means all `*.tar` below it. The split is the first
    folder of a tar's path, or the tar's name without its number. Raises ConfigError for the folder
    of a shard set.
    """

    input: Storage
    tars: tuple[str, ...] = ()
    allow_missing_parts: bool = False

    def survey(self) -> Survey:
        """The tars with their splits; raises SourceError naming those that are missing."""
        if not self.tars and stat_or_none(self.input, MANIFEST):
            _refuse_shard_set(self.input)
        tars = (
            tars_named(self.input, self.tars)
            if self.tars
            else tars_below(self.input, self.allow_missing_parts)
        )
        for tar in tars:
            refuse_odd_name(self.input, tar.name)
        splits = {tar.name: split_in(tar.name) for tar in tars}
        return Survey(
            units=[{"tar": asdict(tar), "split": splits[tar.name] or REST} for tar in tars],
            classes=None,
            splits={split or REST for split in splits.values()},
            notes=[] if all(splits.values()) else [_NO_SPLIT],
            objects={tar.name: tar.num_bytes for tar in tars},
            all_tars=not self.tars,
            looked_for=LOOKED_FOR,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of one tar in its order; raises SourceError if the tar is damaged."""
        yield from samples_of(self.input, Stat(**unit["tar"]), unit["split"], spool)


def split_in(tar: str) -> str:
    """The split that the path of a tar says: its first folder, or its name without its number; ""
    if neither does.
    """
    folder, _, rest = tar.partition("/")
    return folder if rest else _NUMBER.sub("", tar)


def _refuse_shard_set(storage: Storage) -> None:
    if f'"{manifests.KIND}"'.encode() in storage.read(MANIFEST):
        raise ConfigError(
            f"{storage.url}: a shard set, whose manifest lists its samples; read it by --source"
            " shardset"
        )


def tars_below(storage: Storage, allow_missing_parts: bool) -> list[Stat]:
    """All tars in a folder; SourceError if there is none, or one is missing by the names of others,
    if these are not enough.
    """
    stats = [stat for stat in storage.list() if not is_hidden(stat.name)]
    tars = [stat for stat in stats if stat.name.endswith(".tar")]
    if not tars:
        for stat in stats:
            _refuse_compressed(f"{storage.url}/{stat.name}")
        raise SourceError(
            f"{storage.url}: no *.tar below it ({count(len(stats), 'other file')}); give the"
            " folder, a tar or a brace pattern" + advice_in(storage, "webdataset")
        )
    if not allow_missing_parts:
        refuse_missing_parts(storage, [tar.name for tar in tars])
    return tars


def tars_named(storage: Storage, names: Iterable[str]) -> list[Stat]:
    """The tars of these names; SourceError for those that are missing."""
    wanted = list(names)
    stats = {stat.name: stat for stat in storage.list(commonprefix(wanted))}
    if missing := [name for name in wanted if name not in stats]:
        raise SourceError(
            f"{storage.url}: {len(missing)} of {len(wanted)} tars are missing:"
            f" {some_of(missing, 5)}; fetch them or correct --input, where {{000..099}} and {{a,b}}"
            " are patterns, and * and ? are not"
        )
    return [stats[name] for name in wanted]


def _refuse_compressed(url: str) -> None:
    if url.endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise SourceError(
            f"{url}: a compressed tar can't be read by range; unpack it first, e.g. `gunzip {url}`"
        )


def _expand(pattern: str) -> Iterator[str]:
    """`a{1..2}{x,y}` as a1x, a1y, a2x, a2y; raises ConfigError for braces that say neither."""
    parts = _BRACES.split(pattern)  # texts, and between them the bodies of braces
    choices = [_choices(part, pattern) if at % 2 else [part] for at, part in enumerate(parts)]
    if not 0 < math.prod(map(len, choices)) <= MAX_EXPANDED:
        raise ConfigError(
            f"{pattern}: none or too many names, expected 1 to {MAX_EXPANDED}; give the folder"
            " instead"
        )
    return map("".join, product(*choices))


def _choices(body: str, pattern: str) -> list[str]:
    if numbers := _RANGE.fullmatch(body):
        first, last = map(int, numbers.groups())
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        # with one too many for those that are refused anyway
        last = min(last, first + MAX_EXPANDED)
        return [str(number).zfill(width) for number in range(first, last + 1)]
    if "," in body:
        return body.split(",")
    raise ConfigError(
        f"{pattern}: {{{body}}} is neither a range {{000..009}} nor a list {{a,b}}; a folder can't"
        " be called so: rename it"
    )


# The samples of a tar: adjacent members with the same key. Short texts come along; images stay
# where they are.


NOWHERE = Extent("", "", 0, 0)


class TarGroupMember(NamedTuple):
    """A member of a tar: where its content is, and the content if it decides on the sample.

    The CRC32C is UNREAD where the walk does not read the bytes.
    """

    name: str
    field: str
    reason: str | None
    content: bytes | None
    extent: Extent = NOWHERE


def samples_of(
    storage: Storage, tar: Stat, split: str, spool: Spool
) -> Iterator[RawSample | Rejected]:
    """The samples of a tar in its order, then its members without a key; SourceError if it is
    damaged.

    A sample whose key comes again is replaced at the end.
    """
    left_out, replaced = list[Rejected](), dict[str, Rejected]()
    firsts = dict[str, Rejected | None]()

    def rejected(member: TarGroupMember, reason: str, replaces: str = "") -> Rejected:
        return Rejected(
            name=f"{tar.name}/{member.name}",
            split=split,
            reason=reason,
            extent=None if member.reason else member.extent,
            replaces=replaces,
        )

    with RangeFile(storage, tar, header_window(storage)) as file:
        read = partial(_read, storage, tar, file, spool)
        infos = walk(file, f"{storage.url}/{tar.name}")
        for key, group in grouped(
            infos, lambda info, why: left_out.append(rejected(read(info), why))
        ):
            members = [*map(read, group)]
            label = APART if key in firsts else label_of(members)
            if isinstance(label, int):
                firsts[key] = rejected(members[0], APART, f"{tar.name}/{key}")
                yield tar_sample(tar.name, split, key, label, dict(map(_stored, members)))
            else:
                if first := firsts.setdefault(key):
                    replaced[key] = first
                yield rejected(members[0], label)
    yield from replaced.values()
    yield from left_out


def grouped(
    infos: Iterable[TarInfo], leave_out: Callable[[TarInfo, str], None]
) -> Iterator[tuple[str, Iterator[TarInfo]]]:
    """Neighbours with the same key.

    A member without one ends no sample: `leave_out` gets it, and why.
    """

    def is_in_a_sample(info: TarInfo) -> bool:
        key, field = split_member(info.name)
        if not key or key[-1] == "/":
            leave_out(info, HIDDEN)
        elif not field:
            leave_out(info, "has no dot in its name, so no field")
        else:
            return True
        return False

    return groupby(filter(is_in_a_sample, infos), lambda info: split_member(info.name)[0])


def _read(
    storage: Storage, tar: Stat, file: BinaryIO, spool: Spool, info: TarInfo
) -> TarGroupMember:
    """The member of a header that the walk has just given: the window of the file still holds what
    follows.
    """
    reason, field = reject_reason(info), split_member(info.name)[1].lower()
    is_kept = not reason and info.size <= _READ_BYTES.get(field, -1)
    extent, content = located(file, storage, tar, info, spool)
    if is_kept and not content:
        content = read_member(file, info)
    return TarGroupMember(
        name=info.name,
        field=field,
        reason=reason,
        extent=extent,
        content=content if is_kept else None,
    )


def _stored(member: TarGroupMember) -> tuple[str, Extent | bytes]:
    """The field of a member, and what a sample has in it: short texts as bytes."""
    content = member.content
    if content is None or len(content) > MAX_INLINE_BYTES:
        return member.field, member.extent
    return member.field, content


def tar_sample(
    tar: str, split: str, key: str, label: int, fields: dict[str, Extent | bytes]
) -> RawSample:
    """The sample of a tar with these fields, whose `cls` becomes the label, without white space and
    leading zeros.
    """
    if "cls" in fields and label >= 0:
        fields["cls"] = b"%d" % label
    elif "cls" in fields:
        del fields["cls"]
    image = next((field for field in fields if field in FIELD_OF_EXTENSION), "")
    name = f"{tar}/{key}"
    return RawSample(name=name, key=key, split=split, label=label, image=image, fields=fields)


def label_of(members: Sequence[TarGroupMember]) -> int | str:
    """The label of a sample, NO_LABEL if it has none; or why these members can't be a sample.

    The label is in `cls`, else in `label`, else in `json`.
    """
    for member in members:
        if member.reason:
            return f"member {member.name!r} {member.reason}"
        if not is_field(member.field):
            return f"{member.field!r} can't be a field name (lower-case ASCII, at most 16 bytes)"
    names = [member.field for member in members]
    by_name = dict(zip(names, members, strict=True))
    if len(by_name) != len(names):
        return f"has the field {max(names, key=names.count)!r} twice"
    cls, label_field, metadata = map(by_name.get, LABEL_FIELDS)
    if cls:
        label = plain_label(cls.content)
        if label is None or not NO_LABEL <= label <= MAX_LABEL:
            return (
                f"cls is {(cls.content or b'...')[:40]!r}, expected a label from 0 to {MAX_LABEL}"
            )
        if label == NO_LABEL and len(names) == 1:
            return "has only a cls of -1, which says that there is no label"
        return label
    value: Any = None
    if metadata and metadata.content is not None:
        try:
            value = json.loads(metadata.content)
        except (ValueError, RecursionError) as error:
            return f"json can't be parsed ({error})"
    named = map(value.get, ("label", "cls")) if isinstance(value, dict) else ()
    labels = map(plain_label, (label_field and label_field.content, *named))
    return next(
        (label for label in labels if label is not None and 0 <= label <= MAX_LABEL), NO_LABEL
    )
