"""What each remote scheme does when a server refuses, damages or drips, behind one proxy."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from shardset.errors import ConfigError, TransientError
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import FAULTS, Fault, FaultyProxy, in_turn, is_read, names_of_faults
from tests.makers.azure import ACCOUNT, CONTAINER, azure_environment, azurite
from tests.makers.objects import BIG, Clock, put
from tests.makers.web import WebServer

SLOW_DOWN = Fault("status", status=503, put=b"slow down")
ENDPOINTS = {
    "gs": "STORAGE_EMULATOR_HOST",
    "s3": "AWS_ENDPOINT_URL",
    "az": "AZURE_STORAGE_ENDPOINT",
}
MARKS = {"https": [], "gs": [pytest.mark.gcs], "s3": [], "az": [pytest.mark.nightly]}


def schemes(*names):
    """Has a test run for these schemes."""
    return pytest.mark.parametrize(
        "far", [pytest.param(name, marks=MARKS[name]) for name in names], indirect=True
    )


@dataclass
class Far:
    """A folder behind the proxy, with retries that cost no time, and an unbroken way to it."""

    storage: Storage
    origin: Storage
    proxy: FaultyProxy

    def with_retry(self, **changes):
        """The same folder with another policy."""
        return replace(self.storage, retry=replace(self.storage.retry, **changes))

    def store(self, data):
        """Stores an object `a`, and forgets the requests of that: Azure's is read back."""
        put(self.origin, "a", data)
        self.proxy.seen.clear()

    def num_reads(self):
        return sum(map(is_read, self.proxy.seen))


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def far(request, tmp_path, clock, monkeypatch):
    """A folder of each remote scheme in turn."""
    policy = RetryPolicy(stall_timeout_s=60.0, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)
    with ExitStack() as exits:
        if request.param == "https":
            proxy = exits.enter_context(FaultyProxy(exits.enter_context(WebServer(tmp_path)).url))
            storage = replace(open_storage(f"{proxy.url}/in/side"), retry=policy)
            yield Far(storage, open_storage(str(tmp_path / "in/side")), proxy)
            return
        if request.param == "az":
            server = exits.enter_context(azurite(tmp_path / "log"))
            root = f"az://{CONTAINER}/folder"
            for name, value in azure_environment(server).items():
                monkeypatch.setenv(name, value)
        else:
            server = request.getfixturevalue(
                "gcs_emulator" if request.param == "gs" else "s3_server"
            )
            root = request.getfixturevalue("gcs_root" if request.param == "gs" else "s3_root")
        proxy = exits.enter_context(FaultyProxy(server.removesuffix(f"/{ACCOUNT}")))
        storage = replace(open_storage(root), retry=policy)
        monkeypatch.setenv(
            ENDPOINTS[request.param], proxy.url + (f"/{ACCOUNT}" if request.param == "az" else "")
        )
        yield Far(storage, storage, proxy)


@pytest.mark.parametrize("fault", FAULTS, ids=names_of_faults)
@pytest.mark.parametrize("span", [(0, None), (1000, 900_000)])
def test_a_read_survives_a_fault(far, fault, span):
    far.store(BIG)
    far.proxy.script = in_turn(fault, fault, when=is_read)
    storage = far.with_retry(stall_timeout_s=0.5 if fault.kind == "stall" else 60.0)
    assert storage.read("a", *span) == BIG[slice(*span)]
    assert far.num_reads() == 3


NO_ANSWERS = {
    "empty": Fault("answer", status=200),
    "no content": Fault("shorten", at=0),
    "short": Fault("shorten", at=1000),
    "another range": Fault("replace", find=b"bytes 50000-", put=b"bytes 40000-"),
    "another size": Fault("replace", find=b"/1048576", put=b"/0001000"),
}
"""What may come in place of the bytes 50,000 to 100,000 of a mebibyte."""


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_answer_that_is_none_is_asked_for_again(far, answer):
    far.store(BIG)
    far.proxy.script = in_turn(NO_ANSWERS[answer], when=is_read)
    assert far.storage.read("a", 50_000, 100_000) == BIG[50_000:100_000]
    assert 2 <= far.num_reads() <= 3


def test_a_read_goes_on_at_the_byte_reached(far):
    far.store(BIG)
    far.proxy.script = in_turn(Fault("truncate", at=200_000), when=is_read)
    assert far.storage.read("a", 1000, 900_000) == BIG[1000:900_000]
    headers = far.proxy.seen[-1].headers
    last = headers.get("range") or headers["x-ms-range"]
    assert 1000 < int(last.removeprefix("bytes=").partition("-")[0]) <= 201_000


@pytest.mark.parametrize("num_bytes", [100_000, len(BIG)])
def test_a_drip_is_asked_for_again_at_the_byte_reached_and_said(far, num_bytes, caplog):
    far.store(BIG)
    drip = Fault("drip", at=1000, seconds=0.05)
    far.proxy.script = in_turn(drip, drip, when=is_read)
    # What passes at each look: at a piece of obstore, otherwise once a second.
    storage = far.with_retry(
        clock=Clock(step_s=1.0 if far.storage.scheme in ("s3", "az") else 60.0)
    )
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
@schemes("https", "gs")
def test_all_wait_for_as_long_as_a_refusal_asks_for(far, clock):
    far.store(BIG)
    refusal = Fault("status", status=503, headers=(("Retry-After", "90"),))
    far.proxy.script = in_turn(refusal, when=is_read)
    assert far.storage.read("a", 10, 20) == BIG[10:20]
    assert clock.now == pytest.approx(90, abs=2)


def test_connections_of_32_threads_are_kept(far, caplog):
    far.store(BIG)
    far.proxy.delay_s = 0.02
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda start: far.storage.read("a", start, start + 10), range(200)))
    assert "pool is full" not in caplog.text
    assert far.proxy.num_connections <= 40


def test_a_name_that_is_not_utf_8_is_refused_at_once(far, clock):
    with pytest.raises(ConfigError, match="is not UTF-8"):
        far.storage.read("a\udcff", 3, 5)
    assert clock.pauses == []


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("method", ["HEAD", "GET", "DELETE"])
@schemes("gs", "s3", "az")
def test_a_deletion_does_not_believe_one_false_404(far, is_pinned, method):
    put(far.origin, "a")
    generation = far.storage.stat("a").generation if is_pinned else None
    far.proxy.script = in_turn(Fault("status", status=404), when=lambda seen: seen.method == method)
    far.storage.delete("a", generation=generation)
    far.proxy.script = lambda seen: None
    assert [found.name for found in far.storage.list()] == []
