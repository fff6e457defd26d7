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
    located,
    reject_reason,
    walk,
)
from pipelines.sources.synsets import WNID, Synsets, read_devkit, read_mapping, read_solution
from shardset.errors import SourceError
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

_LEFT_OUT = -1
"""The label of images of classes without training data."""

_NO_LABEL = f"has no label in {DEVKIT} or {SOLUTION}"

_Found = tuple[str, Extent, str | None]
"""The name of a file, where its bytes are, and why it can't be a sample."""

_Classes = list[tuple[str, Unit]]
"""The wnid of each class, and where its images are."""


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
        members = (
            _in_tar(self.input, unit, spool) if "tar" in unit else _in_folder(self.input, unit)
        )
        split = unit["split"]
        for name, extent, reason in members:
            key = objects.without_extension(name.rpartition("/")[2])
            label = unit["label"] if "label" in unit else unit["truth"].get(key)
            if reason or label is None:
                place = None if reason else extent
                yield Rejected(name=name, split=split, reason=reason or _NO_LABEL, extent=place)
            elif label != _LEFT_OUT:
                yield objects.image_sample(name, key, split=split, label=label, content=extent)


def _survey(storage: Storage, archives: dict[str, Stat], root: str) -> Survey:
    """The facts from the archives, or else from the tree below `root`."""
    synsets, notes = _synsets(storage), list[str]()
    places: list[Unit]
    if archives:
        train, validation = TRAIN_TAR, VALIDATION_TAR
        classes = _inner_tars(storage, archives[train], notes)
        places = [{"tar": asdict(archives[validation])}] if validation in archives else []
    else:
        train, validation = f"{root}{TRAIN}/", f"{root}val/"
        classes = _class_folders(storage, train, notes)
        prefixes = (validation, f"{root}{VALIDATION}/")
        places = [{"prefix": prefix} for prefix in prefixes if objects.has_prefix(storage, prefix)]
    labels = _labels({wnid for wnid, _ in classes}, synsets, f"{storage.url}/{train}")
    units = _labelled(classes, labels, TRAIN)
    num_images = Counter[str]()
    if not places:
        notes.append(f"no {validation}: only split {TRAIN}")
    elif archives or objects.has_prefix(storage, f"{places[0]['prefix']}ILSVRC2012_val_"):
        if not synsets.truth:
            raise SourceError(
                f"{storage.url}/{validation}: images without class folders, and no {DEVKIT} or"
                f" {SOLUTION} with their labels; put one into the input folder, or sort the images"
                " into folders nNNNNNNNN"
            )
        num_images.update(synsets.truth.values())
        truth = {name: labels.get(wnid, _LEFT_OUT) for name, wnid in synsets.truth.items()}
        units.append({"split": VALIDATION, "truth": truth, **places[0]})
    else:
        folders = _class_folders(storage, places[0]["prefix"], notes)
        num_images.update({wnid: images["num_files"] for wnid, images in folders})
        units += _labelled(folders, labels, VALIDATION)
    if num_left_out := sum(num_images[wnid] for wnid in num_images.keys() - labels.keys()):
        notes.append(
            f"{num_left_out} of {num_images.total()} validation samples are of classes without"
            " training data: left out"
        )
    if not synsets.names:
        notes.append(f"no {DEVKIT} and no {MAPPING}: classes are named by their wnids")
    elif len(labels) < len(synsets.names):
        notes.append(
            f"{len(labels)} of {len(synsets.names)} classes have training data: labels are 0 to"
            f" {len(labels) - 1}"
        )
    return Survey(
        units=units,
        splits={unit["split"] for unit in units},
        classes=[
            ClassInfo(label=label, name=synsets.names.get(wnid, wnid), wnid=wnid)
            for wnid, label in labels.items()
        ],
        notes=notes,
        objects={name: stat.num_bytes for name, stat in archives.items()},
    )


