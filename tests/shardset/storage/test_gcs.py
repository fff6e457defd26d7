"""Refusals of a bucket, what may come in place of its answers, and writes to it over a network that
breaks.
"""

import io
import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from shardset.errors import StorageError, TransientError
from shardset.storage import gcs
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, in_turn, is_listing, is_media, is_upload
from tests.makers.objects import BIG, HELLO, Clock, file_size_limit, names, put

pytestmark = pytest.mark.gcs


@pytest.fixture
def scheme():
    return "gs"


TEN = [f"{number}" for number in range(10)]


RETENTION = (
    "Object 'bucket/a' is subject to bucket's retention policy and cannot be deleted or overwritten"
    " until 2027."
)
WRAPPED = json.dumps(
    {"error": {"errors": [{"message": "x" * 500}], "code": 403, "message": RETENTION}}
)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "", ""),
        (403, RETENTION, f" ({RETENTION})"),
        (403, WRAPPED, f" ({RETENTION})"),
        (403, "[]", " ([])"),
    ],
)
def test_a_refusal_passes_on_what_the_server_says_and_names_the_permission(
    behind_proxy, proxy, clock, status, body, said
):
    # Not only permissions: a retention policy, a closed billing account, a perimeter around the
    # project.
    proxy.script = lambda seen: Fault("status", status=status, put=body.encode())
    for action in (
        lambda: behind_proxy.stat("a"),
        lambda: behind_proxy.read("a"),
        lambda: put(behind_proxy, "a"),
    ):
        with pytest.raises(
            StorageError, match=r"storage\.objects\.get.*application-default login"
        ) as caught:
            action()
        assert f"/a: {status}: the emulator at {proxy.url} may not do this{said}; if a" in str(
            caught.value
        )
    assert clock.pauses == []


def is_stat(seen):
    return seen.method == "GET" and "/o/" in seen.path and not is_media(seen)


@pytest.fixture
def pages_of_three(behind_proxy, monkeypatch):
    """Ten objects, listed in four pages."""
    for name in TEN:
        put(behind_proxy, name)
    monkeypatch.setattr(gcs, "PAGE_SIZE", 3)
    return behind_proxy


NO_ANSWERS = {
    "empty": Fault("status", status=200),
    "cut": Fault("shorten", at=60),
    "416": Fault("status", status=416, put=b"<html>the range is not satisfiable</html>"),
    "{}": Fault("status", status=200, put=b"{}"),
    "deep": Fault("status", status=200, put=b"[" * 1100),
    "nothing more": Fault("status", status=204),
    "no size": Fault(
        "status", status=200, put=b'{"kind":"storage#object","name":"a","generation":"1"}'
    ),
}
"""What may come in place of an answer."""


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_page_of_a_list_that_is_none_is_asked_for_again_and_never_taken_for_its_end(
    pages_of_three, proxy, answer
):
    proxy.script = in_turn(None, None, None, NO_ANSWERS[answer], when=is_listing)
    assert names(pages_of_three) == TEN
    assert sum(map(is_listing, proxy.seen)) == 5
    proxy.script = in_turn(None, None, None, *[NO_ANSWERS[answer]] * 1000, when=is_listing)
    with pytest.raises(TransientError, match=r"gs://bucket/folder.*gave up after \d+ tries"):
        names(pages_of_three)


@pytest.mark.parametrize("answer", NO_ANSWERS)
@pytest.mark.parametrize(
    ("is_asked", "action", "expected"),
    [
        (is_stat, lambda storage: storage.stat("a").num_bytes, 11),
        (is_media, lambda storage: storage.read("a"), HELLO),
        (is_media, lambda storage: storage.read("a", 3, 5), HELLO[3:5]),
    ],
    ids=["stat", "read", "range"],
)
def test_what_is_not_the_answer_is_asked_for_again_and_then_named(
    behind_proxy, proxy, answer, is_asked, action, expected
):
    put(behind_proxy, "a")
    before = sum(map(is_asked, proxy.seen))
    proxy.script = in_turn(replace(NO_ANSWERS[answer], at=1), when=is_asked)
    assert action(behind_proxy) == expected
    assert sum(map(is_asked, proxy.seen)) == before + 2
    proxy.script = lambda seen: replace(NO_ANSWERS[answer], at=0) if is_asked(seen) else None
    with pytest.raises(TransientError, match=r"/a.*gave up after \d+ tries"):
        action(behind_proxy)
    proxy.script = lambda seen: None
    assert behind_proxy.read("a") == HELLO


