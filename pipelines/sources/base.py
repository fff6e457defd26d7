"""The interface of a source of raw samples: a survey on the launching machine, then an index of
each unit on a worker.

A source never touches Beam, never decodes an image and never decides where a sample goes.
`docs/dev/sources.md` shows how to write one.

Records that are made once per sample are msgspec.Structs: a frozen dataclass takes six times as
long to make.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from shardset.errors import ConfigError
from shardset.format.manifest import ClassInfo
from shardset.storage.base import Storage

Unit = dict[str, Any]
"""One piece of raw input that a worker indexes alone: JSON-able, understood by its source only.

A batch file, an inner tar, a chunk of a sorted listing; aim at 1,000 to 20,000 samples.
"""

APART = (
    "its key is in this tar more than once, with others between, so each may be half of a sample; "
    "pack the tar again with tar --sort=name"
)
"""The reason of samples whose members are not next to each other."""

HIDDEN = "has no key before its first dot"
"""The reason of hidden members of a tar, such as `._0001.png` of macOS: listed, but no bad samples.
"""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """The bytes [offset, offset + num_bytes) of one generation of one object.

    `object` is a name in the input folder, an absolute URL or path, or SPOOL for the unit's own
    spool. `crc32c` covers the bytes, or is UNREAD until the source or the build has read them.
    """

    object: str
    generation: str
    offset: int
    num_bytes: int
    crc32c: int = -1


UNREAD = -1
"""`Extent.crc32c` of bytes that have not been read yet: they can't be compared."""


SPOOL = ""
"""`Extent.object` of bytes that the source added to its spool."""


class RawSample(msgspec.Struct, frozen=True, kw_only=True):
    """One raw sample: what it is called, what it is, and where its bytes are.

    `name` is the original name as a user knows it. `key` is the wanted key; the build replaces it
    by a short stable one if it is not valid or not unique. `fields` maps an extension to content,
    in member order. `image` names the field with the image, "" if there is none; the build corrects
    the extension by content. `label` is -1 if there is none; the build adds the `cls` field unless
    `fields` already has one.

    `drawn_by` decides on a holdout in place of the key, if that depends on the place of the input.
    """

    name: str
    key: str
    split: str
    label: int
    image: str
    fields: dict[str, Extent | bytes]
    drawn_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Something that can't become a sample: its name, the reason, and where its bytes are, if they
    can be located.

    `replaces` names an earlier sample of the unit that this stands for, "" if there is none.
    """

    name: str
    split: str
    reason: str
    extent: Extent | None = None
    replaces: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The facts that a source knows without reading samples.

    `units` are in order, and may be iterated over again. `classes` is None if only the samples
    tell; labels are then 0 to the largest one seen. `notes` are sentences for the user and the
    manifest ("no validation archive: only split train").
    `objects` maps the names of the input objects, in order, to their sizes in bytes; it is empty
    where they are many. `num_bytes` is the size of the samples where `objects` do not hold them.
    `all_tars` says that the input is every tar below the folder, including one that is written
    there later. `looked_for` says in words where labels are expected, for a note on samples without
    one. `refusal` says why a new set can't have the labels, "" if it can. `splits` are those that
    the input tells; a holdout divides one.
    """

    units: Iterable[Unit]
    classes: list[ClassInfo] | None
    splits: Collection[str]
    notes: list[str] = field(default_factory=list)
    objects: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    all_tars: bool = False
    looked_for: str = ""
    refusal: str = ""


class Spool(Protocol):
    """Takes the bytes of samples that a source reads."""

    def add(self, content: bytes) -> Extent:
        """Stores bytes that can't be read by range from the input (compressed archives, arrays).

        Returns where they will be; the extent has `object == SPOOL`.
        """
        ...

    def show(self, extent: Extent, content: bytes) -> None:
        """Passes on what the source has read of the input on its way, so that the build need not
        read it to examine the next sample.
        """
        ...


class Source(Protocol):
    """A raw format.

    Instances are frozen, can be pickled, and hold the input's Storage and the format's options.
    """

    @property
    def input(self) -> Storage:
        """The folder of the extents' objects."""
        ...

    def survey(self) -> Survey:
        """Runs once, on the launching machine. Lists, opens small files, reads no sample.

        Raises SourceError if something is missing, saying what is there, what was expected and what
        to do.
        """
        ...

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """Runs on a worker, possibly twice: the same unit gives the same samples in the same order.

        Raises SourceError if the unit as a whole can't be read (a truncated archive).
        """
        ...


def class_infos(names: Sequence[str]) -> list[ClassInfo]:
    """The classes of these names, labels from 0."""
    return [ClassInfo(label=label, name=name) for label, name in enumerate(names)]


def joined_classes(
    old: Sequence[ClassInfo], new: Sequence[ClassInfo]
) -> tuple[list[ClassInfo], list[int], dict[int, int]]:
    """The classes of two inputs together, and for the second one the label of each class and the
    id of each category there.

    Classes are the same if their wnids are, or else their names where one has no wnid; further ones
    follow. Several categories of one name are the same in their order, if both inputs have as many.
    A category keeps the id of the first input; a further one whose id is taken gets a free one.
    Raises ConfigError if names do not tell.
    """
    classes, labels, ids = [*old], list[int](), dict[int, int]()
    by_wnid = {info.wnid or "": [info.label] for info in old if info.wnid}
    by_name = defaultdict[str, list[ClassInfo]](list)
    for info in old:
        by_name[info.name].append(info)
    numbers, seen = Counter(info.name for info in new), Counter[str]()
    used = {info.category_id for info in old} - {None}
    for info in new:
        named = [other.label for other in by_name[info.name] if not (other.wnid and info.wnid)]
        same, category = by_wnid.get(info.wnid or "", named), info.category_id
        if same and len(same) != (1 if category is None else numbers[info.name]):
            raise ConfigError(
                f"classes {same} of the set are all called {info.name!r}; give the input their"
                " wnids, or the same categories"
            )
        label = same[min(seen[info.name], len(same) - 1)] if same else len(classes)
        seen[info.name] += 1
        if not same:
            if category is not None and category in used:
                category = 1 + max(other.category_id or 0 for other in (*classes, *new))
            used.add(category)
            classes.append(msgspec.structs.replace(info, label=label, category_id=category))
        labels.append(label)
        if info.category_id is not None:
            if (stored_id := classes[label].category_id) is None:
                raise ConfigError(
                    f"class {info.name!r} of the set has no category id, and in the input"
                    f" {info.category_id}; build the set again by --source coco"
                )
            ids[info.category_id] = stored_id
    return classes, labels, ids