def _labels(wnids: set[str], synsets: Synsets, where: str) -> dict[str, int]:
    if not wnids:
        raise SourceError(
            f"{where}: holds no nNNNNNNNN; fetch the training images of Task 1 and 2, or use"
            " `folder` for other class names"
        )
    if unknown := sorted(wnids - synsets.names.keys()) if synsets.names else []:
        raise SourceError(
            f"{where}: {len(unknown)} classes that the table of synsets does not know:"
            f" {', '.join(unknown[:5])}; remove them, or the table if it is of another dataset"
        )
    return {wnid: label for label, wnid in enumerate(sorted(wnids))}


def _labelled(classes: _Classes, labels: dict[str, int], split: str) -> list[Unit]:
    """The units of the classes that have a label."""
    return [
        {"split": split, "label": labels[wnid], **images}
        for wnid, images in classes
        if wnid in labels
    ]


def _inner_tars(storage: Storage, train: Stat, notes: list[str]) -> _Classes:
    """The inner tars of the training archive; a note says what else is in it."""
    classes, strays = _Classes(), list[str]()
    with RangeFile(storage, train, SCATTERED_BYTES) as file:
        for member in walk(file, f"{storage.url}/{train.name}"):
            wnid = member.name.rpartition("/")[2].removesuffix(".tar")
            start, stop = member.offset_data, member.offset_data + member.size
            if reject_reason(member) or not WNID.fullmatch(wnid):
                strays.append(member.name)
            else:
                place = {"inner": f"{wnid}.tar", "start": start, "stop": stop}
                classes.append((wnid, {"tar": asdict(train), **place}))
    _note_strays(strays, f"in {train.name} that are no nNNNNNNNN.tar", notes)
    return classes


def _class_folders(storage: Storage, prefix: str, notes: list[str]) -> _Classes:
    """The class folders below `prefix`; a note says what else is there."""
    counts, strays = Counter[str](), list[str]()
    for stat in _visible(storage, prefix):
        wnid, slash, _ = stat.name[len(prefix) :].partition("/")
        if slash and WNID.fullmatch(wnid) and _is_image(stat):
            counts[wnid] += 1
        else:
            strays.append(objects.printable(stat.name))
    _note_strays(strays, f"in {prefix} that are no images in folders nNNNNNNNN", notes)
    return [
        (wnid, {"prefix": f"{prefix}{wnid}/", "num_files": number})
        for wnid, number in sorted(counts.items())
    ]


def _note_strays(names: list[str], what: str, notes: list[str]) -> None:
    if names:
        notes.append(f"left out {len(names)} files {what}, such as {names[0]}")


def _in_tar(storage: Storage, unit: Unit, spool: Spool) -> Iterator[_Found]:
    tar, start = Stat(**unit["tar"]), unit.get("start", 0)
    stop = unit.get("stop", tar.num_bytes)
    path = f"{tar.name}/{unit['inner']}" if "inner" in unit else tar.name
    where = f"{storage.url}/{path}" + (f" (from byte {start})" if start else "")
    # a window reads no byte of the next tar
    with RangeFile(storage, tar, max(1, min(header_window(storage), stop - start))) as file:
        for member in walk(file, where, start, stop):
            extent, _ = located(file, storage, tar, member, spool)
            yield f"{path}/{member.name}", extent, reject_reason(member)


def _in_folder(storage: Storage, unit: Unit) -> Iterator[_Found]:
    for stat in _visible(storage, unit["prefix"]):
        if "truth" in unit or _is_image(stat):  # other files in a class folder do not count
            objects.refuse_odd_name(storage, stat.name)
            yield stat.name, Extent(stat.name, stat.generation, 0, stat.num_bytes), None


def _visible(storage: Storage, prefix: str) -> Iterator[Stat]:
    return (stat for stat in storage.list(prefix) if not objects.is_hidden(stat.name))


def _is_image(stat: Stat) -> bool:
    return objects.extension(stat.name) in FIELD_OF_EXTENSION


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
