"""Splits by keyed hash: a sample is held out by its own key and the seed, unless its class would
lack a split.

A share of each class, not an exact number of its samples: an exact number would move samples
whenever the set grows.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from shardset.errors import ConfigError
from shardset.format.naming import SPLIT_NAMES, is_split
from shardset.order.permutation import derive_key, hash_text
from shardset.program import some_of

REST = "train"
"""The split of the samples that are not held out."""

_NUM_EXAMPLES = 5

Label = int | str
"""A class, by number or by name."""


@dataclass(frozen=True)
class Holdout:
    """Which samples go to which held-out split: `fractions` by split.

    Empty: all samples go to `train`.

    `class_bounds` belong to the classes that the fractions alone would leave without a split:
    see `by_class`. Raises ConfigError unless the names can name splits and the fractions are above
    0 and below 1 in sum.
    """

    fractions: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    class_bounds: Mapping[Label, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, fraction in self.fractions.items():
            if not is_split(split) or split == REST:
                raise ConfigError(
                    f"--holdout {split}={fraction}: {split!r} can't be held out; "
                    f"use {SPLIT_NAMES}; {REST} is what is not held out"
                )
            if not 0 < fraction < 1:
                raise ConfigError(
                    f"--holdout {split}={fraction}: expected a fraction between 0 and 1, such as"
                    f" {split}=0.1"
                )
        if sum(self.fractions.values()) >= 1:
            total = sum(self.fractions.values())
            raise ConfigError(
                f"--holdout: the fractions add up to {total:g}, which leaves no {REST}"
            )

    def __bool__(self) -> bool:
        return bool(self.fractions)

    def check_unsplit(self, where: str, splits: Collection[str]) -> None:
        """Raises ConfigError if something is to be held out of an input with these splits."""
        if self and splits:
            raise ConfigError(
                f"{where}: --holdout with splits already ({', '.join(sorted(splits)[:5])}); leave"
                " --holdout out, or name one of them as input"
            )

    def split_of(self, key: str, label: Label | None = None) -> str:
        """The split of a sample of that class.

        The order in which the fractions are given does not matter.
        """
        if not self.fractions:
            return REST
        bounds = self._bounds if label is None else self.class_bounds.get(label, self._bounds)
        return self._splits[bisect_right(bounds, self._position_of(key))]

    def by_class(self, samples: Callable[[], Iterable[tuple[str, Label]]]) -> "Holdout":
        """The holdout in which each class has samples in every split; `samples` gives all keys with
        their classes.

        Calls `samples` twice. Memory holds a count for each class and split, and the samples of the
        classes that the fractions alone would leave without a split; those are small.
        """
        counts: dict[Label, Counter[str]] = {}
        for key, label in samples() if self else ():
            counts.setdefault(label, Counter())[self.split_of(key)] += 1
        positions: dict[Label, set[float]] = {
            label: set() for label, splits in counts.items() if len(splits) < len(self._splits)
        }
        for key, label in samples() if positions else ():
            if label in positions:
                positions[label].add(self._position_of(key))
        bounds = {
            label: _bounds_within(sorted(some), self._bounds) for label, some in positions.items()
        }
        return replace(self, class_bounds=bounds)

    def _position_of(self, key: str) -> float:
        """Where the key falls between 0 and 1."""
        return hash_text(key, key=self._key) / 2**64

    @cached_property
    def _splits(self) -> list[str]:
        return [*sorted(self.fractions), REST]

    @cached_property
    def _bounds(self) -> list[float]:
        """Where each split but the last one ends, between 0 and 1."""
        return list(accumulate(self.fractions[split] for split in self._splits[:-1]))

    @cached_property
    def _key(self) -> int:
        return derive_key(self.seed, "holdout")

    def notes(self, seen: Collection[tuple[str, int]], names: Sequence[str]) -> Iterator[str]:
        """A sentence for each split that should have samples and has none, and for each that lacks
        classes; `seen` has the split and the label of every sample.
        """
        present: dict[str, set[int]] = {}
        for split, label in seen:
            present.setdefault(split, set()).add(label)
        asked = ",".join(f"{split}={fraction:g}" for split, fraction in self.fractions.items())
        for split in sorted({*self.fractions, REST} - present.keys()) if self else ():
            yield f"--holdout {asked} left no image in split {split}, so there is no such split"
        for split, labels in sorted(present.items()):
            missing = [name for label, name in enumerate(names) if label not in labels]
            if missing:
                noun = "class" if len(missing) == 1 else "classes"
                yield (
                    f"split {split} has no images of {len(missing)} {noun}:"
                    f" {some_of(missing, _NUM_EXAMPLES)}"
                )


def _bounds_within(positions: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """The bounds, moved as little as gives each split one of the positions; too few go to the last
    splits.
    """
    cuts = [bisect_left(positions, bound) for bound in bounds]
    for number in range(len(cuts)):
        cuts[number] = max(cuts[number], 1 + (cuts[number - 1] if number else 0))
    for number in reversed(range(len(cuts))):
        before_next = (cuts[number + 1] if number + 1 < len(cuts) else len(positions)) - 1
        cuts[number] = max(0, min(cuts[number], before_next))
    return [positions[cut] for cut in cuts]
