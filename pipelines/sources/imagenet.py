"""ImageNet (ILSVRC2012) as published: the archives, Kaggle's tree, or class folders.

Nothing is unpacked: a sample of the archives is a byte range of the outer tar.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import asdict

from pipelines.sources import objects
from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.tar import (
    SCATTERED_BYTES,
    header_window,
    is_passed,
    reject_reason,
    show_passed,
    walk,
)
from pipelines.sources.synsets import (
    VALIDATION_NAME,
    WNID,
    Synsets,
    read_devkit,
    read_mapping,
    read_solution,
)
from shardset.errors import ChangedInput, SourceError
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import ClassInfo
from shardset.storage.base import Stat, Storage, stat_or_none
from shardset.storage.checked import read_twice

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
KAGGLE_ROOT = "ILSVRC/Data/CLS-LOC/"
MAPPING = "LOC_synset_mapping.txt"
SOLUTION = "LOC_val_solution.csv"
TRAIN, VALIDATION = "train", "validation"

_LEFT_OUT, _UNKNOWN = -1, -2

_Found = tuple[str, Extent | None, str | None]
"""The name of a file, and where its bytes are or why it can't be a sample."""

_Classes = list[tuple[str, Unit]]
"""The wnid of each class, and the unit of its images, without its label."""

_Noted = tuple[list[Unit], list[str]]
"""Units, and sentences on what is not among them."""


