"""All numbers that `plan` shows about one split, from `plan.layout` and `shardset.order`.

The output says "about" where a number is only estimated.
"""

from dataclasses import dataclass, field

from pipelines.estimate.advice import advice_on
from pipelines.estimate.mixing import Mixing, mixing_of
from pipelines.estimate.prices import Prices
from pipelines.estimate.reading import Reading, Steps, memory_of, order_of, refusals_of, steps_of
from pipelines.estimate.requests import BuildRequests, ColdStart, ReadEstimate, build_requests, cold_start, reads_of
from pipelines.estimate.stored import StoredSet
from shardset.errors import ConfigError
from shardset.order.budget import Memory
from shardset.order.epoch import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `plan` shows. `reads`, `cold` and `memory` are None if a run would be refused; `refusals` says why."""

    stored: StoredSet
    split: str
    reading: Reading
    prices: Prices
    order: Order = field(repr=False)
    steps: Steps
    mixing: Mixing | None
    reads: ReadEstimate | None
    cold: ColdStart | None
    memory: Memory | None
    build: BuildRequests | None
    advice: list[str]
    refusals: list[str]


def estimate(stored: StoredSet, split: str, reading: Reading, prices: Prices) -> Estimate:
    """All numbers of one split; raises ConfigError if they make no order."""
    stored_split = stored.splits[split]
    order = order_of(stored_split, reading)
    steps = steps_of(order)
    memory, refusals = None, refusals_of(reading)
    if not refusals:
        try:
            memory = memory_of(stored_split, order, reading)
        except ConfigError as error:
            refusals = [str(error)]
    reads = None if refusals else reads_of(stored_split, order, reading.num_readers, steps)
    return Estimate(
        stored=stored,
        split=split,
        reading=reading,
        prices=prices,
        order=order,
        steps=steps,
        mixing=mixing_of(order, stored.num_classes) if stored.num_classes > 1 else None,
        reads=reads,
        cold=None if refusals else cold_start(stored, split, order, reading.num_readers),
        memory=memory,
        build=build_requests(stored),
        advice=advice_on(stored_split, order, reading, steps, reads),
        refusals=refusals,
    )
