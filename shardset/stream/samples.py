"""Single samples of a split, by id or key: a map-style dataset."""

import builtins
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from shardset.errors import ConfigError, UndecodableImage, brought_by
from shardset.format.images import FIELD_OF_EXTENSION
from shardset.format.manifest import LoadedSet, SetUrl, load_set
from shardset.order.epoch import Order
from shardset.per_process import PerProcess
from shardset.read.indexes import ShardTable
from shardset.read.pending import PendingSamples
from shardset.read.sample_reader import open_sample_reader


@dataclass(frozen=True)
class Sample:
    """One stored sample.

    Attributes:
        id: Its number in the split.
        key: Its name, unique in the set.
        label: The number of its class; -1 if it has none.
        class_name: The name of its class; empty if it has none.
        fields: Its stored bytes by field, such as "jpg", "cls", "json".
        where: Shard, key and byte offset: how each message about the sample begins.
    """

    id: int
    key: str
    label: int
    class_name: str
    fields: dict[str, bytes] = field(repr=False)
    where: str

    @cached_property
    def image(self) -> np.ndarray:
        """The decoded image: uint8 [height, width, 3], RGB.

        Raises:
            UndecodableImage: There is no image, or its bytes are none.
            MissingLibrary: The decoders of `pip install 'shardset[read]'` are missing.
        """
        with brought_by("read"):  # late, as the bytes of samples need no decoder
            from shardset.decode.image import decode
        try:
            return decode(self.bytes)
        except UndecodableImage as error:
            raise UndecodableImage(f"{self.where}: {error}") from error

    @property
    def bytes(self) -> builtins.bytes:
        """The encoded image as it is stored.

        Raises:
            UndecodableImage: No field is an image.
        """
        for name, content in self.fields.items():
            if name in FIELD_OF_EXTENSION:
                return content
        raise UndecodableImage(f"{self.where}: it has no image among {sorted(self.fields)}")