@dataclass(frozen=True, slots=True)
class ImageNet:
    """Splits `train` and `validation`; labels are 0-based in wnid order over the classes with
    training data.

    Units are inner tars or class folders, and all validation images where these have no class
    folders. Keys are file names without `.JPEG`.
    """

    input: Storage

    def survey(self) -> Survey:
        """The units of the archives or folders; raises SourceError if there are neither, listing
        what was expected.
        """
        names = (TRAIN_TAR, VALIDATION_TAR, DEVKIT)
        archives = {name: stat for name in names if (stat := stat_or_none(self.input, name))}
        if TRAIN_TAR in archives:
            return read_twice(lambda: _survey(self.input, archives, ""))
        for root in (KAGGLE_ROOT, ""):
            if objects.has_prefix(self.input, f"{root}{TRAIN}/"):
                return _survey(self.input, {}, root)
        raise SourceError(
            f"{self.input.url}: no ImageNet there: expected {TRAIN_TAR} (with {VALIDATION_TAR} and"
            f" {DEVKIT}), or Kaggle's {KAGGLE_ROOT}{TRAIN}/nNNNNNNNN/ (with {MAPPING} and"
            f" {SOLUTION}), or {TRAIN}/nNNNNNNNN/ and val/nNNNNNNNN/; found"
            f" {objects.first_names(self.input)}"
        )

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of one inner tar, one class folder or all validation images; raises
        SourceError if damaged.
        """
        found = _in_tar(self.input, unit, spool) if "tar" in unit else _in_folder(self.input, unit)
        for name, extent, reason in found:
            label = reason or _label_in(unit, name)
            if isinstance(label, str):
                yield Rejected(name=name, split=unit["split"], reason=label, extent=extent)
            elif extent and label != _LEFT_OUT:
                key = objects.without_extension(name.rpartition("/")[2])
                yield objects.image_sample(
                    name, key, split=unit["split"], label=label, content=extent
                )


def _survey(storage: Storage, archives: dict[str, Stat], root: str) -> Survey:
    """The facts from the archives, or else from the tree below `root`."""
    synsets = _synsets(storage)
    if archives:
        where = f"{storage.url}/{TRAIN_TAR}"
        classes, strays = _inner_tars(storage, archives[TRAIN_TAR], where)
    else:
        where = f"{storage.url}/{root}{TRAIN}"
        classes, strays = _class_folders(storage, f"{root}{TRAIN}/", TRAIN)
    if not classes:
        raise SourceError(
            f"{where}: holds no nNNNNNNNN; fetch the training images of Task 1 and 2, or use"
            " `folder` for other class names"
        )
    labels = _labels(classes, synsets, where)
    truth = {number: labels.get(wnid, _LEFT_OUT) for number, wnid in synsets.truth.items()}
    validation, notes = (
        _archived_validation(storage, archives, truth)
        if archives
        else _tree_validation(storage, root, labels, truth)
    )
    units = _labelled(classes, labels) + validation
    return Survey(
        units=units,
        splits={unit["split"] for unit in units},
        classes=[
            ClassInfo(label=label, name=synsets.names.get(wnid, wnid), wnid=wnid)
            for wnid, label in labels.items()
        ],
        notes=_notes_on_classes(labels, synsets) + strays + notes,
        objects={name: stat.num_bytes for name, stat in archives.items()},
    )


def _archived_validation(
    storage: Storage, archives: dict[str, Stat], truth: dict[int, int]
) -> _Noted:
    if tar := archives.get(VALIDATION_TAR):
        return _numbered({"tar": asdict(tar)}, truth, f"{storage.url}/{tar.name}", DEVKIT)
    return [], [f"no {VALIDATION_TAR}: only split {TRAIN}"]


def _tree_validation(
    storage: Storage, root: str, labels: dict[str, int], truth: dict[int, int]
) -> _Noted:
    prefixes = (f"{root}{name}/" for name in ("val", VALIDATION))
    prefix = next((one for one in prefixes if objects.has_prefix(storage, one)), None)
    if prefix is None:
        return [], [f"no {root}val/: only split {TRAIN}"]
    if objects.has_prefix(storage, f"{prefix}ILSVRC2012_val_"):
        return _numbered({"prefix": prefix}, truth, f"{storage.url}/{prefix}", SOLUTION)
    folders, strays = _class_folders(storage, prefix, VALIDATION)
    units, num_images = _labelled(folders, labels), sum(unit["num_files"] for _, unit in folders)
    num_left_out = num_images - sum(unit["num_files"] for unit in units)
    return units, _left_out(num_left_out, num_images) + strays


def _numbered(place: Unit, truth: dict[int, int], where: str, table: str) -> _Noted:
    """All validation images, with the label of each number, _LEFT_OUT or _UNKNOWN."""
    if not truth:
        raise SourceError(
            f"{where}: images without class folders and no {table} with their labels; put it into"
            " the input folder, or sort them into folders nNNNNNNNN"
        )
    labels = [truth.get(number, _UNKNOWN) for number in range(1, max(truth) + 1)]
    unit = {"split": VALIDATION, **place, "labels": labels}
    return [unit], _left_out(labels.count(_LEFT_OUT), len(truth))


# The archives: a tar of 1,000 tars, a tar of 50,000 images, and the devkit with the labels of
# these.


def _inner_tars(storage: Storage, train: Stat, where: str) -> tuple[_Classes, list[str]]:
    """The inner tars, and sentences on what else is in the outer tar."""
    units: _Classes = []
    strays: list[str] = []
    with RangeFile(storage, train, SCATTERED_BYTES) as file:
        for member in walk(file, where):
            wnid = member.name.rpartition("/")[2].removesuffix(".tar")
            if reject_reason(member) or not WNID.fullmatch(wnid):
                strays.append(member.name)
                continue
            place = {
                "inner": f"{wnid}.tar",
                "start": member.offset_data,
                "stop": member.offset_data + member.size,
            }
            units.append((wnid, {"split": TRAIN, "tar": asdict(train), **place}))
    return units, _stray_notes(strays, f"in {TRAIN_TAR} that are no nNNNNNNNN.tar")


def _in_tar(storage: Storage, unit: Unit, spool: Spool) -> Iterator[_Found]:
    tar, start = Stat(**unit["tar"]), unit.get("start", 0)
    stop = unit.get("stop", tar.num_bytes)
    path = f"{tar.name}/{unit['inner']}" if "inner" in unit else tar.name
    where = f"{storage.url}/{path}" + (f" (from byte {start})" if start else "")
    # a window reads no byte of the next tar
    with RangeFile(storage, tar, max(1, min(header_window(storage), stop - start))) as file:
        for member in walk(file, where, start, stop):
            reason = reject_reason(member)
            extent = Extent(tar.name, tar.generation, member.offset_data, member.size)
            if is_passed(member, storage):
                extent, _ = show_passed(file, extent, spool)
            yield f"{path}/{member.name}", None if reason else extent, reason


# The tree: one folder per class; Kaggle's validation images are in one folder, with a table of
# their labels.


def _class_folders(storage: Storage, prefix: str, split: str) -> tuple[_Classes, list[str]]:
    """The class folders below `prefix`, and sentences on what else is there."""
    counts, strays = Counter[str](), list[str]()
    for stat in _visible(storage, prefix):
        wnid, slash, _ = stat.name[len(prefix) :].partition("/")
        is_image = objects.extension(stat.name) in FIELD_OF_EXTENSION
        if is_image and slash and WNID.fullmatch(wnid):
            counts[wnid] += 1
        else:
            strays.append(objects.printable(stat.name))
    classes = [
        (wnid, {"split": split, "prefix": f"{prefix}{wnid}/", "num_files": number})
        for wnid, number in sorted(counts.items())
    ]
    return classes, _stray_notes(strays, f"in {prefix} that are no images in folders nNNNNNNNN")


def _visible(storage: Storage, prefix: str) -> Iterator[Stat]:
    return (stat for stat in storage.list(prefix) if not objects.is_hidden(stat.name))


def _in_folder(storage: Storage, unit: Unit) -> Iterator[_Found]:
    files = list(_visible(storage, unit["prefix"]))
    if "num_files" in unit:  # a class folder, in which other files do not count
        files = [stat for stat in files if objects.extension(stat.name) in FIELD_OF_EXTENSION]
    if len(files) != unit.get("num_files", len(files)):
        raise ChangedInput(
            f"{storage.url}/{unit['prefix']}: {len(files)} images, {unit['num_files']} when it was"
            " surveyed; start again when nothing writes there any more"
        )
    for stat in files:
        objects.refuse_odd_name(storage, stat.name)
        yield stat.name, Extent(stat.name, stat.generation, 0, stat.num_bytes), None


# Shared by archives and trees.


def _synsets(storage: Storage) -> Synsets:
    """The facts from the devkit, or else from Kaggle's tables, if they exist."""
    if stat := stat_or_none(storage, DEVKIT):
        return read_twice(lambda: read_devkit(RangeFile(storage, stat), f"{storage.url}/{DEVKIT}"))
    mapping = storage.read(MAPPING) if stat_or_none(storage, MAPPING) else b""
    solution = storage.read(SOLUTION) if stat_or_none(storage, SOLUTION) else b""
    return Synsets(
        names=read_mapping(mapping, f"{storage.url}/{MAPPING}"),
        truth=read_solution(solution, f"{storage.url}/{SOLUTION}") if solution else {},
    )


