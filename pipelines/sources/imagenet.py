"""ImageNet (ILSVRC2012) as it is published: the archives, Kaggle's tree, or folders of classes.

Nothing is unpacked: a sample of the archives is a byte range of the outer tar.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pipelines.sources.base import Extent, RawSample, Rejected, Spool, Survey, Unit
from pipelines.sources.rangefile import RangeFile
from pipelines.sources.rawtar import SCATTERED_BYTES, header_window, refusal, walk
from pipelines.sources.synsets import (
    VALIDATION_NAME,
    WNID,
    Synsets,
    read_devkit,
    read_mapping,
    read_solution,
)
from shardset.errors import ChangedInput, NotFound, SourceError
from shardset.manifest import ClassInfo
from shardset.storage import Stat, Storage

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
KAGGLE_ROOT = "ILSVRC/Data/CLS-LOC/"
MAPPING = "LOC_synset_mapping.txt"
SOLUTION = "LOC_val_solution.csv"
TRAIN, VALIDATION = "train", "validation"
IMAGE = "jpg"
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
        if _stat(self.input, TRAIN_TAR):
            return _survey_archives(self.input)
        for root in (KAGGLE_ROOT, ""):
            if _holds(self.input, f"{root}{TRAIN}/"):
                return _survey_tree(self.input, root)
        found = ", ".join(stat.name for stat in islice(self.input.list(), 5)) or "nothing"
        raise SourceError(f"{self.input.url}: no ImageNet there: {_WANTED}; found {found}")

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


def _survey_archives(storage: Storage) -> Survey:
    stats = {name: stat for name in (TRAIN_TAR, VALIDATION_TAR, DEVKIT) if (stat := _stat(storage, name))}
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
    train, strays = _class_folders(storage, f"{root}{TRAIN}/")
    if not train:
        raise SourceError(f"{storage.url}/{root}{TRAIN}: no folder nNNNNNNNN in it; for other class names use `folder`")
    labels = _labels(set(train), synsets, f"{storage.url}/{root}{TRAIN}")
    notes = _notes_on_classes(labels, synsets)
    units = _folder_units(f"{root}{TRAIN}/", TRAIN, train, labels) + _stray_units(TRAIN, strays)
    units += _tree_validation(storage, root, labels, synsets, notes)
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


def _class_folders(storage: Storage, prefix: str) -> tuple[Counter[str], list[list[str]]]:
    """How many files each class folder below `prefix` holds, and what stands outside of them."""
    counts: Counter[str] = Counter()
    strays: list[list[str]] = []
    for stat in storage.list(prefix):
        wnid, slash, _ = stat.name[len(prefix) :].partition("/")
        if slash and WNID.fullmatch(wnid):
            counts[wnid] += 1
        else:
            _add_stray(strays, stat.name, "is in no folder nNNNNNNNN")
    return counts, strays


def _tree_validation(
    storage: Storage, root: str, labels: dict[str, int], synsets: Synsets, notes: list[str]
) -> list[Unit]:
    prefix = next((p for name in ("val", VALIDATION) if _holds(storage, p := f"{root}{name}/")), None)
    if prefix is None:
        notes.append(f"no {root}val/: only split {TRAIN}")
        return []
    if _is_flat(storage, prefix):
        if not synsets.truth:
            raise SourceError(
                f"{storage.url}/{prefix}: images without class folders and no {SOLUTION} with their labels; put it "
                f"into {storage.url}, or sort them into folders nNNNNNNNN"
            )
        return _validation_units({"kind": "validation folder", "prefix": prefix}, labels, synsets, notes)
    counts, strays = _class_folders(storage, prefix)
    if others := [wnid for wnid in counts if wnid not in labels]:
        num_left_out = sum(counts.pop(wnid) for wnid in others)
        notes.append(_left_out(num_left_out, num_left_out + counts.total()))
    return _folder_units(prefix, VALIDATION, counts, labels) + _stray_units(VALIDATION, strays)


def _is_flat(storage: Storage, prefix: str) -> bool:
    return _holds(storage, f"{prefix}ILSVRC2012_val_")


def _folder_units(prefix: str, split: str, counts: Counter[str], labels: dict[str, int]) -> list[Unit]:
    return [
        {
            "kind": "class folder",
            "split": split,
            "prefix": f"{prefix}{wnid}/",
            "label": labels[wnid],
            "num_files": count,
        }
        for wnid, count in sorted(counts.items())
    ]


def _index_class_folder(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    num_files = 0
    for stat in storage.list(unit["prefix"]):
        num_files += 1
        if reason := _why_no_image(stat.name):
            yield Rejected(name=stat.name, split=unit["split"], reason=reason, extent=_whole(stat))
        else:
            yield _sample(stat.name, unit["split"], unit["label"], _whole(stat))
    if num_files != unit["num_files"]:
        raise ChangedInput(
            f"{storage.url}/{unit['prefix']}: {num_files} files, {unit['num_files']} when it was surveyed; "
            "start again when nothing writes there any more"
        )


def _index_validation_folder(storage: Storage, unit: Unit) -> Iterator[RawSample | Rejected]:
    for stat in storage.list(unit["prefix"]):
        yield from _validation_sample(stat.name, _whole(stat), unit)


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
    return RawSample(name=name, key=_stem(name), split=split, label=label, image=IMAGE, fields={IMAGE: extent})


def _stem(name: str) -> str:
    base = name.rpartition("/")[2]
    return base.rpartition(".")[0] or base


def _why_no_image(name: str) -> str | None:
    suffix = name.rpartition(".")[2].lower()
    return None if suffix in ("jpeg", "jpg", "png") else "is not named .JPEG, .jpg or .png"


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
