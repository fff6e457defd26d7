"""Several shard sets in every batch, each with its exact share: a share of the lanes.

    mixed = MixedStream([Share("gs://bucket/photos", "train", 3), Share("gs://bucket/drawings", "train", 1)],
                        global_batch_size=256, rank=0, world_size=1, seed=7, image=ImageSpec(size=224))
    for step, batch in mixed.batches():
        batch["image"], batch["label"], batch["source"]   # 0: photos, 1: drawings

Each shard set has epochs of its own length and starts its next one when the last is through. Rows that not all lanes
of a shard set can fill are left out of that epoch (the next one's order takes others), so quotas hold in every batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardset.arguments import require_int
from shardset.errors import BudgetTooSmall, ConfigError
from shardset.order.budget import BUDGET_BYTES, MIB
from shardset.order.lanes import check_world, default_lanes, rank_part
from shardset.order.permutation import derive_key
from shardset.order.state import OrderState
from shardset.stream.stream import Batch, Stream


@dataclass(frozen=True, slots=True)
class Share:
    """A split of a shard set and its weight among the others."""

    manifest_url: str
    split: str
    weight: float


def share_lanes(weights: Sequence[float], num_lanes: int) -> list[int]:
    """Lanes of each set: the largest remainders of `weight * num_lanes`; raises ConfigError if one gets none."""
    if not weights or min(weights) <= 0:
        raise ConfigError(f"weights are {list(weights)}, expected at least one, all above 0")
    wanted = np.array(weights, dtype=np.float64) / sum(weights) * num_lanes
    lanes = np.floor(wanted).astype(int)
    order = np.argsort(lanes - wanted, kind="stable")
    lanes[order[: num_lanes - lanes.sum()]] += 1
    if lanes.min() < 1:
        raise ConfigError(
            f"weights {list(weights)} over {num_lanes} lanes leave set {lanes.argmin()} without one; "
            "raise its weight, or the lanes (a divisor of the global batch size)"
        )
    return lanes.tolist()


class MixedStream:
    """One replica's part of batches that hold every shard set's exact share of lanes; `options` are those of Stream.

    `budget_bytes` are for all shard sets together, each of which gets the same part of it, whatever its weight.
    Raises ConfigError where weights, lanes, batch and world do not fit.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        num_lanes: int | None = None,
        budget_bytes: int = BUDGET_BYTES,
        **options: Any,
    ) -> None:
        rank, world_size = require_int("rank", rank), require_int("world_size", world_size)
        global_batch_size = require_int("global_batch_size", global_batch_size)
        check_world(global_batch_size, rank, world_size)
        if seed is None:
            raise ConfigError("a mixture has no stored order, so it needs a seed; evaluate each set by its own Stream")
        lanes = default_lanes(global_batch_size) if num_lanes is None else require_int("num_lanes", num_lanes)
        if lanes < 1 or global_batch_size % lanes:
            raise ConfigError(f"{lanes} lanes do not divide a global batch of {global_batch_size}; use a divisor")
        self.lanes = share_lanes([share.weight for share in shares], lanes)
        items, part = global_batch_size // lanes, rank_part(global_batch_size, rank, world_size)
        self.streams: list[Stream] = []
        refused: list[BudgetTooSmall] = []
        for number, (share, own) in enumerate(zip(shares, self.lanes, strict=True)):
            size, begin = own * items, sum(self.lanes[:number]) * items
            try:
                stream = Stream(
                    share.manifest_url,
                    share.split,
                    global_batch_size=size,
                    rank=0,
                    world_size=1,
                    part=range(_within(part.start - begin, size), _within(part.stop - begin, size)),
                    seed=derive_key(seed, "mixture", number),
                    num_lanes=own,
                    last_batch="drop",
                    budget_bytes=budget_bytes // len(shares),
                    **options,
                )
            except BudgetTooSmall as error:
                refused.append(error)
            else:
                self.streams.append(_not_empty(stream, share))
        _check_budget(refused, len(shares), budget_bytes)

    def batches(self, start_step: int = 0) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for ever; a batch is that of a Stream with `source` (int64): the number of the shard set."""
        own = [(number, stream) for number, stream in enumerate(self.streams) if stream.part]
        runs = [stream.epochs(*divmod(start_step, len(stream))) for _, stream in own]
        step = start_step
        try:
            while True:
                found = [next(run)[2] for run in runs]
                sources = [np.full(len(batch["id"]), number) for (number, _), batch in zip(own, found, strict=True)]
                yield step, _joined(found) | {"source": np.concatenate(sources).astype(np.int64)}
                step += 1
        finally:
            for run in runs:
                run.close()

    def state(self, step: int) -> list[OrderState]:
        """The state before a step: one for each shard set."""
        return [stream.state(*divmod(step, len(stream))) for stream in self.streams]

    def resume(self, states: Sequence[OrderState]) -> int:
        """The step at which to go on; raises ConfigError naming what differs."""
        if len(states) != len(self.streams):
            raise ConfigError(
                f"there are {len(states)} states for {len(self.streams)} shard sets; go on with the same sets, or "
                "start a new run"
            )
        lanes = [state.num_lanes for state in states]
        if lanes != self.lanes:
            raise ConfigError(
                f"the shard sets have {self.lanes} lanes here and had {lanes} lanes there; they follow from the "
                "weights and num_lanes, and that from the global batch size; use the same, or start a new run"
            )
        places = [stream.resume(state) for stream, state in zip(self.streams, states, strict=True)]
        steps = {epoch * len(stream) + step for stream, (epoch, step) in zip(self.streams, places, strict=True)}
        if len(steps) != 1:
            raise ConfigError(f"the states stand at steps {sorted(steps)}, expected one; they are not of one mixture")
        return steps.pop()


def _within(slot: int, size: int) -> int:
    return min(max(slot, 0), size)


def _check_budget(refused: Sequence[BudgetTooSmall], num_shares: int, budget_bytes: int) -> None:
    """Refuses a budget that is too small for some sets with one that is enough for all; each gets the same part."""
    if refused:
        enough = num_shares * max(error.enough for error in refused)
        raise BudgetTooSmall(
            f"{num_shares} shard sets have {budget_bytes // MIB:,} MiB together and the same part of it each, too "
            f"little for {len(refused)} of them; raise budget_bytes to {enough} ({enough // MIB:,} MiB), or lower "
            "window, num_lanes, prefetch or the batch size",
            enough,
        )


def _not_empty(stream: Stream, share: Share) -> Stream:
    if len(stream) < 1:
        raise ConfigError(
            f"{share.manifest_url} {share.split}: {stream.order.num_samples} samples do not fill one batch of "
            f"{stream.order.global_batch_size}; lower its weight or the global batch size"
        )
    return stream


def _joined(batches: list[Batch]) -> Batch:
    return {name: _join([batch[name] for batch in batches]) for name in batches[0]}


def _join(values: list[Any]) -> Any:
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values) if len(values) > 1 else values[0]
    return [value for part in values for value in part]