def _labelled(classes: _Classes, labels: dict[str, int]) -> list[Unit]:
    """The units of the classes that have a label, with that."""
    return [{**unit, "label": labels[wnid]} for wnid, unit in classes if wnid in labels]


def _labels(classes: _Classes, synsets: Synsets, where: str) -> dict[str, int]:
    present = {wnid for wnid, _ in classes}
    if unknown := sorted(present - set(synsets.names)) if synsets.names else []:
        raise SourceError(
            f"{where}: {len(unknown)} classes that the table of synsets does not know:"
            f" {', '.join(unknown[:5])}; remove them, or the table if it is of another data set"
        )
    return {wnid: label for label, wnid in enumerate(sorted(present))}


def _notes_on_classes(labels: dict[str, int], synsets: Synsets) -> list[str]:
    if not synsets.names:
        return [f"no {DEVKIT} and no {MAPPING}: classes are named by their wnids"]
    if len(labels) < len(synsets.names):
        return [
            f"{len(labels)} of {len(synsets.names)} classes have training data: labels are 0 to"
            f" {len(labels) - 1}"
        ]
    return []


def _left_out(num_left_out: int, num_samples: int) -> list[str]:
    note = (
        f"{num_left_out} of {num_samples} validation samples are of classes without training data:"
        " left out"
    )
    return [note] if num_left_out else []


def _label_in(unit: Unit, name: str) -> int | str:
    """The label of an image in a unit, _LEFT_OUT if its class has none;
    or why it can't have one.
    """
    if "label" in unit:
        return int(unit["label"])
    match = VALIDATION_NAME.fullmatch(objects.without_extension(name.rpartition("/")[2]))
    number, last = int(match[1]) if match else 0, len(unit["labels"])
    if not 1 <= number <= last:
        return f"is not named ILSVRC2012_val_NNNNNNNN.JPEG with a number from 1 to {last}: no label"
    label = int(unit["labels"][number - 1])
    return f"has no label in {SOLUTION}" if label == _UNKNOWN else label


def _stray_notes(names: list[str], what: str) -> list[str]:
    return [f"left out {len(names)} files {what}, such as {names[0]}"] if names else []
