"""Reads what a report shows of a shard set: every index, and as many samples as were chosen, each checked.

What can't be read is named and left out: a report of a damaged set says where the damage is.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import google_crc32c
import numpy as np

from pipelines.report.near_duplicates import crc_before
from shardset.errors import DamagedShard, NotFound, StorageError, UndecodableImage
from shardset.format.images import IMAGE_FIELDS
from shardset.format.index import index_fields
from shardset.format.manifest import Manifest, Shard
from shardset.order.permutation import derive_key, hash64
from shardset.read.indexes import read_index
from shardset.storage.base import Storage

T = TypeVar("T")

THREADS = 16
MAX_SAMPLES = 4_000_000
"""A catalog of more would not fit: of larger sets every second, third, ... shard is looked into."""

WITHOUT_PICTURE = ("no image", "no 8-bit form")
"""Reasons that are no damage: a sample of text, an image of 32-bit numbers."""

MAX_GAP = 64 * 1024
MAX_READ = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that could not be read: a path relative to the manifest (and a key), and what is wrong with it."""

    where: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A shard and its index."""

    split: str
    number: int
    shard: Shard
    index: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All samples of the shards that were opened, numbered one after another; arrays have one entry a sample.

    `content_crc` and `content_bytes` are those of all fields but a `cls` at the end, `image_bytes` is 0 where there
    is no image. `num_left_out` counts the samples of the shards that a large set has beyond MAX_SAMPLES.
    """

    splits: list[str]
    opened: list[Opened]
    num_left_out: int

    @cached_property
    def starts(self) -> np.ndarray:
        """The number of each shard's first sample, and that of all samples."""
        return np.cumsum([0, *(len(one.index) for one in self.opened)])

    @cached_property
    def split(self) -> np.ndarray:
        """The place of the sample's split in `splits`."""
        return np.concatenate(
            [np.full(len(one.index), self.splits.index(one.split), np.int32) for one in self.opened]
            or [np.zeros(0, np.int32)]
        )

    @cached_property
    def label(self) -> np.ndarray:
        """-1 where there is none."""
        return self._column("label", np.int64)

    @cached_property
    def copy(self) -> np.ndarray:
        """0, or the number of the repeat."""
        return self._column("copy", np.int64)

    @cached_property
    def rank(self) -> np.ndarray:
        """A random number of each sample, the same in every look at the same set."""
        none = [np.zeros(0, np.int64)]
        ids = np.concatenate([one.shard.first_id + np.arange(len(one.index)) for one in self.opened] or none)
        return hash64(derive_key(0, "report"), self.split, ids)

    @cached_property
    def image_bytes(self) -> np.ndarray:
        """Size of the sample's image."""
        return np.concatenate([_image_bytes(one.index) for one in self.opened] or [np.zeros(0, np.int64)])

    @cached_property
    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """CRC32C and size of what counts when samples are compared."""
        found = [_contents(one.index) for one in self.opened] or [(np.zeros(0, np.uint32), np.zeros(0, np.int64))]
        return np.concatenate([crc for crc, _ in found]), np.concatenate([size for _, size in found])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def at(self, sample: int) -> tuple[Opened, int]:
        """The shard that holds a sample, and its position there."""
        holder = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return self.opened[holder], sample - int(self.starts[holder])

    def key(self, sample: int) -> str:
        """The sample's key."""
        opened, row = self.at(sample)
        return opened.index["key"][row].decode("ascii", "replace")

    def _column(self, name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([one.index[name].astype(dtype) for one in self.opened] or [np.zeros(0, dtype)])


def open_catalog(storage: Storage, manifest: Manifest) -> tuple[Catalog, list[Damage]]:
    """The catalog of a set, and the indexes that are damaged or gone."""
    step = max(1, -(-sum(split.num_samples for split in manifest.splits.values()) // MAX_SAMPLES))
    every = [
        (name, number, shard) for name, split in manifest.splits.items() for number, shard in enumerate(split.shards)
    ]
    wanted = [one for one in every if one[1] % step == 0]

    def opened(one: tuple[str, int, Shard]) -> Opened | Damage:
        shard = one[2]
        try:
            index = read_index(storage, shard)
        except (DamagedShard, StorageError) as error:
            return Damage(shard.index.path, _sentence(error, f"{storage.url}/{shard.index.path}"))
        if len(index) != shard.num_samples:
            return Damage(shard.index.path, f"lists {len(index)} samples, the manifest says {shard.num_samples}")
        return Opened(*one, index)

    with ThreadPoolExecutor(THREADS) as threads:
        found = list(threads.map(opened, wanted))
    catalog = Catalog(
        splits=list(manifest.splits),
        opened=[one for one in found if isinstance(one, Opened)],
        num_left_out=sum(one[2].num_samples for one in every) - sum(one[2].num_samples for one in wanted),
    )
    return catalog, [one for one in found if isinstance(one, Damage)]


def choose(catalog: Catalog, most: int) -> np.ndarray:
    """At most so many samples with images, ascending: each split gets the same number, or all that it has."""
    able = np.flatnonzero((catalog.image_bytes > 0) & (catalog.copy == 0))
    groups = [able[catalog.split[able] == number] for number in range(len(catalog.splits))]
    chosen, left = [], most
    for done, group in enumerate(sorted(groups, key=len)):
        share = min(len(group), left // (len(groups) - done))
        chosen.append(group[np.argsort(catalog.rank[group], kind="stable")[:share]])
        left -= share
    return np.sort(np.concatenate(chosen)) if chosen else able


def first_of_each(catalog: Catalog, of: np.ndarray, most: int) -> dict[int, list[int]]:
    """Value of `of` -> the first `most` samples with images that have it, in the order of their ranks."""
    able = np.flatnonzero(catalog.image_bytes > 0)
    order = able[np.lexsort((catalog.rank[able], of[able]))]
    values, starts = np.unique(of[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)][: len(values)]
    return {
        value: order[start : min(stop, start + most)].tolist()
        for value, start, stop in zip(values.tolist(), starts.tolist(), stops, strict=True)
    }


def read_each(
    storage: Storage, catalog: Catalog, samples: np.ndarray, use: Callable[[dict[str, bytes]], T]
) -> tuple[dict[int, T], list[Damage]]:
    """What `use` makes of the fields of each sample, and what is damaged or does not decode; runs in threads.

    A sample that `use` finds WITHOUT_PICTURE is in neither.
    """
    samples = np.unique(samples)
    cuts = np.searchsorted(samples, catalog.starts)
    tasks = [
        (opened, int(catalog.starts[number]), samples[cuts[number] : cuts[number + 1]] - catalog.starts[number])
        for number, opened in enumerate(catalog.opened)
        if cuts[number + 1] > cuts[number]
    ]
    found: dict[int, T] = {}
    damage: list[Damage] = []
    with ThreadPoolExecutor(THREADS) as threads:
        for mine, wrong in threads.map(lambda task: _read_shard(storage, task, use), tasks):
            found |= mine
            damage += wrong
    return found, damage


def image_of(contents: dict[str, bytes]) -> bytes:
    """The image among a sample's fields; raises UndecodableImage if there is none."""
    for name, content in contents.items():
        if name.rpartition(".")[2] in IMAGE_FIELDS:
            return content
    raise UndecodableImage("no image")


def _read_shard(
    storage: Storage, task: tuple[Opened, int, np.ndarray], use: Callable[[dict[str, bytes]], T]
) -> tuple[dict[int, T], list[Damage]]:
    opened, start, rows = task
    found: dict[int, T] = {}
    damage: list[Damage] = []
    places = {row: _places(opened.index, row) for row in rows.tolist()}
    try:
        for row, contents in _contents_of(storage, opened.shard.path, places):
            if not _is_whole(contents, opened.index, row):
                contents = dict(next(_contents_of(storage, opened.shard.path, {row: places[row]}))[1])
            where = f"{opened.shard.path}, sample {opened.index['key'][row].decode('ascii', 'replace')}"
            if not _is_whole(contents, opened.index, row):
                damage.append(
                    Damage(where, "its CRC32C is not that of the index; rebuild the shard with --only-shards")
                )
                continue
            try:
                found[start + row] = use(contents)
            except UndecodableImage as error:
                if error.reason not in WITHOUT_PICTURE:
                    damage.append(Damage(where, f"can't be decoded: {error}; build again with --verify decode"))
    except StorageError as error:
        damage.append(Damage(opened.shard.path, _sentence(error, f"{storage.url}/{opened.shard.path}")))
    return found, damage


def _contents_of(
    storage: Storage, path: str, places: dict[int, list[tuple[int, int, str]]]
) -> Iterator[tuple[int, dict[str, bytes]]]:
    """(row, field -> content in member order), neighbours read together."""
    for run in _runs(sorted(places, key=lambda row: places[row][0]), places):
        start = places[run[0]][0][0]
        data = storage.read(path, start, _stop(places[run[-1]]))
        for row in run:
            yield row, {name: data[at - start : at - start + size] for at, size, name in places[row]}


def _runs(rows: Sequence[int], places: dict[int, list[tuple[int, int, str]]]) -> Iterator[list[int]]:
    run: list[int] = []
    for row in rows:
        start, stop = places[row][0][0], _stop(places[row])
        if run and (start - _stop(places[run[-1]]) > MAX_GAP or stop - places[run[0]][0][0] > MAX_READ):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _stop(fields: list[tuple[int, int, str]]) -> int:
    return max(at + size for at, size, _ in fields)


def _places(index: np.ndarray, row: int) -> list[tuple[int, int, str]]:
    """(offset, size, field) of a sample's fields, in member order."""
    record = index[row]
    places = [(int(record[f".{name}"][0]), int(record[f".{name}"][1]), name) for name in index_fields(index)]
    return sorted(place for place in places if place[0])


def _image_bytes(index: np.ndarray) -> np.ndarray:
    found = np.zeros(len(index), np.int64)
    for name in index_fields(index):
        if name.rpartition(".")[2] in IMAGE_FIELDS:
            found = np.where(found == 0, index[f".{name}"]["num_bytes"].astype(np.int64), found)
    return found


def _contents(index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """See Catalog.contents: where the label's digits are the last bytes, they are taken off."""
    names = index_fields(index)
    size = sum((index[f".{name}"]["num_bytes"].astype(np.int64) for name in names), np.zeros(len(index), np.int64))
    crc, label = index["crc32c"].astype(np.uint32), index["label"]
    if "cls" not in names:
        return crc, size
    last = np.max([index[f".{name}"]["offset"] for name in names], axis=0) == index[".cls"]["offset"]
    digits = np.array([len(str(one)) for one in label.tolist()])
    plain = last & (label >= 0) & (index[".cls"]["num_bytes"] == digits)
    crc = crc.copy()
    crc[plain] = crc_before(crc[plain], label[plain])
    return crc, size - np.where(plain, digits, 0)


def _is_whole(contents: dict[str, bytes], index: np.ndarray, row: int) -> bool:
    crc = 0
    for content in contents.values():
        crc = google_crc32c.extend(crc, content)
    return crc == int(index["crc32c"][row])


def _sentence(error: Exception, where: str) -> str:
    return (
        "is missing; restore it, or rebuild the shard"
        if isinstance(error, NotFound)
        else str(error).removeprefix(f"{where}: ")
    )