class SampleSet:
    """The samples of a split by number or key, each read when it is asked for.

    `shardset.open` makes one. The number of a sample is its id; in a view, it counts the samples of
    the view. It works as a map-style dataset in DataLoader workers. Every access is a read of its
    own: for whole epochs a Stream is many times faster.

    Args:
        loaded: The set, from `shardset.load`.
        split: The name of the split.
        transform: Changes each Sample; the set gives its result.

    Attributes:
        manifest: The Manifest of the set.
        split: The Split that is read.
    """

    def __init__(
        self, loaded: LoadedSet, split: str, transform: Callable[[Sample], Any] | None = None
    ) -> None:
        self.manifest, storage = loaded.manifest, loaded.storage
        self.view = loaded.part(split)
        self.split, self.split_name, self.transform = self.manifest.split(split), split, transform
        self.table = ShardTable(storage, self.split, with_keys=True)
        sizes = self.split.shard_sizes
        self._order = Order(
            shard_sizes=sizes,
            seed=None,
            global_batch_size=1,
            num_lanes=1,
            block_size=max(sizes),
            window=0,
        )
        self._lock = PerProcess(threading.Lock)
        # The budget bounds what a reader fetches ahead, and this one fetches nothing ahead.
        self._reader = PerProcess(
            partial(open_sample_reader, self._order, self.table, budget_bytes=0)
        )
        self._close_with_set()

    def __len__(self) -> int:
        """Samples of the split or view."""
        return self.view.selection.num_kept

    def __iter__(self) -> Iterator[Any]:
        """All samples, one after the other.

        Yields:
            What `samples[index]` gives for each number.
        """
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: SupportsIndex | str) -> Any:
        """A sample by number or key.

        Args:
            index: A number, negative from the end, or a key.

        Returns:
            The Sample, or the result of `transform` for it.

        Raises:
            IndexError: There is no such number.
            KeyError: There is no such key.
            DamagedShard: Stored bytes differ from their checksum.
            StorageError: The storage refused or failed, after retries.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indexes: Sequence[SupportsIndex | str]) -> list[Any]:
        """Several samples, which are read from a bucket at the same time.

        Args:
            indexes: Numbers and keys.

        Returns:
            A list of what `samples[index]` gives for each.
        """
        ids = [
            self.id_of(index) if isinstance(index, str) else self._checked(index)
            for index in indexes
        ]
        samples = self._read(np.array(ids, np.int64)) if ids else []
        return samples if self.transform is None else [*map(self.transform, samples)]

    def __contains__(self, index: object) -> bool:
        """Whether there is a sample of this number or key."""
        if isinstance(index, str):
            return self._find(index) is not None
        return isinstance(index, int | np.integer) and -len(self) <= int(index) < len(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__}
        state.pop("_keys_and_ids", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._close_with_set()

    @property
    def classes(self) -> list[str]:
        """The names of the classes, by label."""
        return [info.name for info in self.manifest.classes]

    def id_of(self, key: str) -> int:
        """The id of a key; the first call reads all indexes of the split.

        Args:
            key: The key of the sample.

        Raises:
            KeyError: There is no such key.
        """
        id_ = self._find(key)
        if id_ is None:
            raise KeyError(
                f"no sample of split {self.split_name!r} has the key {key!r}; `shardset inspect`"
                " finds the key of an original name by --name"
            )
        return id_

    def close(self) -> None:
        """Ends the threads that read from a bucket; a later access starts new ones."""
        with self._lock():
            readers = self._reader.take()
        for reader in readers:
            reader.close()

    def _close_with_set(self) -> None:
        weakref.finalize(self, _close_later, self._reader).atexit = False

    def _find(self, key: str) -> int | None:
        keys, ids = self._keys_and_ids
        wanted = key.encode("ascii", "replace")
        at = np.searchsorted(keys, np.bytes_(wanted))
        return int(ids[at]) if at < len(keys) and keys[at] == wanted else None

    @cached_property
    def _keys_and_ids(self) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        """All keys of the split or view, sorted, and their ids."""
        keys = self.table.keys()
        ids = np.argsort(keys, kind="stable")
        ids = ids[self.view.selection.has(ids)]
        return keys[ids], ids

    def _checked(self, index: SupportsIndex) -> int:
        try:
            number = range(len(self))[operator.index(index)]
        except IndexError:
            raise IndexError(
                f"there is no sample {index} in split {self.split_name!r} of {len(self)} samples"
            ) from None
        return self.view.selection.id_of(np.array(number)).item()

    def _read(self, ids: NDArray[np.int64]) -> list[Sample]:
        addresses = self.table.addresses(*self._order.slots_of(ids))
        with self._lock():
            pending = self._reader().read_single(addresses)
        return [self._sample(pending, number, id_) for number, id_ in enumerate(ids.tolist())]

    def _sample(self, pending: PendingSamples, number: int, id_: int) -> Sample:
        contents, addresses = pending.take(number), pending.addresses
        assert addresses.keys is not None
        key, address = addresses.keys[number], addresses[number]
        label = self.view.labels_of(np.array([id_]), addresses.labels[number : number + 1]).item()
        stored = zip(self.split.fields, contents, strict=True)
        return Sample(
            id=id_,
            key=key,
            label=label,
            class_name=self.manifest.class_name(label),
            fields={name: content for name, content in stored if content is not None},
            where=f"{self.table.url(address.shard)}: sample {key!r} at byte {address.start}",
        )


def open(
    manifest_url: SetUrl,
    split: str | None = None,
    *,
    transform: Callable[[Sample], Any] | None = None,
) -> SampleSet:
    """The samples of a split by number or key.

    Args:
        manifest_url: The set, as in `Stream`.
        split: The name of the split; may be left out if there is only one.
        transform: Changes each Sample; the set gives its result.

    Returns:
        A SampleSet, which also works as a map-style dataset in DataLoader workers.

    Raises:
        ManifestError: There is no complete shard set or no such split.
        ConfigError: There are several splits and none is named.

    Examples:
        >>> import shardset
        >>> samples = shardset.open("shards", "train")
        >>> sample = samples[17]
        >>> len(samples), sample.id, sample.image.shape
        (20, 17, (40, 50, 3))
        >>> samples[sample.key].id
        17
    """
    loaded = load_set(manifest_url)
    if split is None:
        names = sorted(loaded.manifest.splits)
        if len(names) > 1:
            raise ConfigError(
                f"the shard set has several splits, {', '.join(names)}; name one: open(url,"
                f" {names[0]!r})"
            )
        [split] = names
    return SampleSet(loaded, split, transform)


def _close_later(readers: PerProcess[Any]) -> None:
    """Ends the threads of a dropped set's reader, which would live on."""
    for reader in readers.take():
        # In a thread: garbage is collected anywhere, also where this thread holds a lock of the
        # reader.
        threading.Thread(target=reader.close, name="shardset-close", daemon=True).start()
