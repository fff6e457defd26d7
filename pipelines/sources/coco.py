"""Object detection as COCO's `instances` files have it: images, with their annotations in `json`.

A file is read once, from start to end, and may have many GB. Its annotations come in any order, so
they are divided among temporary files, each of which fits the memory.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from pipelines.holdout import REST
from pipelines.sources.base import Survey, joined_classes
from pipelines.sources.formats.json_arrays import elements
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.spilled_list import SpilledList
from pipelines.sources.listing import Listed, Listing, check_path
from pipelines.sources.objects import key_of
from shardset.errors import BadTarget, ConfigError, SourceError
from shardset.format.annotations import Annotation, CategoryId, box_of
from shardset.format.labels import NO_LABEL, class_name
from shardset.format.manifest import ClassInfo
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import join
from shardset.storage.open import is_absolute, open_file, open_storage

T = TypeVar("T")

PART_BYTES = 64 << 20

_SHOWN = "id", "image_id", "category_id", "bbox", "name"
"""What a note shows of an annotation or a category."""

_NUM_SHOWN = 3


@prepared
class _Listed(Annotation, kw_only=True):
    image_id: int | str


@prepared
class _Image(msgspec.Struct):
    image_id: int | str = msgspec.field(name="id")
    file_name: str | None = None
    coco_url: str = ""
    width: Any = None
    height: Any = None

    def path(self, split: str) -> str:
        """The path below the input. LVIS has no names: its URLs end with folder and file."""
        if not self.file_name:
            return "/".join(self.coco_url.split("/")[-2:])
        return self.file_name if is_absolute(self.file_name) else join(split, self.file_name)


@prepared
class _Category(msgspec.Struct):
    id: CategoryId
    name: str
    supercategory: str | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether another category groups it; "none" is written for no group."""
        return self.supercategory not in (self.name, "none", "null")


_KINDS: dict[str, type[_Image | _Listed | _Category]] = {
    "images": _Image,
    "annotations": _Listed,
    "categories": _Category,
}


