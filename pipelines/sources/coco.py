"""Object detection as COCO's `instances` files have it: images, with their annotations in `json`.

A file is read once, from start to end, and may have many GB. Its annotations come in any order, so
they are divided among temporary files, each of which fits the memory.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from pipelines.holdout import REST
from pipelines.sources.base import Survey
from pipelines.sources.formats.json_arrays import elements
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.spilled_list import SpilledList
from pipelines.sources.listing import Listed, Listing, check_path
from pipelines.sources.objects import key_of
from shardset.errors import ConfigError, SourceError
from shardset.format.annotations import Annotation
from shardset.format.labels import NO_LABEL, class_name
from shardset.format.manifest import ClassInfo
from shardset.prepared import JSON_ERRORS, prepared
from shardset.storage.base import join
from shardset.storage.open import open_file, open_storage

PART_BYTES = 64 << 20

_WAITING = 4_000
"""Annotations in memory that wait until they are written."""


@prepared
class _Listed(Annotation, kw_only=True):
    image_id: int


@prepared
class _Image(msgspec.Struct):
    file_name: Annotated[str, msgspec.Meta(min_length=1)]
    image_id: int = msgspec.field(name="id")


@prepared
class _Category(msgspec.Struct):
    id: int
    name: str
    supercategory: str | None = None


_KINDS = {"images": _Image, "annotations": _Listed, "categories": _Category}


@dataclass(frozen=True)
class Coco(Listing):
    """The images of COCO files, each with its annotations as `json`.

    `annotations` names the file of each split; a name in it is relative to the folder of the split
    in `input`. The file of "" is of images right below `input`. `masks` is
    a folder with a PNG for each image, at its place below `input`. Classes are the categories by
    their ids, and samples have no label.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    masks: str | None = None
    entries_per_unit: int = 250

    def listed(self) -> Listed:
        """The images; raises SourceError for an annotation without its image or category."""
        if not self.annotations:
            raise ConfigError("--source coco needs --annotations FILE, or SPLIT=FILE,SPLIT=FILE")
        rows, categories, used = SpilledList(100), dict[int, _Category](), dict[int, str]()
        masks = self.masks and open_storage(self.masks).url
        for split, file in self.annotations.items():
            for name, extra in _annotated(file, categories, used):
                path = check_path(join(split, name), f"{file}: file_name")
                key = key_of(path)
                files = {"mask.png": f"{masks}/{key}.png"} if masks else {}
                rows.add([path, NO_LABEL, split or REST, key, extra, files])
        groups = {
            one.supercategory for one in categories.values() if one.supercategory != one.name
        } - {"none", "null"}  # written for no group
        classes = [
            ClassInfo(
                label=label,
                name=class_name(one.name),
                category_id=category,
                is_group=one.name in groups and category not in used,
            )
            for label, (category, one) in enumerate(sorted(categories.items()))
        ]
        return rows, Survey(units=(), classes=classes, splits=())


def _annotated(
    path: str, categories: dict[int, _Category], used: dict[int, str]
) -> Iterator[tuple[str, str]]:
    """The name of each image of a file, and its `json`; adds the categories, and an annotation of
    each that is used.
    """
    storage, name = open_file(path)
    stat = storage.stat(name)
    num_parts = 1 + stat.num_bytes // PART_BYTES
    parts = [SpilledList(1 + _WAITING // num_parts) for _ in range(num_parts)]
    for section, text in elements(RangeFile(storage, stat, twice=True), path):
        if section not in _KINDS:
            continue
        try:
            found = msgspec.json.decode(text, type=_KINDS[section])
        except JSON_ERRORS as error:
            raise SourceError(f"{path}: {section}: {text:.80}: {error}") from error
        if isinstance(found, _Category):
            if categories.setdefault(found.id, found).name != found.name:
                raise SourceError(f"{path}: category {found.id} has two names; correct one")
            continue
        if isinstance(found, _Listed):
            used.setdefault(found.category_id, text)
        part = parts[zlib.crc32(b"%d" % found.image_id) % num_parts]
        part.add([found.image_id, getattr(found, "file_name", ""), text])
    for category in used.keys() - categories.keys():
        raise SourceError(
            f"{path}: no category {category}, which an annotation has: {used[category]:.80}"
        )
    for part in parts:
        images = defaultdict[int, list[list[str]]](list)
        for image, *entry in part:
            images[image].append(entry)
        for image, entries in images.items():
            names = [name for name, _ in entries if name]
            if len(names) != 1:
                raise SourceError(f"{path}: {len(names)} images have the id {image}, expected one")
            quoted = msgspec.json.encode(names[0]).decode()
            texts = ",".join(text for name, text in entries if not name)
            yield names[0], f'{{"image_id":{image},"file_name":{quoted},"annotations":[{texts}]}}'