def test_folders_drawn_by_consoles_are_not_listed(gcs_root, gcs_emulator):
    storage: Any = open_storage(gcs_root)
    put(storage, "train/a")
    url = (
        f"{gcs_emulator}/upload/storage/v1/b/bucket/o?uploadType=media&name={storage.prefix}/train/"
    )
    subprocess.run(["curl", "-sf", "-XPOST", url, "-d", ""], check=True, stdout=subprocess.DEVNULL)
    assert names(storage) == ["train/a"]


def test_an_emulator_may_leave_out_the_size_of_an_empty_object(behind_proxy, proxy):
    put(behind_proxy, "a", b"")
    stat = behind_proxy.stat("a")
    name = f"{behind_proxy.prefix}/a"
    facts = {"name": name, "generation": stat.generation, "crc32c": stat.crc32c}
    one = json.dumps({"kind": "storage#object"} | facts).encode()
    page = json.dumps({"kind": "storage#objects", "items": [facts]}).encode()

    def leave_out(seen):
        body = page if is_listing(seen) else one
        return None if is_media(seen) else Fault("status", status=200, put=body)

    proxy.script = leave_out
    assert behind_proxy.stat("a") == stat
    assert list(behind_proxy.list()) == [stat]
    assert behind_proxy.read("a") == b""


# --- writes ---------------------------------------------------------------------------------------


def test_an_upload_that_trickles_is_given_up(behind_proxy, monkeypatch):
    policy = replace(
        behind_proxy.retry, clock=Clock(step_s=0.01), request_deadline_s=-100.0, give_up_after_s=1.0
    )
    with pytest.raises(TransientError, match="slower than 64 KiB/s"):
        put(replace(behind_proxy, retry=policy), "a", BIG)
    assert names(behind_proxy) == []


def test_an_upload_over_a_slow_line_has_the_time_it_takes():
    bytes_per_s = 100_000  # the share of each of eight workers of a build behind a line of 6 Mbit/s
    shard = io.BytesIO(bytes(96 << 20))
    policy = RetryPolicy(clock=lambda: shard.tell() / bytes_per_s)
    written: Any = gcs.GcsStorage("bucket", retry=policy).writer("a")
    written.file = shard
    pieces = [len(piece) for piece in gcs._Upload({"contentType": ""}, written, policy)]
    assert sum(pieces) > 96 << 20
    assert max(pieces) / bytes_per_s < policy.connect_timeout_s  # in which a piece has to be taken


@pytest.mark.parametrize("at", [300, 100_000])
def test_an_upload_cut_on_its_way_is_never_visible(behind_proxy, proxy, at):
    proxy.script = lambda seen: Fault("cut_upload", at=at) if is_upload(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after"):
        put(behind_proxy, "a", BIG)
    assert names(behind_proxy) == []


def test_a_bit_flipped_on_its_way_up_is_sent_again(behind_proxy, proxy):
    proxy.script = in_turn(Fault("flip_upload", at=100_000), when=is_upload)
    put(behind_proxy, "a", BIG)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == BIG


def test_an_object_larger_than_the_memory_for_it_goes_through_a_file(gcs_root, monkeypatch):
    monkeypatch.setattr(gcs, "SPOOL_BYTES", 50_000)
    storage = open_storage(gcs_root)
    put(storage, "big", BIG, if_generation=ABSENT)
    assert storage.read("big") == BIG


@pytest.mark.parametrize("num_small", [1, 1000])
def test_a_temporary_folder_that_is_full_at_the_last_byte_is_said(gcs_root, num_small, monkeypatch):
    # Small writes wait in a buffer: the disk refuses them when that is full, when all is sent, or
    # when it is closed.
    monkeypatch.setattr(gcs, "SPOOL_BYTES", 50_000)
    storage = open_storage(gcs_root)

    def write():
        with storage.writer("a") as writer:
            writer.write(BIG[:98_000])
            for _ in range(num_small):
                writer.write(BIG[:3000])

    with (
        file_size_limit(100_000),
        pytest.raises(StorageError, match=r"a, in the temporary folder .*larger than the"),
    ):
        write()
    assert names(storage) == []