@dataclass(frozen=True)
class Coco(Listing):
    """The images of COCO files, each with its annotations as `json`.

    `annotations` names the file of each split; a name in it is relative to the folder of the split
    in `input`, or absolute. The file of "" is of images right below `input`. `masks` is a folder
    with a PNG for each image, at its place below `input`. Classes are the categories by their ids,
    and samples have no label. A category is the same in all files if its name is; annotations get
    the id that it has in the first one.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    masks: str | None = None
    entries_per_unit: int = 250

    def listed(self) -> Listed:
        """The images; what is odd about annotations is counted in notes.

        Raises SourceError if an image can't be read, or no annotation of a file can be used.
        """
        if not self.annotations:
            raise ConfigError("--source coco needs --annotations FILE, or SPLIT=FILE,SPLIT=FILE")
        rows, classes, notes = SpilledList(), list[ClassInfo](), list[str]()
        groups, used = set[str | None](), set[int | None]()
        masks = self.masks and open_storage(self.masks).url
        for split, path in self.annotations.items():
            file = _File(path, split, classes)
            for name, extra in file.images():
                key = key_of(name)
                files = {"mask.png": f"{masks}/{key}.png"} if masks else {}
                rows.add([name, NO_LABEL, split or REST, key, extra, files])
            classes = file.classes
            notes += file.notes()
            groups |= file.groups
            used |= file.used
        classes.sort(key=lambda info: info.category_id or 0)
        numbered = [
            msgspec.structs.replace(
                info, label=label, is_group=info.name in groups and info.category_id not in used
            )
            for label, info in enumerate(classes)
        ]
        return rows, Survey(units=(), classes=numbered, splits=(), notes=notes)


class _File:
    """A COCO file; `classes` are those of the files before it, and later its own, too."""

    def __init__(self, path: str, split: str, classes: list[ClassInfo]) -> None:
        self.path, self.split, self.classes = path, split, classes
        self.groups, self.used = set[str | None](), set[int | None]()
        """The names that other categories have as theirs, and the ids that annotations have."""
        self._ids = dict[int, int]()
        """The id of each category of the file in the set."""
        self._counts, self._shown = Counter[str](), defaultdict[str, list[str]](list)
        self._num_annotations = self._num_kept = 0

    def images(self) -> Iterator[tuple[str, str]]:
        """The path of each image, and its `json`."""
        parts, categories = self._divided()
        file_classes = [
            ClassInfo(label=label, name=class_name(category.name), category_id=number)
            for label, (number, category) in enumerate(sorted(categories.items()))
        ]
        self.groups = {each.supercategory for each in categories.values() if each.is_grouped}
        self.classes, _, self._ids = joined_classes(self.classes, file_classes)
        for part in parts:
            entries = defaultdict[str, list[list[str]]](list)
            for image, *entry in part:
                entries[image].append(entry)
            for image, pairs in entries.items():
                heads = [(path, text) for path, text in pairs if path]
                texts = [text for path, text in pairs if not path]
                if not heads:
                    for text in texts:
                        self._tell("annotations left out, of images that are not listed", text)
                    continue
                if len(heads) > 1:
                    raise SourceError(
                        f"{self.path}: {len(heads)} images have the id {image}, expected one"
                    )
                [(path, head)] = heads
                kept = ",".join(filter(None, map(self._kept, texts)))
                yield path, f'{head[:-1]},"annotations":[{kept}]}}'
        if self._num_annotations and not self._num_kept:
            raise SourceError(f"{self.path}: no annotation can be used; {'; '.join(self.notes())}")

    def notes(self) -> list[str]:
        """A sentence for each kind of odd entries; the same wherever the file is."""
        name = self.path.rpartition("/")[2]
        return [
            f"{name}: {what}: {number:,}, such as {'; '.join(self._shown[what])}"
            for what, number in self._counts.items()
        ]

    def _tell(self, what: str, text: str) -> None:
        self._counts[what] += 1
        if self._counts[what] <= _NUM_SHOWN:
            entry = json.loads(text)
            if isinstance(entry, dict):
                entry = {name: entry[name] for name in _SHOWN if name in entry}
            self._shown[what].append(f"{json.dumps(entry):.120}")

    def _divided(self) -> tuple[list[SpilledList], dict[int, _Category]]:
        """Parts of the file, each with all entries of some images, and the categories."""
        storage, name = open_file(self.path)
        stat = storage.stat(name)
        num_parts = 1 + stat.num_bytes // PART_BYTES
        parts = [SpilledList() for _ in range(num_parts)]
        categories = dict[int, _Category]()
        for section, text in elements(RangeFile(storage, stat), self.path):
            if section not in _KINDS or text == "null":
                continue
            self._num_annotations += section == "annotations"
            try:
                entry, text = _decoded(text, _KINDS[section])
            except JSON_ERRORS as error:
                if section == "images":
                    raise SourceError(
                        f"{self.path}: an image without id or file_name: {text:.80} ({error})"
                    ) from error
                self._tell(f"{section} left out, not as COCO has them", text)
                continue
            if isinstance(entry, _Category):
                if categories.setdefault(entry.id, entry).name != entry.name:
                    raise SourceError(
                        f"{self.path}: category {entry.id} has two names; correct one"
                    )
                continue
            path = ""
            if isinstance(entry, _Image):
                path = check_path(entry.path(self.split), f"{self.path}: file_name")
                text = _head(entry)
            part = parts[zlib.crc32(f"{entry.image_id}".encode()) % num_parts]
            part.add([f"{entry.image_id}", path, text])
        return parts, categories

    def _kept(self, text: str) -> str:
        """An annotation as it is stored; "" if it is left out."""
        annotation, _ = _decoded(text, _Listed)
        category = annotation.category_id
        try:
            box = box_of(annotation, self._ids)
        except BadTarget as error:
            self._tell(f"annotations left out, {error}", text)
            return ""
        if box is None:
            what = "whose bbox has no area" if annotation.bbox else "without a bbox"
            self._tell(f"annotations {what}, which Boxes passes over", text)
        self._num_kept += 1
        if category is None:
            return text
        self.used.add(stored := self._ids.get(category, category))
        if stored == category:
            return text
        return json.dumps(json.loads(text) | {"category_id": stored})


def _decoded(text: str, kind: type[T]) -> tuple[T, str]:
    """An entry, and its text with null for NaN, as JSON has it; raises one of JSON_ERRORS."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False), text
    except JSON_ERRORS:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
        return msgspec.json.decode(text, type=kind, strict=False), text


def _head(image: _Image) -> str:
    """What `json` says of an image."""
    facts = {"image_id": image.image_id, "file_name": image.file_name or image.path("")}
    if image.width is not None and image.height is not None:
        facts |= {"width": image.width, "height": image.height}
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
