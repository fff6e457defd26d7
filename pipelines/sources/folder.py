"""Class folders: `SPLIT/CLASS/.../file` or `CLASS/.../file`.

A unit is a run of the sorted listing.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from glob import glob
from itertools import zip_longest

from pipelines.holdout import REST
from pipelines.sources import objects
from pipelines.sources.base import (
    Extent,
    RawSample,
    Rejected,
    Spool,
    Survey,
    Unit,
    class_infos,
)
from pipelines.sources.formats.spilled_list import Entry, SpilledList, spilled_units
from shardset.errors import DOCS, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.labels import class_name
from shardset.program import count, some_of
from shardset.storage.base import Stat, Storage

ENTRIES_PER_UNIT = 1_000

_LAYOUTS = "expected images as SPLIT/CLASS/file or CLASS/file, with any folders below CLASS"
_SPLIT_NAME = re.compile(
    r"(train|training|val|valid|validation|dev|test|testing|eval|evaluation|fold|split)[-_]?\d*",
    re.I | re.A,
)
_HEAD_BYTES = 1024
_MAX_TYPES = 12
"""A message lists at most this many types of files."""


@dataclass(frozen=True)
class Folder:
    """Images in class folders below `input`; classes get labels in the order of their sorted names.

    An image is of the class that the first `class_depth` folders below its split name, however deep
    it is: with 1 the first folder, as in torchvision's ImageFolder. The first folders are
    splits if one of them is named like a split and holds no images directly. A key is the path
    without its extension.
    """

    input: Storage
    class_depth: int = 1
    entries_per_unit: int = ENTRIES_PER_UNIT

    def survey(self) -> Survey:
        """Lists everything once.

        Notes count hidden files, files that are not images, and images in no class folder.

        Raises SourceError if no image is in a class folder, or folders of classes and splits seem
        to be mixed up.
        """
        listed, where = _listed(self.input), self.input.url
        if not listed.folders:
            files = f"only {_counts(listed.others)}" if listed.others else "no files there"
            raise SourceError(
                f"{where}: {files}; {_LAYOUTS} ({', '.join(FIELD_OF_EXTENSION)}){self._advice}"
            )
        tops = {folder.partition("/")[0] for folder in listed.folders} - {*listed.folders}
        layout = _Layout(any(map(_SPLIT_NAME.fullmatch, tops)), self.class_depth)
        classes = {folder: layout.class_of(folder) for folder in listed.folders}
        labels = {name: label for label, name in enumerate(sorted({*classes.values()} - {""}))}
        self._refuse_folders(layout, listed, labels)
        seen: Counter[tuple[str, str]] = Counter()

        def entries() -> Iterator[Entry]:
            for name, num_bytes, generation in listed.images:
                if folder_class := classes[_folder_of(name)]:
                    split = layout.split_of(name)
                    seen[split, folder_class] += 1
                    yield [name, num_bytes, generation, labels[folder_class], split]

        units = spilled_units(entries(), self.entries_per_unit)
        _refuse_other_classes(where, seen)
        notes = [*_others_notes(listed)]
        if loose := [listed.folders[folder] for folder in classes if not classes[folder]]:
            number = len(listed.images) - seen.total()
            notes.append(f"left out {number} images in no class folder, such as {loose[0]}")
        notes += layout.nesting_notes(listed.folders)
        folders = glob("*/" * layout.num_folders, root_dir=where)
        if empty := {layout.class_of(folder.rstrip("/")) for folder in folders} - labels.keys():
            notes.append(
                f"no image in {count(len(empty), 'class folder')}: {some_of(sorted(empty), 5)}"
            )
        if len(labels) == 1 and (advice := self._advice):
            notes.append(f"{next(iter(labels))} is the only class{advice}")
        return Survey(
            units=units,
            classes=class_infos([*labels]),
            splits={split for split, _ in seen},
            notes=notes,
            num_bytes=listed.num_bytes,
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """One sample for each image of the unit, pinned to the generation that the survey saw."""
        for name, num_bytes, generation, label, split in unit["entries"]:
            yield objects.image_sample(
                name,
                objects.without_extension(name),
                split=split,
                label=label,
                content=Extent(name, generation, 0, num_bytes),
            )

    @property
    def _advice(self) -> str:
        return objects.advice_in(self.input, "folder")

    def _refuse_folders(
        self, layout: "_Layout", listed: "_Listed", labels: Collection[str]
    ) -> None:
        """Raises SourceError if no image is in a class folder, classes and splits seem to be mixed
        up, or a class folder has no image by the names, but files that are no text.
        """
        where = self.input.url
        if not labels:
            flat = f"; images whose names hold the labels: see {DOCS}/how-to/migrate.md"
            raise SourceError(
                f"{where}: found images such as {listed.folders[min(listed.folders)]}; {_LAYOUTS};"
                f" name the folder above the classes{self._advice or flat}"
            )
        kept = set(map(layout.class_folder, listed.folders))
        for (folder, _), stat in listed.firsts.items():
            lost = layout.class_folder(folder)
            if lost not in kept and layout.class_of(folder) and _is_binary(self.input, stat):
                raise SourceError(
                    f"{where}/{lost}: this class has no image by its name, but files such as"
                    f" {objects.printable(stat.name)}; convert them, rename them if they are of a"
                    f" format that is read ({', '.join(FIELD_OF_EXTENSION)}), or move the folder"
                    " out of the input"
                )
        paths = [folder.split("/") for folder in listed.folders if folder]
        for depth, names in enumerate([] if layout.has_splits else zip_longest(*paths)):
            folders = {*names} - {None}
            splits = set(filter(_SPLIT_NAME.fullmatch, folders))
            if splits == folders or len(splits) > 1:
                what = "folders below the classes" if depth else "class folders"
                raise SourceError(
                    f"{where}: the {what} look like splits, such as {min(splits)}; {_LAYOUTS}; name"
                    " the folder with the splits as input, move the splits above the classes, or"
                    f" list the images in a CSV file (--source listing){self._advice}"
                )


@dataclass(frozen=True, slots=True)
class _Layout:
    """The meaning of the folders on an image's path."""

    has_splits: bool
    class_depth: int

    @property
    def num_folders(self) -> int:
        """The number of folders on a path that name split and class."""
        return self.has_splits + self.class_depth

    def class_folder(self, path: str) -> str:
        """The folder of the class, below its split, that a path is in."""
        return "/".join(path.split("/")[: self.num_folders])

    def class_of(self, folder: str) -> str:
        """The class of the images directly in a folder, "" if it is not below a class."""
        return class_name("/".join(folder.split("/")[self.has_splits :][: self.class_depth]))

    def split_of(self, name: str) -> str:
        """The split of an image."""
        return name.partition("/")[0] if self.has_splits else REST

    def nesting_notes(self, folders: Iterable[str]) -> Iterator[str]:
        """A sentence on images in folders below the one that names their class."""
        deep = sorted(folder for folder in folders if folder.count("/") >= self.num_folders)
        if deep:
            yield (
                f"images in folders below a class folder are of its class: those in {deep[0]} of"
                f" class {self.class_of(deep[0])}; --class-depth {self.class_depth + 1} makes"
                " classes of deeper folders"
            )


