"""ImageNet (ILSVRC2012) as it is published: the archives, Kaggle's tree, or folders of classes.

Nothing is unpacked: a sample of the archives is a byte range of the outer tar.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pipelines.sources import paths
from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.formats.range_file import RangeFile
from pipelines.sources.formats.tar import SCATTERED_BYTES, header_window, refusal, walk
from pipelines.sources.paths import (
    IMAGE_FIELDS,
    UNKNOWN_FIELD,
    extension,
    is_hidden,
    is_text,
    printable,
    without_extension,
)
from pipelines.sources.synsets import (
    VALIDATION_NAME,
    WNID,
    Synsets,
    read_devkit,
    read_mapping,
    read_solution,
)
from shardset.errors import ChangedInput, NotFound, SourceError
from shardset.format.manifest import ClassInfo
from shardset.storage.base import Stat, Storage

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
KAGGLE_ROOT = "ILSVRC/Data/CLS-LOC/"
MAPPING = "LOC_synset_mapping.txt"
SOLUTION = "LOC_val_solution.csv"
TRAIN, VALIDATION = "train", "validation"
VALIDATION_CHUNK = 12_500
MAX_STRAYS = 1000

_LEFT_OUT, _UNKNOWN = -1, -2

_WANTED = (
    f"expected {TRAIN_TAR} (with {VALIDATION_TAR} and {DEVKIT}), or Kaggle's {KAGGLE_ROOT}{TRAIN}/nNNNNNNNN/ "
    f"(with {MAPPING} and {SOLUTION}), or {TRAIN}/nNNNNNNNN/ and val/nNNNNNNNN/"
)


@dataclass(frozen=True, slots=True)
class ImageNet:
    """Splits `train` and `validation`; labels are 0-based in wnid order over the classes with training data.

    Units are inner tars or class folders, and runs of 12,500 numbers of the validation images, whose archive every
    such unit walks (its headers don't say in advance where they stand). Keys are file names without `.JPEG`.
    """

    input: Storage

    @property
    def name(self) -> str:
        """What --source calls it."""
        return "imagenet"

    def survey(self) -> Survey:
        """The archives' or folders' units; raises SourceError listing what was looked for if nothing is there."""
        if archives := self.archives():
            return _survey_archives(self.input, archives)
        for root in (KAGGLE_ROOT, ""):
            if _holds(self.input, f"{root}{TRAIN}/"):
                return _survey_tree(self.input, root)
        found = ", ".join(stat.name for stat in islice(self.input.list(), 5)) or "nothing"
        raise SourceError(f"{self.input.url}: no ImageNet there: {_WANTED}; found {found}")

    def archives(self) -> dict[str, Stat]:
        """The published archives that are there, by name; none where the training images are a tree."""
        names = (TRAIN_TAR, VALIDATION_TAR, DEVKIT)
        found = {name: stat for name in names if (stat := _stat(self.input, name))}
        return found if TRAIN_TAR in found else {}

    def index(self, unit: Unit, spool: Spool) -> Iterator[RawSample | Rejected]:
        """The samples of one inner tar, class folder or run of validation images; SourceError where one is damaged."""
        match unit["kind"]:
            case "inner tar":
                return _index_inner_tar(self.input, unit)
            case "validation tar":
                return _index_validation_tar(self.input, unit)
            case "class folder":
                return _index_class_folder(self.input, unit)
            case "validation folder":
                return _index_validation_folder(self.input, unit)
            case _:
                return _index_strays(unit)


# The archives: a tar of 1,000 tars, a tar of 50,000 images, and the devkit that says what they show.


def _survey_archives(storage: Storage, stats: dict[str, Stat]) -> Survey:
    train, validation = stats[TRAIN_TAR], stats.get(VALIDATION_TAR)
    synsets = _devkit(storage, stats.get(DEVKIT))
    if validation and not synsets.truth:
        raise SourceError(f"{storage.url}: {VALIDATION_TAR} without {DEVKIT}, which holds its labels; put it there too")
    units, strays = _inner_tars(storage, train)
    labels = _labels({unit["wnid"] for unit in units}, synsets, f"{storage.url}/{TRAIN_TAR}")
    units = [{**unit, "label": labels[unit["wnid"]]} for unit in units]
    notes = _notes_on_classes(labels, synsets)
    if validation:
        place = {"kind": "validation tar", "generation": validation.generation, "num_bytes": validation.num_bytes}
        units += _validation_units(place, labels, synsets, notes)
    else:
        notes.append(f"no {VALIDATION_TAR}: only split {TRAIN}")
    return Survey(
        units=units + strays,
        classes=_classes(labels, synsets),
        notes=notes,
        objects={name: stat.num_bytes for name, stat in stats.items()},
    )


def _devkit(storage: Storage, stat: Stat | None) -> Synsets:
    if not stat:
        return Synsets()
    with RangeFile(storage, DEVKIT, stat.generation, stat.num_bytes) as file:
        return read_devkit(file, f"{storage.url}/{DEVKIT}")


def _inner_tars(storage: Storage, train: Stat) -> tuple[list[Unit], list[Unit]]:
    """A unit for each inner tar, without label, and one for whatever else stands in the outer tar."""
    units: list[Unit] = []
    strays: list[list[str]] = []
    with RangeFile(storage, TRAIN_TAR, train.generation, train.num_bytes, SCATTERED_BYTES) as file:
        for member in walk(file, f"{storage.url}/{TRAIN_TAR}"):
            wnid = member.name.rpartition("/")[2].removesuffix(".tar")
            reason = refusal(member) or (None if WNID.fullmatch(wnid) else "is no nNNNNNNNN.tar")
            if reason:
                _add_stray(strays, f"{TRAIN_TAR}/{member.name}", reason)
                continue
            place = {"offset": member.offset_data, "num_bytes": member.size, "outer_bytes": train.num_bytes}
            units.append({"kind": "inner tar", "wnid": wnid, "generation": train.generation, **place})
    if not units:
        raise SourceError(
            f"{storage.url}/{TRAIN_TAR}: holds no nNNNNNNNN.tar; fetch the training images of Task 1 and 2"
        )
    return units, _stray_units(TRAIN, strays)


def _index_inner_tar(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    inner = f"{TRAIN_TAR}/{unit['wnid']}.tar"
    start = unit["offset"]
    with RangeFile(storage, TRAIN_TAR, unit["generation"], unit["outer_bytes"], header_window(storage)) as file:
        where = f"{storage.url}/{inner} (from byte {start})"
        for member in walk(file, where, start, start + unit["num_bytes"]):
            name = f"{inner}/{member.name}"
            if reason := refusal(member):
                yield Rejected(name=name, split=TRAIN, reason=reason)
            else:
                extent = Extent(TRAIN_TAR, unit["generation"], member.offset_data, member.size)
                yield _sample(name, TRAIN, unit["label"], extent)


def _index_validation_tar(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    generation = unit["generation"]
    with RangeFile(storage, VALIDATION_TAR, generation, unit["num_bytes"], header_window(storage)) as file:
        for member in walk(file, f"{storage.url}/{VALIDATION_TAR}"):
            name = f"{VALIDATION_TAR}/{member.name}"
            if reason := refusal(member):
                yield from _reported_once(Rejected(name=name, split=VALIDATION, reason=reason), unit)
            else:
                extent = Extent(VALIDATION_TAR, generation, member.offset_data, member.size)
                yield from _validation_sample(name, extent, unit)


# The tree: one folder a class; Kaggle's validation images stand flat beside a table of their labels.


def _survey_tree(storage: Storage, root: str) -> Survey:
    synsets = _tables(storage)
    train = _class_folders(storage, f"{root}{TRAIN}/")
    if not train.counts:
        raise SourceError(f"{storage.url}/{root}{TRAIN}: no folder nNNNNNNNN in it; for other class names use `folder`")
    labels = _labels(set(train.counts), synsets, f"{storage.url}/{root}{TRAIN}")
    notes = _notes_on_classes(labels, synsets) + train.notes()
    units = train.units(TRAIN, labels) + _tree_validation(storage, root, labels, synsets, notes)
    return Survey(units=units, classes=_classes(labels, synsets), notes=notes)


def _tables(storage: Storage) -> Synsets:
    """What the tables beside a tree say, as far as they are there."""
    if stat := _stat(storage, DEVKIT):
        return _devkit(storage, stat)
    mapping = storage.read(MAPPING) if _stat(storage, MAPPING) else b""
    solution = storage.read(SOLUTION) if _stat(storage, SOLUTION) else b""
    return Synsets(
        names=read_mapping(mapping, f"{storage.url}/{MAPPING}"),
        truth=read_solution(solution, f"{storage.url}/{SOLUTION}") if solution else {},
    )


@dataclass(frozen=True, slots=True)
class _Folders:
    """What stands below `prefix`: images by class folder, images elsewhere, and how many files are no images."""

    prefix: str
    counts: Counter[str]
    strays: list[list[str]]
    num_others: int

    def units(self, split: str, labels: dict[str, int]) -> list[Unit]:
        """A unit for each class folder that has a label, and one for the strays."""
        folders = [
            (f"{self.prefix}{wnid}/", labels[wnid], count) for wnid, count in self.counts.items() if wnid in labels
        ]
        return [
            {"kind": "class folder", "split": split, "prefix": prefix, "label": label, "num_files": count}
            for prefix, label, count in sorted(folders)
        ] + _stray_units(split, self.strays)

    def notes(self) -> list[str]:
        return (
            [f"{self.prefix}: left out {self.num_others} files that are no images by name"] if self.num_others else []
        )


def _class_folders(storage: Storage, prefix: str) -> _Folders:
    counts: Counter[str] = Counter()
    strays: list[list[str]] = []
    num_others = 0
    for stat in _visible(storage, prefix):
        wnid, slash, _ = stat.name[len(prefix) :].partition("/")
        if extension(stat.name) not in IMAGE_FIELDS:
            num_others += 1
        elif slash and WNID.fullmatch(wnid):
            counts[wnid] += 1
        else:
            _add_stray(strays, printable(stat.name), "is in no folder nNNNNNNNN")
    return _Folders(prefix, counts, strays, num_others)


def _visible(storage: Storage, prefix: str) -> Iterator[Stat]:
    return (stat for stat in storage.list(prefix) if not is_hidden(stat.name))


def _tree_validation(
    storage: Storage, root: str, labels: dict[str, int], synsets: Synsets, notes: list[str]
) -> list[Unit]:
    prefix = next((p for name in ("val", VALIDATION) if _holds(storage, p := f"{root}{name}/")), None)
    if prefix is None:
        notes.append(f"no {root}val/: only split {TRAIN}")
        return []
    if _holds(storage, f"{prefix}ILSVRC2012_val_"):
        return _flat_validation(storage, prefix, labels, synsets, notes)
    found = _class_folders(storage, prefix)
    if num_left_out := sum(count for wnid, count in found.counts.items() if wnid not in labels):
        notes.append(_left_out(num_left_out, found.counts.total()))
    notes += found.notes()
    return found.units(VALIDATION, labels)


def _flat_validation(
    storage: Storage, prefix: str, labels: dict[str, int], synsets: Synsets, notes: list[str]
) -> list[Unit]:
    if not synsets.truth:
        raise SourceError(
            f"{storage.url}/{prefix}: images without class folders and no {SOLUTION} with their labels; put it "
            f"into {storage.url}, or sort them into folders nNNNNNNNN"
        )
    return _validation_units({"kind": "validation folder", "prefix": prefix}, labels, synsets, notes)


def _index_class_folder(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    images = [stat for stat in _visible(storage, unit["prefix"]) if extension(stat.name) in IMAGE_FIELDS]
    if len(images) != unit["num_files"]:
        raise ChangedInput(
            f"{storage.url}/{unit['prefix']}: {len(images)} images, {unit['num_files']} when it was surveyed; "
            "start again when nothing writes there any more"
        )
    for stat in images:
        if not is_text(stat.name):
            yield Rejected(name=printable(stat.name), split=unit["split"], reason="the name is not valid UTF-8")
        else:
            yield _sample(stat.name, unit["split"], unit["label"], _whole(stat))


def _index_validation_folder(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    for stat in _visible(storage, unit["prefix"]):
        if is_text(stat.name):
            yield from _validation_sample(stat.name, _whole(stat), unit)
        else:
            rejected = Rejected(name=printable(stat.name), split=VALIDATION, reason="the name is not valid UTF-8")
            yield from _reported_once(rejected, unit)


# What both have in common.


def _labels(present: set[str], synsets: Synsets, where: str) -> dict[str, int]:
    if unknown := sorted(present - set(synsets.names)) if synsets.names else []:
        raise SourceError(
            f"{where}: {len(unknown)} classes that the table of synsets does not know: {', '.join(unknown[:5])}; "
            "remove them, or the table if it is of another data set"
        )
    return {wnid: label for label, wnid in enumerate(sorted(present))}


def _classes(labels: dict[str, int], synsets: Synsets) -> list[ClassInfo]:
    return [ClassInfo(label=label, name=synsets.names.get(wnid, wnid), wnid=wnid) for wnid, label in labels.items()]


def _notes_on_classes(labels: dict[str, int], synsets: Synsets) -> list[str]:
    if not synsets.names:
        return [f"no {DEVKIT} and no {MAPPING}: classes are named by their wnids"]
    if len(labels) < len(synsets.names):
        return [f"{len(labels)} of {len(synsets.names)} classes have training data: labels are 0 to {len(labels) - 1}"]
    return []


def _validation_units(place: Unit, labels: dict[str, int], synsets: Synsets, notes: list[str]) -> list[Unit]:
    """Runs of validation images by their number, each with its labels or _LEFT_OUT or _UNKNOWN."""
    last = max(synsets.truth)
    of_number = [_label_of(synsets.truth.get(number), labels) for number in range(1, last + 1)]
    if num_left_out := of_number.count(_LEFT_OUT):
        notes.append(_left_out(num_left_out, len(synsets.truth)))
    return [
        {**place, "first": start + 1, "last": last, "labels": of_number[start : start + VALIDATION_CHUNK]}
        for start in range(0, last, VALIDATION_CHUNK)
    ]


def _label_of(wnid: str | None, labels: dict[str, int]) -> int:
    return _UNKNOWN if wnid is None else labels.get(wnid, _LEFT_OUT)


def _left_out(num_left_out: int, num_samples: int) -> str:
    return f"{num_left_out} of {num_samples} validation samples are of classes without training data: left out"


def _validation_sample(name: str, extent: Extent, unit: Unit) -> Iterator[RawSample | Rejected]:
    """The sample if its number belongs to this unit; a name without a number that has a label is rejected."""
    found = VALIDATION_NAME.fullmatch(_stem(name))
    number = int(found[1]) if found else 0
    place = number - unit["first"]
    if not 1 <= number <= unit["last"]:
        reason = f"is not named ILSVRC2012_val_NNNNNNNN.JPEG with a number from 1 to {unit['last']}: no label"
        yield from _reported_once(Rejected(name=name, split=VALIDATION, reason=reason, extent=extent), unit)
    elif 0 <= place < len(unit["labels"]):
        yield from _labelled(name, extent, unit["labels"][place])


def _labelled(name: str, extent: Extent, label: int) -> Iterator[RawSample | Rejected]:
    if label == _UNKNOWN:
        yield Rejected(name=name, split=VALIDATION, reason=f"has no label in {SOLUTION}", extent=extent)
    elif label != _LEFT_OUT:
        yield _sample(name, VALIDATION, label, extent)


def _reported_once(rejected: Rejected, unit: Unit) -> Iterator[Rejected]:
    """All units meet the members that belong to none; the first one tells."""
    if unit["first"] == 1:
        yield rejected


def _sample(name: str, split: str, label: int, extent: Extent) -> RawSample:
    key, last = paths.split(name.rpartition("/")[2])
    image = IMAGE_FIELDS.get(last.lower(), UNKNOWN_FIELD)
    return RawSample(name=name, key=key, split=split, label=label, image=image, fields={image: extent})


def _stem(name: str) -> str:
    return without_extension(name.rpartition("/")[2])


def _whole(stat: Stat) -> Extent:
    return Extent(stat.name, stat.generation, 0, stat.num_bytes)


def _add_stray(strays: list[list[str]], name: str, reason: str) -> None:
    strays.append([name, reason])
    if len(strays) > MAX_STRAYS:
        raise SourceError(f"{name} and {MAX_STRAYS} more: {reason}; is this ImageNet? {_WANTED}")


def _stray_units(split: str, strays: Sequence[list[str]]) -> list[Unit]:
    return [{"kind": "strays", "split": split, "strays": list(strays)}] if strays else []


def _index_strays(unit: Unit) -> Iterator[Rejected]:
    for name, reason in unit["strays"]:
        yield Rejected(name=name, split=unit["split"], reason=reason)


def _stat(storage: Storage, name: str) -> Stat | None:
    try:
        return storage.stat(name)
    except NotFound:
        return None


def _holds(storage: Storage, prefix: str) -> bool:
    return any(True for _ in storage.list(prefix))
