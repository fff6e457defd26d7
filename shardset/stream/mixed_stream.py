"""Several shard sets in every batch, each with its exact share of the lanes.

An epoch of a shard set is as long as the set, and the next one begins when it ends. Rows that not
all lanes of a set can fill are left out of that epoch (the next epoch leaves out others), so quotas
hold in every batch.
"""

import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np

from shardset.errors import BudgetTooSmall, ConfigError, require_int
from shardset.format.manifest import SetUrl
from shardset.order.budget import BUDGET_BYTES, MIB
from shardset.order.lanes import check_world, default_lanes, lanes_of_reader, rank_part
from shardset.order.permutation import derive_key
from shardset.order.state import OrderState, state_from_values
from shardset.stream.presets import ImageChoice, choose_image
from shardset.stream.source import warn_of_shared_lanes
from shardset.stream.spec import Batch, MixedOptions, lists_options
from shardset.stream.stream import Stream


@dataclass(frozen=True, slots=True)
class Share:
    """A split of a shard set and its weight in the mixture.

    Args:
        manifest_url: The set, as in `Stream`.
        split: The name of the split.
        weight: Any positive number. The share of a set is its weight divided by the sum of all,
            rounded to whole lanes.
    """

    manifest_url: SetUrl
    split: str
    weight: float


def share_lanes(weights: Sequence[float], num_lanes: int) -> list[int]:
    """Lanes of each set, by largest remainder of `weight * num_lanes`; raises ConfigError if a set
    gets none.
    """
    if not (weights and min(weights) > 0 and math.isfinite(sum(weights))):
        raise ConfigError(
            f"weights are {list(weights)}, expected at least one, all above 0 and finite"
        )
    wanted = np.array(weights, dtype=np.float64) / sum(weights) * num_lanes
    lanes = np.floor(wanted).astype(int)
    order = np.argsort(lanes - wanted, kind="stable")
    lanes[order[: num_lanes - lanes.sum()]] += 1
    if lanes.min() < 1:
        raise ConfigError(
            f"weights {list(weights)} over {num_lanes} lanes leave set {lanes.argmin()} without"
            " one; raise its weight, or the lanes (a divisor of the global batch size)"
        )
    return [int(count) for count in lanes]


