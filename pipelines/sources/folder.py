"""Class folders: `SPLIT/CLASS/file` or `CLASS/file`. A unit is a run of the sorted listing, with generations."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from pipelines.sources import paths
from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.classes import class_infos, missing_notes
from pipelines.sources.formats.spilled_list import Entry, SpilledList, SpilledUnits
from pipelines.sources.holdout import REST, Holdout
from pipelines.sources.paths import extension, is_hidden, is_text, printable, without_extension
from shardset.errors import ConfigError, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.naming import is_split
from shardset.storage.base import Storage

ENTRIES_PER_UNIT = 1_000

_LAYOUTS = "expected images as SPLIT/CLASS/file or CLASS/file"
_SPLIT_NAMES = {"train", "training", "test", "testing", "val", "valid", "validation"}


@dataclass(frozen=True)
class Folder:
    """Images in class folders below `input`; classes get labels in the order of their sorted names.

    `holdout` is for `CLASS/file` images; a key is the path without its extension.
    """

    input: Storage
    holdout: Holdout = field(default_factory=Holdout)
    entries_per_unit: int = ENTRIES_PER_UNIT

    name: ClassVar[str] = "folder"

    def survey(self) -> Survey:
        """Lists everything once. Ignores hidden files, and counts files that are not images in a note.

        Raises SourceError if there are no images, or images at different depths; ConfigError for a holdout where
        the folders already are splits.
        """
        listed = _listed(self.input)
        has_splits = self._has_splits(listed)
        names = sorted(listed.classes)
        labels = {name: label for label, name in enumerate(names)}
        rejected = [self._rejected(name, has_splits) for name in listed.unreadable]
        seen = {(self._split_of(name, has_splits), labels[_class_of(name)]) for name, *_ in listed.images}
        splits = {split for split, _ in seen}
        self._check_splits(splits, names)

        def unit_of(number: int, images: list[Entry]) -> Unit:
            entries = [
                [name, num_bytes, generation, labels[_class_of(name)], self._split_of(name, has_splits)]
                for name, num_bytes, generation in images
            ]
            return {"entries": entries, "rejected": [] if number else rejected}

        return Survey(
            units=SpilledUnits(listed.images, self.entries_per_unit, unit_of),
            classes=class_infos(names),
            notes=[*_note_others(listed.others), *self.holdout.empty_notes(splits), *missing_notes(seen, names)],
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """One sample for each image of the unit, pinned to the generation that the survey saw."""
        for name, split, reason in unit["rejected"]:
            yield Rejected(name=name, split=split, reason=reason)
        for name, num_bytes, generation, label, split in unit["entries"]:
            key, last = paths.split(name)
            image = FIELD_OF_EXTENSION[last.lower()]
            yield RawSample(
                name=name,
                key=key,
                split=split,
                label=label,
                image=image,
                fields={image: Extent(name, generation, 0, num_bytes)},
            )

    def _has_splits(self, listed: "_Listed") -> bool:
        where, examples = self.input.url, list(listed.depths.values())
        if not examples:
            files = f"only {_counts(listed.others)}" if listed.others else "no files"
            raise SourceError(f"{where}: {files} there; {_LAYOUTS} ({', '.join(FIELD_OF_EXTENSION)})")
        if len(examples) > 1:
            raise SourceError(
                f"{where}: images at different depths, such as {examples[0]} and {examples[1]}; {_LAYOUTS}, one of the "
                "two for all; move the others away or list the images in a CSV file (--source listing)"
            )
        [(depth, example)] = listed.depths.items()
        if depth not in (1, 2):
            raise SourceError(f"{where}: found images such as {example}; {_LAYOUTS}; name the folder above the classes")
        if depth == 2 and self.holdout:
            raise ConfigError(
                f"{where}: --holdout with folders that are splits already, such as {example}; leave --holdout out, or "
                "name one of the split folders as input"
            )
        return depth == 2

    def _split_of(self, name: str, has_splits: bool) -> str:
        return name.partition("/")[0] if has_splits else self.holdout.split_of(without_extension(name))

    def _rejected(self, name: str, has_splits: bool) -> list[str]:
        split = self._split_of(name, has_splits)
        return [printable(name), split if is_split(split) else REST, "the name is not valid UTF-8"]

    def _check_splits(self, splits: set[str], class_names: list[str]) -> None:
        for split in sorted(splits):
            if not is_split(split):
                raise SourceError(
                    f"{self.input.url}/{split}: this folder stands where a split is expected; rename it "
                    "to letters, digits, - and _ (at most 40, not plan)"
                )
        if class_names and _SPLIT_NAMES.issuperset(map(str.lower, class_names)):
            raise SourceError(
                f"{self.input.url}: the class folders are {', '.join(class_names)}, which look like splits; "
                f"{_LAYOUTS}; put the images into class folders or list them in a CSV file (--source listing)"
            )


@dataclass(frozen=True, slots=True)
class _Listed:
    """What is in a folder: name, bytes and generation of each image, other files by extension, one image per depth."""

    images: SpilledList = field(default_factory=SpilledList)
    classes: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    depths: dict[int, str] = field(default_factory=dict)


def _listed(storage: Storage) -> _Listed:
    listed = _Listed()
    for stat in storage.list():
        if is_hidden(stat.name):
            continue
        if extension(stat.name) not in FIELD_OF_EXTENSION:
            listed.others[printable(extension(stat.name))] += 1
            continue
        listed.depths.setdefault(stat.name.count("/"), printable(stat.name))
        if is_text(stat.name):
            listed.images.add([stat.name, stat.num_bytes, stat.generation])
            listed.classes.add(_class_of(stat.name))
        else:
            listed.unreadable.append(stat.name)
    return listed


def _class_of(name: str) -> str:
    """The name of the folder that an image is in, "" if it is in none."""
    return name.rpartition("/")[0].rpartition("/")[2]


def _counts(others: Counter[str]) -> str:
    each = ", ".join(f"{count} {'.' + name if name else 'without extension'}" for name, count in sorted(others.items()))
    return f"{others.total()} other files ({each})"


def _note_others(others: Counter[str]) -> Iterable[str]:
    if others:
        yield f"left out {_counts(others)}, which are no images by name"
