"""What each remote scheme does when a server refuses, damages or drips, behind one proxy."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardset.errors import (
    ConfigError,
    DamagedShard,
    NotFound,
    PreconditionFailed,
    StorageError,
    TransientError,
)
from shardset.storage import gcs, s3
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from tests.faulty_proxy import (
    FAULTS,
    Fault,
    in_turn,
    is_listing,
    is_read,
    is_upload,
    names_of_faults,
)
from tests.makers.objects import BIG, HELLO, Clock, names, put
from tests.shardset.storage.conftest import schemes

SLOW_DOWN = Fault("status", status=503, put=b"slow down")


@pytest.mark.parametrize("fault", FAULTS, ids=names_of_faults)
@pytest.mark.parametrize("span", [(0, None), (1000, 900_000)])
def test_a_read_survives_a_fault(far, fault, span):
    far.store(BIG)
    far.proxy.script = in_turn(fault, fault, when=is_read)
    storage = far.with_retry(stall_timeout_s=0.5 if fault.kind == "stall" else 60.0)
    assert storage.read("a", *span) == BIG[slice(*span)]
    assert far.num_reads() == 3


NO_ANSWERS = {
    "empty": Fault("status", status=200),
    "no content": Fault("shorten", at=0),
    "short": Fault("shorten", at=1000),
    "another range": Fault("replace", find=b"bytes 50000-", put=b"bytes 40000-"),
}
"""What may come in place of the bytes 50,000 to 100,000 of a mebibyte."""


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_answer_that_is_none_is_asked_for_again(far, answer):
    far.store(BIG)
    far.proxy.script = in_turn(NO_ANSWERS[answer], when=is_read)
    assert far.storage.read("a", 50_000, 100_000) == BIG[50_000:100_000]
    assert 2 <= far.num_reads() <= 3


@pytest.mark.parametrize("num_bytes", [100_000, len(BIG)])
@schemes("s3", "az")  # the pieces of other schemes are larger than this object
def test_a_drip_is_asked_for_again_at_the_byte_reached_and_said(far, num_bytes, caplog):
    far.store(BIG)
    drip = Fault("drip", at=1000, seconds=0.05)
    far.proxy.script = in_turn(drip, drip, when=is_read)
    storage = far.with_retry(clock=Clock(step_s=1.0))
    assert storage.read("a", 0, num_bytes) == BIG[:num_bytes]
    assert far.num_reads() == 3
    headers = [seen.headers for seen in far.proxy.seen if is_read(seen)]
    ranges = [seen.get("range") or seen["x-ms-range"] for seen in headers]
    firsts = [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges]
    assert firsts == sorted(set(firsts))
    [said] = [
        record.getMessage() for record in caplog.records if record.name.startswith("shardset")
    ]
    assert "/a bytes 0 to" in said
    assert "slower than 64 KiB/s" in said


def test_a_few_bytes_are_no_progress(far):
    far.store(BIG)
    far.proxy.script = lambda seen: Fault("truncate", at=5) if is_read(seen) else None
    with pytest.raises(TransientError, match=r"/a.*gave up after"):
        far.storage.read("a")
    assert far.num_reads() < 30


def test_many_threads_ask_a_server_that_refuses_at_one_pace_and_say_so_once(far, clock, caplog):
    far.store(BIG)
    far.proxy.script = lambda seen: SLOW_DOWN if clock.now < 100 else None
    with ThreadPoolExecutor(16) as pool:
        spans = list(range(0, 16_000, 1000))
        found = list(pool.map(lambda start: far.storage.read("a", start, start + 1000), spans))
    assert found == [BIG[start : start + 1000] for start in spans]
    # Without a throttle, 16 threads with pauses of 0.2 to 12 s send more than 200 requests.
    assert far.num_reads() < 160
    assert far.storage.is_throttled
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "503" in said
    assert not any(word in said for word in ("check", "credentials", "pool is full"))


# obstore hands on the status and the text of a refusal, but not its headers
@pytest.mark.parametrize(("status", "asks", "pause_s"), [(429, "90", 90), (503, "-90 s", 0.2)])
@schemes("https", "gs")
def test_all_wait_for_as_long_as_a_refusal_asks_for(far, clock, status, asks, pause_s):
    far.store(BIG)
    refusal = Fault("status", status=status, headers=(("Retry-After", asks),))
    far.proxy.script = in_turn(refusal, when=is_read)
    assert far.storage.read("a", 10, 20) == BIG[10:20]
    assert clock.now == pytest.approx(pause_s, abs=2)
    assert far.storage.is_throttled
    clock.now += 3600
    assert far.storage.read("a", 10, 20) == BIG[10:20]
    assert not far.storage.is_throttled


def test_connections_of_32_threads_are_kept(far, caplog):
    far.store(BIG)
    far.proxy.delay_s = 0.02
    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda start: far.storage.read("a", start, start + 10), range(200)))
    assert found == [BIG[start : start + 10] for start in range(200)]
    assert "pool is full" not in caplog.text
    assert far.proxy.num_connections <= 40


def test_a_name_that_is_not_utf_8_is_refused_at_once(far, clock):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        far.storage.read("a\udcff", 3, 5)
    assert clock.pauses == []


# --- checksums and generations --------------------------------------------------------------------


@pytest.mark.parametrize("stop", [None, len(BIG)], ids=["no range", "a range that is all of it"])
@pytest.mark.parametrize(
    "before", [[], [Fault("truncate", at=100_000)]], ids=["at once", "resumed"]
)
@schemes("gs", "s3", "az")
def test_a_flipped_bit_in_a_whole_object_is_read_again(far, stop, before):
    far.store(BIG)
    far.proxy.script = in_turn(*before, Fault("flip", at=1234), when=is_read)
    assert far.storage.read("a", 0, stop) == BIG
    assert far.num_reads() == 2 + len(before)


@schemes("gs", "s3", "az")
def test_a_whole_object_that_never_fits_its_checksum_is_damaged(far):
    far.store(HELLO)
    far.proxy.script = lambda seen: Fault("flip", at=3) if is_read(seen) else None
    with pytest.raises(DamagedShard, match=r"/a: has the CRC32C .*, not the one .*; replace it"):
        far.storage.read("a")
    assert far.num_reads() == 2


def replacing(far, data):
    """The same folder, except that its object is replaced whenever it pauses."""
    return far.with_retry(sleep=lambda _: put(far.origin, "a", data))


def test_an_object_replaced_in_the_middle_of_a_read_is_read_from_the_start(far):
    far.store(b"1" * 1000)
    far.proxy.script = in_turn(Fault("truncate", at=300), when=is_read)
    assert replacing(far, b"2" * 1000).read("a") == b"2" * 1000


def test_a_pinned_read_never_mixes_generations(far):
    far.store(b"1" * 1000)
    generation = far.storage.stat("a").generation
    far.proxy.script = in_turn(Fault("truncate", at=300), when=is_read)
    with pytest.raises(PreconditionFailed):
        replacing(far, b"2" * 1000).read("a", generation=generation)


# --- patience -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "patience_s"), [(500, 180), (429, 1200), (503, 1200)])
@schemes("https", "gs")
def test_pauses_grow_and_then_it_gives_up_naming_object_and_range(
    far, clock, caplog, status, patience_s
):
    far.store(BIG)
    far.proxy.script = lambda seen: Fault("status", status=status)
    with pytest.raises(TransientError) as caught:
        far.storage.read("a", 10, 20)
    text = str(caught.value)
    assert f"{far.storage.url}/a bytes 10 to 20: the server answered {status}" in text
    assert f"gave up after {far.num_reads()} tries in {sum(clock.pauses):.0f} s" in text
    assert clock.pauses[:6] == [0.1875, 0.375, 0.75, 1.5, 3.0, 6.0]
    assert patience_s - 32 < clock.now <= patience_s
    [said] = caplog.records
    assert f"bytes 10 to 20: the server answered {status}" in said.getMessage()
    assert said.getMessage().endswith(f"; trying again for {patience_s} s in all")


@schemes("https")
def test_a_link_that_breaks_now_and_then_does_not_end_the_patience_for_a_server_that_refuses(
    far, clock
):
    far.store(BIG)
    faults = [*[SLOW_DOWN] * 20, *[Fault("reset")] * 3, *[SLOW_DOWN] * 5]
    far.proxy.script = in_turn(*faults, when=is_read)
    assert far.storage.read("a", 10, 20) == BIG[10:20]
    assert 180 < clock.now < 1200


@schemes("https")
def test_as_long_as_bytes_arrive_it_does_not_give_up(far, clock):
    far.store(BIG)
    far.proxy.script = in_turn(*[Fault("truncate", at=50_000)] * 15, when=is_read)
    assert far.with_retry(give_up_after_s=1.0).read("a") == BIG
    assert sum(clock.pauses) > 1.0


def test_a_refusal_is_said_at_once(far, clock):
    far.proxy.script = lambda seen: Fault("status", status=418)
    with pytest.raises(StorageError, match=r"/a: .*418.*; check the (name|address)|check name"):
        far.storage.read("a")
    assert clock.pauses == []


# --- writes and lists -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS[:5], ids=names_of_faults)
@pytest.mark.parametrize("condition", ["none", "absent", "replaced"])
@schemes("gs", "s3", "az")
def test_a_write_survives_a_fault(far, fault, condition):
    options = {"if_generation": ABSENT} if condition == "absent" else {}
    if condition == "replaced":
        put(far.storage, "train/a")
        options = {"if_generation": far.storage.stat("train/a").generation}
    far.proxy.script = in_turn(fault, fault, when=is_upload)
    put(far.storage, "train/a", BIG, **options)
    far.proxy.script = lambda seen: None
    assert far.storage.read("train/a") == BIG


@pytest.mark.parametrize("if_generation", [ABSENT, "seen"])
@schemes("gs", "s3", "az")
def test_a_lost_answer_does_not_hide_another_writer(far, if_generation):
    put(far.storage, "a", b"old")
    seen = far.storage.stat("a").generation if if_generation == "seen" else ABSENT
    far.proxy.script = in_turn(Fault("reset"), when=is_upload)
    put(far.with_retry(), "a", b"theirs")
    with pytest.raises(PreconditionFailed, match="a different object exists"):
        put(far.storage, "a", b"ours", if_generation=seen)
    assert far.storage.read("a") == b"theirs"


@pytest.mark.parametrize("fault", [*FAULTS[:6], Fault("shorten", at=60)], ids=names_of_faults)
@schemes("gs", "s3", "az")
def test_a_listing_is_whole_or_asked_for_again(far, fault, monkeypatch):
    monkeypatch.setattr(s3, "_PAGE_SIZE", 3)
    monkeypatch.setattr(gcs, "PAGE_SIZE", 3)
    wanted = [f"a/{number}" for number in range(10)]
    for name in (*wanted, "b"):
        put(far.storage, name)
    far.proxy.script = in_turn(None, fault, fault, when=is_listing)
    assert names(far.storage, "a/") == wanted


@schemes("gs", "s3", "az")
def test_with_a_third_of_all_requests_failing_nothing_is_wrong(far):
    chance = random.Random(7)
    far.proxy.script = lambda seen: chance.choice(FAULTS[:6]) if chance.random() < 1 / 3 else None
    wanted = {
        f"a/{number:02d}": chance.randbytes(chance.randrange(1, 5000)) for number in range(20)
    }
    for name, data in wanted.items():
        put(far.storage, name, data, if_generation=ABSENT)
        with pytest.raises(PreconditionFailed):
            put(far.storage, name, b"theirs", if_generation=ABSENT)
    assert names(far.storage) == list(wanted)
    for name, data in wanted.items():
        start = chance.randrange(len(data))
        assert far.storage.read(name) == data
        assert far.storage.read(name, start) == data[start:]
        far.storage.delete(name, generation=far.storage.stat(name).generation)
    assert names(far.storage) == []


@schemes("s3", "az")
def test_a_bit_flipped_on_its_way_up_is_an_error_of_the_writer_and_of_every_reader(far):
    # Amazon compares the body with its signature, Google with its CRC32C; these servers do not.
    far.proxy.script = in_turn(Fault("flip_upload", at=1234), when=is_upload)
    with pytest.raises(DamagedShard, match="/a: has the CRC32C"):
        put(far.storage, "a", BIG)
    with pytest.raises(DamagedShard, match="replace it"):
        far.storage.read("a")
    put(far.storage, "a", BIG)
    assert far.storage.read("a") == BIG


@schemes("gs", "s3")
def test_a_missing_bucket_is_said(far):
    missing = open_storage(f"{far.storage.scheme}://no-such-bucket/x")
    for action in (lambda s: s.read("a"), lambda s: put(s, "a"), names):
        with pytest.raises(NotFound, match="no-such-bucket"):
            action(missing)
