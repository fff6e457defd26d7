"""Reads from a bucket over a network that breaks."""

from dataclasses import replace

import pytest

from shardset.errors import PreconditionFailed, TransientError
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, in_turn, is_media
from tests.makers.objects import BIG, put

pytestmark = pytest.mark.gcs


def test_a_read_goes_on_at_the_byte_reached(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(
        Fault("truncate", at=100_000), Fault("truncate", at=200_000), when=is_media
    )
    assert behind_proxy.read("a", 50_000, 900_000) == BIG[50_000:900_000]
    ranges = [seen.headers["range"] for seen in proxy.seen if is_media(seen)]
    assert ranges == ["bytes=50000-899999", "bytes=150000-899999", "bytes=350000-899999"]


def test_an_answer_with_other_bytes_than_asked_for_is_not_taken(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(
        Fault("replace", find=b"bytes 50000-", put=b"bytes 40000-"), when=is_media
    )
    assert behind_proxy.read("a", 50_000, 60_000) == BIG[50_000:60_000]
    assert sum(map(is_media, proxy.seen)) == 2


@pytest.mark.parametrize("what", ["size", "generation"])
def test_wrong_facts_in_the_answer_to_a_range_are_not_final_unless_the_object_confirms_them(
    behind_proxy, proxy, what
):
    put(behind_proxy, "a", BIG)
    generation = behind_proxy.stat("a").generation
    find, put_in = {
        "size": (b"/1048576", b"/0001000"),
        "generation": (generation.encode(), b"1" * len(generation)),
    }[what]
    proxy.script = in_turn(Fault("replace", find=find, put=put_in), when=is_media)
    assert behind_proxy.read("a", 50_000, 60_000, generation=generation) == BIG[50_000:60_000]
    assert sum(map(is_media, proxy.seen)) == 2
    proxy.script = lambda seen: Fault("replace", find=find, put=put_in)
    with pytest.raises(PreconditionFailed if what == "generation" else TransientError):
        behind_proxy.read("a", 50_000, 60_000, generation=generation)


@pytest.mark.parametrize("stop", [None, len(BIG)], ids=["no range", "a range that is all of it"])
@pytest.mark.parametrize(
    "before", [[], [Fault("truncate", at=100_000)]], ids=["at once", "resumed"]
)
def test_a_flipped_bit_in_a_whole_object_is_read_again(behind_proxy, proxy, stop, before):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(*before, Fault("flip", at=1234), when=is_media)
    assert behind_proxy.read("a", 0, stop) == BIG
    assert sum(map(is_media, proxy.seen)) == 2 + len(before)


def test_a_whole_object_that_never_fits_its_checksum_is_an_error(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = lambda seen: Fault("flip", at=3) if is_media(seen) else None
    with pytest.raises(
        TransientError, match=r"/a: what arrived does not have the CRC32C .* gave up after"
    ):
        behind_proxy.read("a")


def replacing(storage, name, data):
    """The same storage, except that it replaces an object whenever it pauses."""
    return replace(storage, retry=replace(storage.retry, sleep=lambda _: put(storage, name, data)))


def test_an_object_replaced_in_the_middle_of_a_read_is_read_from_the_start(behind_proxy, proxy):
    put(behind_proxy, "a", b"1" * 1000)
    proxy.script = in_turn(Fault("truncate", at=300), when=is_media)
    assert replacing(behind_proxy, "a", b"2" * 1000).read("a") == b"2" * 1000


def test_a_pinned_read_never_mixes_generations(behind_proxy, proxy):
    put(behind_proxy, "a", b"1" * 1000)
    generation = behind_proxy.stat("a").generation
    proxy.script = in_turn(Fault("truncate", at=300), when=is_media)
    with pytest.raises(PreconditionFailed, match="was replaced"):
        replacing(behind_proxy, "a", b"2" * 1000).read("a", generation=generation)


@pytest.mark.parametrize(("status", "patience_s"), [(500, 180), (429, 1200), (503, 1200)])
def test_pauses_grow_and_then_it_gives_up_naming_object_and_range(
    behind_proxy, proxy, clock, caplog, status, patience_s
):
    put(behind_proxy, "a", BIG)
    proxy.script = lambda seen: Fault("status", status=status)
    with pytest.raises(TransientError) as caught:
        behind_proxy.read("a", 10, 20)
    text = str(caught.value)
    assert f"{behind_proxy.url}/a bytes 10 to 20: the server answered {status}" in text
    assert (
        f"gave up after {sum(map(is_media, proxy.seen))} tries in {sum(clock.pauses):.0f} s" in text
    )
    assert clock.pauses[:6] == [0.1875, 0.375, 0.75, 1.5, 3.0, 6.0]
    assert patience_s - 32 < clock.now <= patience_s
    [said] = caplog.records
    assert f"bytes 10 to 20: the server answered {status}" in said.getMessage()
    assert said.getMessage().endswith(f"; trying again for {patience_s} s in all")


def test_a_link_that_breaks_now_and_then_does_not_end_the_patience_for_a_bucket_that_refuses(
    behind_proxy, proxy, clock
):
    put(behind_proxy, "a", BIG)
    faults = [
        *[Fault("status", status=503)] * 20,
        *[Fault("reset")] * 3,
        *[Fault("status", status=503)] * 5,
    ]
    proxy.script = in_turn(*faults, when=is_media)
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert 180 < clock.now < 1200


@pytest.mark.parametrize(("status", "asks", "pause_s"), [(429, "90", 90), (503, "-90 s", 0.2)])
def test_all_wait_for_as_long_as_a_refusal_asks_for(
    behind_proxy, proxy, clock, status, asks, pause_s
):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(
        Fault("status", status=status, headers=(("Retry-After", asks),)), when=is_media
    )
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert clock.now == pytest.approx(pause_s, abs=2)
    assert behind_proxy.is_throttled
    clock.now += 3600
    assert behind_proxy.read("a", 10, 20) == BIG[10:20]
    assert not behind_proxy.is_throttled


def test_as_long_as_bytes_arrive_it_does_not_give_up(behind_proxy, proxy, clock):
    put(behind_proxy, "a", BIG)
    impatient = replace(behind_proxy, retry=replace(behind_proxy.retry, give_up_after_s=1.0))
    proxy.script = in_turn(*[Fault("truncate", at=50_000)] * 15, when=is_media)
    assert impatient.read("a") == BIG
    assert sum(clock.pauses) > 1.0


def test_pauses_of_two_readers_differ():
    policy = RetryPolicy()
    assert len({policy.pause_s(3) for _ in range(20)}) == 20
    assert all(0.5 <= policy.pause_s(3) <= 1.0 for _ in range(100))
    assert RetryPolicy(jitter=lambda: 0.0).pause_s(1000) == 16.0
