"""How long a bucket takes until it serves what is asked of it: it begins slowly and doubles under load.

Source: https://cloud.google.com/storage/docs/request-rate
"""

FIRST_WRITES_PER_S = 1_000
FIRST_READS_PER_S = 5_000
DOUBLING_S = 20 * 60


def ramp_s(num_requests: float, first_per_s: float, wanted_per_s: float = float("inf")) -> float:
    """The seconds in which a bucket serves the requests, of which `wanted_per_s` are made as soon as it takes them."""
    seconds, rate = 0.0, min(first_per_s, wanted_per_s)
    while rate < wanted_per_s and num_requests > rate * DOUBLING_S:
        num_requests -= rate * DOUBLING_S
        seconds += DOUBLING_S
        rate = min(2 * rate, wanted_per_s)
    return seconds + num_requests / rate


def lost_s(num_requests: float, first_per_s: float, wanted_per_s: float) -> float:
    """The seconds that requests lose in all because the bucket does not serve `wanted_per_s` from the beginning."""
    return ramp_s(num_requests, first_per_s, wanted_per_s) - num_requests / wanted_per_s


def build_s(*, class_a: int, class_b: int) -> float:
    """The fewest seconds of a build that makes so many writes and reads, however many workers it has."""
    return max(ramp_s(class_a, FIRST_WRITES_PER_S), ramp_s(class_b, FIRST_READS_PER_S))
