"""An opened split: its order, its memory and its shards, built from a spec by one function."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardset.decode.memory_cache import MemoryCache
from shardset.decode.workers import SharedImages, WorkerPool
from shardset.errors import ConfigError
from shardset.format.columns import BATCH_NAMES, StoredColumn, open_column
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import LoadedSet, Manifest, Split, load_set
from shardset.format.view import ViewSplit
from shardset.order.budget import Memory, fit_memory, fit_order
from shardset.order.epoch import Order
from shardset.order.lanes import LITTLE_MORE, largest_divisor, read_factor
from shardset.read.addresses import SampleAddresses
from shardset.read.disk_cache import BlockCache
from shardset.read.indexes import ShardTable
from shardset.read.local import SMALL_BYTES
from shardset.stream.spec import StreamSpec

_log = logging.getLogger(__name__)

MAX_WORKERS = 8
"""Most processes that decode small images: more would wait for the thread that feeds them."""

MIN_DECODED = 20_000
"""Fewest small images for which such processes pay; starting one takes 0.2 s of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """The source of a stream: the split of a manifest, the order of its samples and where their
    bytes are.
    """

    spec: StreamSpec
    loaded: LoadedSet
    view: ViewSplit
    split: Split
    order: Order
    memory: Memory
    table: ShardTable
    disk_cache: BlockCache | None
    columns: Sequence[tuple[StoredColumn, ShardTable]] = ()

    @property
    def manifest(self) -> Manifest:
        """The manifest of the set."""
        return self.loaded.manifest

    @property
    def has_small_samples(self) -> bool:
        """Whether reading a sample takes about as long as switching threads."""
        return self.split.num_tar_bytes <= SMALL_BYTES * self.split.num_samples

    def addresses(self, ids: np.ndarray) -> SampleAddresses:
        """Where samples are stored, by id."""
        return self.table.addresses(*self.order.slots_of(ids))


@dataclass(frozen=True, slots=True)
class DecodeAids:
    """Aids for small images, for the life of a stream: a cache of all of them, and
    processes that decode.
    """

    cache: MemoryCache | None = None
    workers: WorkerPool | None = None


def open_source(spec: StreamSpec) -> StreamSource:
    """Opens the split of a spec and fits order and memory to its budget.

    Raises ConfigError where the spec does not fit the split, ManifestError if there is no complete
    shard set.
    """
    loaded = load_set(spec.manifest_url)
    storage, view = loaded.storage, loaded.part(spec.split)
    split = loaded.manifest.split(spec.split)
    _check_fields(split, spec)
    if spec.disk_cache is not None and not storage.is_remote:
        raise ConfigError(f"{storage.url} lies on a local disk already; leave the disk cache out")
    disk_cache = None if spec.disk_cache is None else BlockCache(spec.disk_cache, split)
    columns = [open_column(loaded, spec.split, name) for name in spec.columns]
    # of the samples alone: the order is the same with columns and without
    stored_bytes = split.num_tar_bytes
    order = fit_order(split.shard_sizes, spec, stored_bytes=stored_bytes, view=view.selection)
    if not order.num_batches:
        raise ConfigError(
            f"{storage.url} {spec.split}: {order.num_samples} samples do not fill one batch of"
            f" {order.global_batch_size}; lower the global batch size (in a mixture, the weight),"
            " or use last_batch='pad'"
        )
    if spec.part is None:  # a mixture warns for all of its sets
        warn_of_shared_lanes(order.num_lanes, spec.global_batch_size, spec.rank, spec.world_size)
    image_bytes = sum(getattr(rows, "nbytes", 0) for rows in spec.empty_rows(1).values())
    memory = fit_memory(
        order,
        spec,
        spec.slots,
        stored_bytes=stored_bytes + sum(column.split.num_tar_bytes for column in columns),
        image_bytes=image_bytes,
        cache_bytes=split.num_samples * image_bytes if spec.keeps_images else None,
        prefetch=spec.prefetch,
    )
    # The disk cache looks up samples by their place in a shard, for which it needs whole indexes.
    table = ShardTable(storage, split, with_keys=spec.with_key, by_rows=disk_cache is None)
    return StreamSource(
        spec=spec,
        loaded=loaded,
        view=view,
        split=split,
        order=order,
        memory=memory,
        table=table,
        disk_cache=disk_cache,
        columns=[(column, ShardTable(column.storage, column.split)) for column in columns],
    )


def open_decode_aids(source: StreamSource) -> DecodeAids:
    """The cache if all images fit the budget, and the processes if there are many small images."""
    spec, num_images = source.spec, source.split.num_samples
    image, num_threads = spec.image, min(spec.num_decode_threads, MAX_WORKERS)
    if image is None or spec.follows_crop:
        return DecodeAids()
    kept = SharedImages(num_images, image.size) if source.memory.cache else None
    workers = None
    if source.has_small_samples and num_images >= MIN_DECODED and num_threads > 1:
        workers = WorkerPool(image, num_threads, len(spec.slots), kept)
    return DecodeAids(None if kept is None else MemoryCache(kept), workers)


def warn_of_shared_lanes(
    num_lanes: int, global_batch_size: int, rank: int, world_size: int
) -> None:
    """Has the first replica log what readers that share lanes read more than once."""
    factor = read_factor(num_lanes, global_batch_size, world_size)
    if rank == 0 and factor > LITTLE_MORE:
        _log.warning(
            "%d readers share the %d lanes of this order, so they read up to %.2f times the "
            "stored bytes; %d readers would share none",
            world_size,
            num_lanes,
            factor,
            largest_divisor(num_lanes, world_size),
        )


def _check_fields(split: Split, spec: StreamSpec) -> None:
    split.check_fields([*spec.fields, *(target.field for target in spec.targets.values())])
    names = [*spec.fields, *spec.columns, *spec.views]
    names += [name + end for name, target in spec.targets.items() for end in target.empty(0, 1)]
    if reserved := [name for name in names if name in BATCH_NAMES or names.count(name) > 1]:
        raise ConfigError(f"a batch already has a {reserved[0]!r}; use another name for that one")
    if spec.decodes and FIELD_OF_EXTENSION.keys().isdisjoint(split.fields):
        raise ConfigError(
            f"this split has no images, only {', '.join(split.fields)}; use image=None"
        )
