"""Which byte ranges of an object are read together."""

from collections.abc import Iterator, Sequence


def coalesce(ranges: Sequence[tuple[int, int]], *, max_gap: int, max_bytes: int) -> Iterator[slice]:
    """Slices of `ranges`, each to be read by one request.

    `ranges` are half-open (start, stop), ascending by start. Neighbours share a request where at most `max_gap` bytes
    between them are read in vain and the request stays within `max_bytes`; a longer range is a request of its own.
    """
    first, end = 0, 0
    for number, (start, stop) in enumerate(ranges):
        if number > first and (start - end > max_gap or max(end, stop) - ranges[first][0] > max_bytes):
            yield slice(first, number)
            first, end = number, start
        end = max(end, stop)
    if ranges:
        yield slice(first, len(ranges))
