"""Runs the stories of some seeds, or one again: `python -m tests.simulation builds 0:200`, `...
training 17`.
"""

import sys
from collections.abc import Callable, Iterable

from tests.simulation import builds, changes, training
from tests.simulation.baton import Baton

STORIES: dict[str, Callable[[int], Baton]] = {
    "builds": builds.live_through,
    "changes": changes.live_through,
    "training": training.live_through,
}


def check(story: str, seed: int) -> Baton:
    """Lives through one story; the error of a failure says how to see it again."""
    try:
        return STORIES[story](seed)
    except Exception as error:
        error.add_note(f"again: python -m tests.simulation {story} {seed}")
        raise


def first_failure(story: str, seeds: Iterable[int]) -> Exception | None:
    """The error of the first seed that fails."""
    for seed in seeds:
        try:
            check(story, seed)
        except Exception as error:  # noqa: BLE001 - whatever a simulation finds
            return error
    return None


def main(story: str, words: str) -> int:
    """The exit code: 1 if a seed fails."""
    first, _, stop = words.partition(":")
    error = first_failure(story, range(int(first), int(stop or int(first) + 1)))
    if error is not None:
        print(f"{type(error).__name__}: {error}", *error.__notes__, sep="\n")
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