class MixedStream:
    """One process's part of batches that hold the exact share of every shard set.

    The epochs of each set are as long as the set.

    Args:
        shares: The splits and their weights.
        global_batch_size: Samples of all processes and all sets in a batch.
        rank: The number of this process, from 0.
        world_size: The number of processes.
        seed: Determines the orders and all randomness.
        image_size: Height and width of the images in pixels, for one of the presets of `image`.
        image: A preset, an ImageSpec or None, as in `Stream`.
        num_lanes: Lanes of all sets together, a divisor of the global batch size.
        budget_bytes: Memory of this process for all sets together; each gets an equal part of it,
            whatever its weight.
        **options: Those that follow mean the same as in `Stream`.

    Attributes:
        streams: The Stream of each set, in the order of the shares.
        lanes: The number of lanes of each set.

    Raises:
        ConfigError: Weights, lanes, batch and world do not fit, or a label stands for classes of
            different names.
        BudgetTooSmall: `budget_bytes` is too small; `enough` of the error would do.
        ManifestError: There is no complete shard set or no such split.

    Examples:
        >>> from shardset import MixedStream, Share
        >>> shares = [Share("shards", "train", 3), Share("others", "train", 1)]
        >>> mixed = MixedStream(
        ...     shares, global_batch_size=8, rank=0, world_size=1, seed=7, image_size=32
        ... )
        >>> step, batch = next(mixed.batches())
        >>> batch["source"].tolist()
        [0, 0, 0, 0, 0, 0, 1, 1]
    """

    @lists_options
    def __init__(
        self,
        shares: Sequence[Share],
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        image_size: int | None = None,
        image: ImageChoice = "auto",
        num_lanes: int | None = None,
        budget_bytes: int = BUDGET_BYTES,
        **options: Unpack[MixedOptions],
    ) -> None:
        rank, world_size = require_int("rank", rank), require_int("world_size", world_size)
        global_batch_size = require_int("global_batch_size", global_batch_size)
        check_world(global_batch_size, rank, world_size)
        if seed is None:
            raise ConfigError(
                "a mixture has no stored order, so it needs a seed; evaluate each set by its own"
                " Stream"
            )
        self._shares, self._seed, self._budget_bytes = shares, seed, budget_bytes
        self._image = choose_image(image, image_size, seed, has_views="views" in options)
        self._options = options
        self._global_batch_size, self._rank, self._world_size = global_batch_size, rank, world_size
        self._num_lanes = None if num_lanes is None else require_int("num_lanes", num_lanes)
        num_samples = max(1, global_batch_size // options.get("augment_repeats", 1))
        # They do not grow with the batch: how much memory the sets leave is known only after they
        # were opened.
        usual = default_lanes(num_samples, world_size, wide=0)
        self.lanes = self._share(usual if self._num_lanes is None else self._num_lanes)
        self.streams = self._open(self.lanes)
        self._check_classes()
        self._shares = [
            replace(share, manifest_url=stream.source.loaded)
            for share, stream in zip(shares, self.streams, strict=True)
        ]

    def _check_classes(self) -> None:
        """Raises ConfigError if a label means two classes."""
        longest = max((stream.classes for stream in self.streams), key=len)
        for share, stream in zip(self._shares, self.streams, strict=True):
            if stream.classes != longest[: len(stream.classes)]:
                raise ConfigError(
                    f"{stream.source.table.storage.url} {share.split}: its labels are of other"
                    f" classes than those of the other sets; build them with the same class names"
                    " in the same order, or give a view of it a column of labels"
                )

    def _share(self, num_lanes: int) -> list[int]:
        """Lanes of each set; raises ConfigError where batch or weights do not allow so many."""
        size = self._global_batch_size
        if num_lanes < 1 or size % num_lanes:
            raise ConfigError(
                f"{num_lanes} lanes do not divide a global batch of {size}; use a divisor"
            )
        return share_lanes([share.weight for share in self._shares], num_lanes)

    def _open(self, lanes: Sequence[int]) -> list[Stream]:
        """The streams of the sets, each with its lanes; raises BudgetTooSmall with one that is
        enough for all.
        """
        streams: list[Stream] = []
        refused: list[BudgetTooSmall] = []
        for number in range(len(lanes)):
            try:
                streams.append(self._open_set(number, lanes))
            except BudgetTooSmall as error:
                refused.append(error)
        if refused:
            enough = len(lanes) * max(error.enough for error in refused)
            raise BudgetTooSmall(
                f"{len(lanes)} shard sets have {self._budget_bytes // MIB:,} MiB together, an equal"
                f" part each, which is too little for {len(refused)} of them; raise budget_bytes to"
                f" {enough} ({enough // MIB:,} MiB), or lower window, num_lanes, prefetch or the"
                " batch size",
                enough,
            )
        warn_of_shared_lanes(sum(lanes), self._global_batch_size, self._rank, self._world_size)
        return streams

    def _open_set(self, number: int, lanes: Sequence[int]) -> Stream:
        share, num_own = self._shares[number], lanes[number]
        num_items = self._global_batch_size // sum(lanes)
        size, begin = num_own * num_items, sum(lanes[:number]) * num_items
        part = rank_part(self._global_batch_size, self._rank, self._world_size)
        options: Any = {
            **self._options,
            "part": range(*(min(max(slot - begin, 0), size) for slot in (part.start, part.stop))),
        }
        return Stream(
            share.manifest_url,
            share.split,
            global_batch_size=size,
            rank=0,
            # As many equal readers as give each of them at least the lanes of any replica.
            world_size=max(1, num_own // lanes_of_reader(sum(lanes), self._world_size)),
            seed=derive_key(self._seed, "mixture", number),
            image=self._image,
            num_lanes=num_own,
            last_batch="drop",
            budget_bytes=self._budget_bytes // len(lanes),
            **options,
        )

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the streams in their order: the same in all processes of a run."""
        return "; ".join(stream.fingerprint for stream in self.streams)

    def batches(self, start_step: int = 0) -> Generator[tuple[int, Batch], None, None]:
        """The batches from a step on, for ever.

        Args:
            start_step: The first step of the run, from 0.

        Yields:
            (step, Batch). The batch has the names of a Stream's: `image` uint8 [n, size, size, 3],
            `label`, `weight`, `id`, ..., and `source` int64 [n], the number of the share. The
            samples of a set are next to each other, and `id` and `label` count in the set.

        Raises:
            DamagedShard: Stored bytes differ from their checksum.
            UndecodableImage: The bytes of a sample are no image.
            StorageError: The storage refused or failed, after retries.
        """
        numbered = [
            (number, stream) for number, stream in enumerate(self.streams) if stream.batch_size
        ]
        runs = [stream.epochs(*divmod(start_step, len(stream))) for _, stream in numbered]
        try:
            for step in itertools.count(start_step):
                batches = [next(run)[2] for run in runs]
                for (number, stream), batch in zip(numbered, batches, strict=True):
                    batch["source"] = np.full(stream.batch_size, number, np.int64)
                yield step, batches[0] if len(batches) == 1 else _concatenate(batches)
        finally:
            for run in runs:
                run.close()

    def state(self, step: int) -> list[dict[str, Any]]:
        """The state before a step.

        Args:
            step: The step of the run, from 0.

        Returns:
            The state of each set's Stream: numbers and strings by name.
        """
        return [stream.state(*divmod(step, len(stream))) for stream in self.streams]

    def load_state(self, states: Sequence[Mapping[str, Any] | OrderState]) -> int:
        """Continues at a state, whatever the number of processes was.

        Args:
            states: The result of `state`.

        Returns:
            The step to give to `batches`.

        Raises:
            ConfigError: Sets, lanes, seed or order differ; the message names the difference.
        """
        saved = [state_from_values(state, OrderState) for state in states]
        if len(states) != len(self.streams):
            raise ConfigError(
                f"there are {len(states)} states for {len(self.streams)} shard sets; give the same"
                " sets, or start a new run"
            )
        lanes = [state.num_lanes for state in saved]
        here = self._share(sum(lanes) if self._num_lanes is None else self._num_lanes)
        if lanes != here:
            raise ConfigError(
                f"the shard sets have {here} lanes here and had {lanes} lanes there; they follow"
                " from the weights and num_lanes; use the same, or start a new run"
            )
        streams = self.streams if lanes == self.lanes else self._open(lanes)
        steps = set()
        for stream, state in zip(streams, saved, strict=True):
            epoch, step = stream.load_state_dict(state)
            steps.add(epoch * len(stream) + step)
        if len(steps) != 1:
            raise ConfigError(
                f"the states are of steps {sorted(steps)}, expected one; they are not of one"
                " mixture"
            )
        self.lanes, self.streams = lanes, streams
        return steps.pop()


def _concatenate(batches: Sequence[Batch]) -> Batch:
    columns = {name: [batch[name] for batch in batches] for name in batches[0]}
    return {
        name: (
            np.concatenate(values)
            if isinstance(values[0], np.ndarray)
            else list(itertools.chain(*values))
        )
        for name, values in columns.items()
    }