@dataclass(slots=True)
class _Listed:
    """The content of a folder: name, bytes and generation of each image, one image of each folder,
    other files by type.

    `firsts` has the first of the other files of each folder and type.
    """

    images: SpilledList = field(default_factory=SpilledList)
    folders: dict[str, str] = field(default_factory=dict)
    others: Counter[str] = field(default_factory=Counter)
    firsts: dict[tuple[str, str], Stat] = field(default_factory=dict)
    num_bytes: int = 0
    num_hidden: int = 0


def _listed(storage: Storage) -> _Listed:
    listed = _Listed()

    for stat in storage.list():
        if objects.is_hidden(stat.name):
            listed.num_hidden += 1
        elif (kind := objects.extension(stat.name)) not in FIELD_OF_EXTENSION:
            listed.others[objects.printable(kind)] += 1
            listed.firsts.setdefault((_folder_of(stat.name), kind), stat)
        else:
            objects.refuse_odd_name(storage, stat.name)
            listed.images.add([stat.name, stat.num_bytes, stat.generation])
            listed.num_bytes += stat.num_bytes
            listed.folders.setdefault(_folder_of(stat.name), stat.name)
    return listed


def _refuse_other_classes(where: str, seen: Iterable[tuple[str, str]]) -> None:
    """Raises SourceError for a split without any class of the split for training."""
    by_split = defaultdict[str, set[str]](set)
    for split, name in seen:
        by_split[split].add(name)
    train = next((names for split, names in by_split.items() if split.lower()[:5] == REST), set())
    for split, names in by_split.items():
        if train and train.isdisjoint(names):
            raise SourceError(
                f"{where}: no class of split {split} ({some_of(sorted(names), 3)}) is one of"
                f" training ({some_of(sorted(train), 3)}); list all images with their labels and"
                " splits in a CSV file (--source listing)"
            )


def _folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def _is_binary(storage: Storage, stat: Stat) -> bool:
    """Whether a file isn't text, by its first bytes; an SVG is a drawing."""
    head = storage.read(stat.name, 0, min(_HEAD_BYTES, stat.num_bytes), generation=stat.generation)
    return b"\0" in head or b"<svg" in head


def _others_notes(listed: _Listed) -> Iterator[str]:
    if listed.others:
        yield (
            f"skipped {_counts(listed.others)}, such as"
            f" {objects.printable(next(iter(listed.firsts.values())).name)}"
        )
    if listed.num_hidden:
        yield f"skipped {count(listed.num_hidden, 'hidden file')}"


def _counts(others: Counter[str]) -> str:
    each = [
        f"{number} {'.' + name if name else 'without extension'}"
        for name, number in sorted(others.items())
    ]
    return f"{count(others.total(), 'non-image file')} ({some_of(each, _MAX_TYPES)})"
