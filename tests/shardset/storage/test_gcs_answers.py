"""Refusals of a bucket, and what may come in place of its answers."""

import json
import subprocess
from dataclasses import replace

import pytest

from shardset.errors import NotFound, StorageError, TransientError
from shardset.storage import gcs
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, in_turn, is_media, is_upload
from tests.makers.objects import BIG, HELLO, names, put

pytestmark = pytest.mark.gcs

TEN = [f"{number}" for number in range(10)]


@pytest.mark.parametrize(
    "action", [lambda s: names(s), lambda s: s.stat("a"), lambda s: put(s, "a")]
)
def test_a_missing_bucket_is_said(gcs_root, action):
    with pytest.raises(NotFound, match="no such bucket"):
        action(open_storage("gs://no-such-bucket/x"))


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


def test_another_refusal_is_passed_on_at_once(behind_proxy, proxy, clock):
    proxy.script = lambda seen: Fault("status", status=418)
    with pytest.raises(StorageError, match="/a: the server answered 418"):
        behind_proxy.read("a")
    assert clock.pauses == []


def is_listing(seen):
    return seen.method == "GET" and seen.path.partition("?")[0].endswith("/o")


def is_stat(seen):
    return seen.method == "GET" and "/o/" in seen.path and not is_media(seen)


def is_deletion(seen):
    return seen.method == "DELETE"


@pytest.fixture
def pages_of_three(behind_proxy, monkeypatch):
    """Ten objects, listed in four pages."""
    for name in TEN:
        put(behind_proxy, name)
    monkeypatch.setattr(gcs, "PAGE_SIZE", 3)
    return behind_proxy


NO_ANSWERS = {
    "empty": Fault("answer", status=200),
    "cut": Fault("shorten", at=60),
    "416": Fault("answer", status=416, put=b"<html>the range is not satisfiable</html>"),
    "{}": Fault("answer", status=200, put=b"{}"),
    "another object": Fault(
        "answer", status=200, put=b'{"kind":"storage#object","name":"x","generation":"1"}'
    ),
    "deep": Fault("answer", status=200, put=b"[" * 100_000),
    "nothing more": Fault("answer", status=204),
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
        (is_upload, lambda storage: put(storage, "a"), None),
    ],
    ids=["stat", "read", "range", "upload"],
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


@pytest.mark.parametrize("answer", ["empty", "cut"])
def test_an_upload_that_was_stored_though_its_answer_is_none_is_success(
    behind_proxy, proxy, answer
):
    fault = NO_ANSWERS[answer]
    fault = replace(fault, kind="instead") if fault.kind == "answer" else fault
    proxy.script = in_turn(fault, when=is_upload)
    put(behind_proxy, "a", if_generation=ABSENT)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == HELLO


@pytest.mark.parametrize("start", [b"", b"other/"])
def test_another_page_of_a_list_is_not_taken(pages_of_three, proxy, start):
    # A cache on the way that does not look at the page token: the first page comes again and again.
    folder = start.decode() or f"{pages_of_three.prefix}/"
    listed = [{"name": f"{folder}{number}", "generation": "1"} for number in (0, 1)]
    first = json.dumps(
        {"kind": "storage#objects", "items": listed, "nextPageToken": "again"}
    ).encode()
    proxy.script = in_turn(None, Fault("answer", status=200, put=first), when=is_listing)
    assert names(pages_of_three) == TEN
    proxy.script = in_turn(None, *[Fault("answer", status=200, put=first)] * 1000, when=is_listing)
    with pytest.raises(TransientError, match="another page of the list, by its object"):
        names(pages_of_three)


def test_a_list_that_leads_to_its_own_page_for_ever_is_an_error(pages_of_three, proxy):
    page = Fault("answer", status=200, put=b'{"kind": "storage#objects", "nextPageToken": "again"}')
    proxy.script = lambda seen: page if is_listing(seen) else None
    with pytest.raises(TransientError, match="another page of the list, by its page token"):
        names(pages_of_three)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault("status", status=404), NO_ANSWERS["empty"]], ids=["404", "empty"]
)
def test_a_deletion_counts_only_once_the_object_is_gone(behind_proxy, proxy, fault, is_pinned):
    put(behind_proxy, "a")
    generation = behind_proxy.stat("a").generation if is_pinned else None
    proxy.script = in_turn(fault, when=is_deletion)
    behind_proxy.delete("a", generation=generation)
    assert names(behind_proxy) == []
    assert sum(map(is_deletion, proxy.seen)) == 2
    put(behind_proxy, "a")
    generation = behind_proxy.stat("a").generation if is_pinned else None
    proxy.script = lambda seen: fault if is_deletion(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after"):
        behind_proxy.delete("a", generation=generation)


def test_a_deletion_whose_answer_was_lost_is_done_and_a_newer_object_stays(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = in_turn(Fault("lose"), when=is_deletion)
    behind_proxy.delete("a")
    assert sum(map(is_deletion, proxy.seen)) == 2
    assert names(behind_proxy) == []
    put(behind_proxy, "a")
    seen = behind_proxy.stat("a").generation
    put(behind_proxy, "a", BIG)
    behind_proxy.delete("a", generation=seen)
    assert behind_proxy.read("a") == BIG


def test_an_object_without_a_size_is_an_empty_one(behind_proxy, proxy):
    # What Google's test bench answers.
    proxy.script = lambda seen: (
        None if is_media(seen) else Fault("replace", find=b'"size":"0",', put=b"")
    )
    put(behind_proxy, "a", b"", if_generation=ABSENT)
    put(behind_proxy, "a", b"")
    assert behind_proxy.stat("a").num_bytes == 0
    assert [(found.name, found.num_bytes) for found in behind_proxy.list()] == [("a", 0)]
    assert behind_proxy.read("a") == b""


@pytest.mark.parametrize("is_asked", [is_stat, is_listing, is_upload])
def test_a_size_that_is_missing_from_an_object_with_content_is_asked_for_again(
    behind_proxy, proxy, is_asked
):
    proxy.script = in_turn(Fault("replace", find=b'"size":"11",', put=b""), when=is_asked)
    put(behind_proxy, "a")
    assert behind_proxy.stat("a").num_bytes == 11
    assert [found.num_bytes for found in behind_proxy.list()] == [11]
    assert sum(map(is_asked, proxy.seen)) == 2


def test_a_page_in_no_order_is_put_in_order(pages_of_three, proxy):
    # Google's test bench lists objects as they were written, all on one page.
    listed = [
        {"name": f"{pages_of_three.prefix}/{name}", "generation": "1", "size": "1"}
        for name in "cab"
    ]
    page = json.dumps({"kind": "storage#objects", "items": listed}).encode()
    proxy.script = in_turn(Fault("answer", status=200, put=page), when=is_listing)
    assert names(pages_of_three) == ["a", "b", "c"]


def test_folders_drawn_by_consoles_are_not_listed(gcs_root, gcs_emulator):
    storage = open_storage(gcs_root)
    put(storage, "train/a")
    url = (
        f"{gcs_emulator}/upload/storage/v1/b/bucket/o?uploadType=media&name={storage.prefix}/train/"
    )
    subprocess.run(["curl", "-sf", "-XPOST", url, "-d", ""], check=True, stdout=subprocess.DEVNULL)
    assert names(storage) == ["train/a"]
