"""What it costs to read an input from another region than the one that the build runs in."""

from collections.abc import Callable

from pipelines.estimate.prices import EGRESS, GIB
from shardset.errors import StorageError
from shardset.storage.open import bucket_of
from shardset.storage.regions import apart

TERABYTE = 10**12


def crossing(
    source: str, output: str, workers: str | None, locate: Callable[[str], str], *, num_reads: int
) -> str | None:
    """A warning with its price if the input's bucket is in another region than the workers; None if it is not.

    `workers` is their region; None where a runner hides it: then the output's bucket stands for it. `locate` returns
    the location of a bucket. None too if a location is hidden, or if no bucket is read.
    """
    raw, target = bucket_of(source), bucket_of(output)
    if raw is None or (workers is None and target in (None, raw)):
        return None
    try:
        there, here = locate(raw), workers or locate(target or raw)
    except StorageError:  # the permission to look is not needed to read; a missing bucket is the survey's to say
        return None
    if not apart(there, here):
        return None
    dollars = num_reads * TERABYTE / GIB * EGRESS
    times = "twice" if num_reads == 2 else "once"
    return (
        f"warning: {source} is in {there}, the build in {here.upper()}: every byte crosses {times}, about "
        f"${dollars:,.0f} a TB within a continent and more between two (${1000 * dollars:,.0f} a PB); copy the input "
        f"to {here.upper()} first, or build where it is"
    )
