"""Refusals of a bucket, and what may come in place of its answers."""

import json
import subprocess
from dataclasses import replace

import pytest

from shardset.errors import PreconditionFailed, StorageError, TransientError
from shardset.storage import gcs
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, in_turn, is_listing, is_media, is_upload
from tests.makers.objects import BIG, HELLO, names, put

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
    "another object": Fault(
        "status", status=200, put=b'{"kind":"storage#object","name":"x","generation":"1"}'
    ),
    "deep": Fault("status", status=200, put=b"[" * 100_000),
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


def test_another_page_of_a_list_is_not_taken(pages_of_three, proxy):
    # A cache on the way that does not look at the page token: the first page comes again and again.
    listed = [
        {"name": f"{pages_of_three.prefix}/{number}", "generation": "1", "size": "1"}
        for number in (0, 1)
    ]
    first = json.dumps(
        {"kind": "storage#objects", "items": listed, "nextPageToken": "again"}
    ).encode()
    proxy.script = in_turn(None, Fault("status", status=200, put=first), when=is_listing)
    assert names(pages_of_three) == TEN
    proxy.script = in_turn(None, *[Fault("status", status=200, put=first)] * 1000, when=is_listing)
    with pytest.raises(TransientError, match="another page of the list, by its object"):
        names(pages_of_three)


def test_a_list_that_leads_to_its_own_page_for_ever_is_an_error(pages_of_three, proxy):
    page = Fault("status", status=200, put=b'{"kind": "storage#objects", "nextPageToken": "again"}')
    proxy.script = lambda seen: page if is_listing(seen) else None
    with pytest.raises(TransientError, match="another page of the list, by its page token"):
        names(pages_of_three)


def test_folders_drawn_by_consoles_are_not_listed(gcs_root, gcs_emulator):
    storage = open_storage(gcs_root)
    put(storage, "train/a")
    url = (
        f"{gcs_emulator}/upload/storage/v1/b/bucket/o?uploadType=media&name={storage.prefix}/train/"
    )
    subprocess.run(["curl", "-sf", "-XPOST", url, "-d", ""], check=True, stdout=subprocess.DEVNULL)
    assert names(storage) == ["train/a"]


def test_another_generation_in_the_answer_to_a_range_is_final_only_if_the_object_confirms_it(
    behind_proxy, proxy
):
    put(behind_proxy, "a", BIG)
    generation = behind_proxy.stat("a").generation
    another = Fault("replace", find=generation.encode(), put=b"1" * len(generation))
    proxy.script = in_turn(another, when=is_media)
    assert behind_proxy.read("a", 50_000, 60_000, generation=generation) == BIG[50_000:60_000]
    assert sum(map(is_media, proxy.seen)) == 2
    proxy.script = lambda seen: another
    with pytest.raises(PreconditionFailed):
        behind_proxy.read("a", 50_000, 60_000, generation=generation)
