"""Refusals of a bucket, and answers that are none."""

import json
import subprocess
from dataclasses import replace

import pytest

from shardset.errors import NotFound, StorageError, TransientError
from shardset.storage.base import ABSENT
from shardset.storage.gcs import bucket_location
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import Fault, in_turn, is_media, is_upload
from tests.makers.objects import BIG, HELLO, limited, names, put


@pytest.mark.gcs
@pytest.mark.parametrize("action", [lambda s: names(s), lambda s: s.stat("a"), lambda s: put(s, "a")])
def test_a_missing_bucket_is_said(gcs_root, action):
    with pytest.raises(NotFound, match="no such bucket"):
        action(open_storage("gs://no-such-bucket/x"))


@pytest.mark.gcs
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_says_which_permission_is_needed(behind_proxy, proxy, status, clock):
    proxy.script = lambda seen: Fault("status", status=status)
    for action in (lambda: behind_proxy.stat("a"), lambda: behind_proxy.read("a"), lambda: put(behind_proxy, "a")):
        with pytest.raises(StorageError, match=rf"/a: .*{status}.*storage\.objects\.get.*application-default login"):
            action()
    assert clock.pauses == []


RETENTION = "Object 'bucket/a' is subject to bucket's retention policy and cannot be deleted or overwritten until 2027."


@pytest.mark.gcs
@pytest.mark.parametrize(
    "body", [RETENTION, json.dumps({"error": {"errors": [{"message": "x" * 500}], "code": 403, "message": RETENTION}})]
)
def test_a_refusal_says_what_the_server_says(behind_proxy, proxy, body):
    # Not only permissions: a retention policy, a closed billing account, a perimeter around the project.
    proxy.script = lambda seen: Fault("status", status=403, put=body.encode())
    for action in (lambda: behind_proxy.stat("a"), lambda: behind_proxy.read("a"), lambda: put(behind_proxy, "a")):
        with pytest.raises(StorageError) as caught:
            action()
        assert f"may not do this ({RETENTION}); if a permission is missing, " in str(caught.value)


@pytest.mark.gcs
@pytest.mark.parametrize("body", [b" ", b"[]", b'{"error": "x"}', b'{"error": {}}', b"<html>\n no </html>", b"\xff"])
def test_a_refusal_in_other_words_is_one_too(behind_proxy, proxy, body):
    proxy.script = lambda seen: Fault("status", status=403, put=body)
    with pytest.raises(
        StorageError, match=r"403: the emulator at .* may not do this.* if a permission .*application-default login"
    ):
        behind_proxy.stat("a")


@pytest.mark.gcs
def test_another_refusal_is_passed_on_at_once(behind_proxy, proxy, clock):
    proxy.script = lambda seen: Fault("status", status=418)
    with pytest.raises(StorageError, match="/a: the server answered 418"):
        behind_proxy.read("a")
    assert clock.pauses == []


@pytest.mark.gcs
def test_a_list_survives_faults_on_any_page(behind_proxy, proxy, monkeypatch):
    for number in range(10):
        put(behind_proxy, f"{number}", b"")
    first = len(proxy.seen)
    proxy.script = lambda seen: Fault("status", status=503) if (seen.number - first) % 2 == 0 else None
    assert names(behind_proxy) == [f"{number}" for number in range(10)]


NO_ANSWERS = {
    "empty": Fault("answer", status=200),
    "empty chunked": Fault("chunked", status=200),
    "cut": Fault("shorten", at=60),
    "416": Fault("answer", status=416, put=b"<html>the range is not satisfiable</html>"),
    "[]": Fault("answer", status=200, put=b"[]"),
    "null": Fault("answer", status=200, put=b"null"),
    "{}": Fault("answer", status=200, put=b"{}"),
    "{} in chunks": Fault("chunked", status=200, put=b"{}"),
    "another kind": Fault("answer", status=200, put=b'{"kind": "storage#buckets", "items": []}'),
    "items that are none": Fault("answer", status=200, put=b'{"kind": "storage#objects", "items": {"name": "a"}}'),
    "an item without a name": Fault("answer", status=200, put=b'{"kind": "storage#objects", "items": [{}]}'),
    "a token that is none": Fault("answer", status=200, put=b'{"kind": "storage#objects", "nextPageToken": 7}'),
    "another object": Fault("answer", status=200, put=b'{"kind":"storage#object","name":"x","generation":"1"}'),
    "deep": Fault("answer", status=200, put=b"[" * 100_000),
    "HTML": Fault("answer", status=200, put=b"<html>please log in</html>"),
    "nothing more": Fault("answer", status=204),
}
"""What may come in place of the answer to a request for JSON."""


def is_listing(seen):
    return seen.method == "GET" and seen.path.partition("?")[0].endswith("/o")


def is_stat(seen):
    return seen.method == "GET" and "/o/" in seen.path and not is_media(seen)


@pytest.fixture
def pages_of_three(behind_proxy):
    """Ten objects, listed in four pages."""
    for number in range(10):
        put(behind_proxy, f"{number}")
    return limited(behind_proxy, page_size=3)


@pytest.mark.gcs
@pytest.mark.parametrize("page", [0, 3])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_page_of_a_list_that_is_none_is_asked_for_again_and_never_taken_for_its_end(
    pages_of_three, proxy, answer, page
):
    proxy.script = in_turn(*[None] * page, NO_ANSWERS[answer], when=is_listing)
    assert names(pages_of_three) == [f"{number}" for number in range(10)]
    assert sum(map(is_listing, proxy.seen)) == 5
    proxy.script = in_turn(*[None] * page, *[NO_ANSWERS[answer]] * 1000, when=is_listing)
    with pytest.raises(TransientError, match=r"gs://bucket/folder.*gave up after \d+ tries"):
        names(pages_of_three)


@pytest.mark.gcs
@pytest.mark.parametrize("start", [b"", b"other/"])
def test_another_page_of_a_list_is_not_taken(pages_of_three, proxy, start):
    # A cache on the way that does not look at the page token: the first page comes again and again.
    listed = [
        {"name": f"{start.decode() or pages_of_three.prefix + '/'}{number}", "generation": "1"} for number in (0, 1)
    ]
    first = json.dumps({"kind": "storage#objects", "items": listed, "nextPageToken": "again"}).encode()
    proxy.script = in_turn(None, Fault("answer", status=200, put=first), when=is_listing)
    assert names(pages_of_three) == [f"{number}" for number in range(10)]
    proxy.script = in_turn(None, *[Fault("answer", status=200, put=first)] * 1000, when=is_listing)
    with pytest.raises(TransientError, match="another page of the list, by its object"):
        names(pages_of_three)


@pytest.mark.gcs
def test_a_list_that_leads_to_its_own_page_for_ever_is_an_error(pages_of_three, proxy):
    page = Fault("answer", status=200, put=b'{"kind": "storage#objects", "nextPageToken": "again"}')
    proxy.script = lambda seen: page if is_listing(seen) else None
    with pytest.raises(TransientError, match="another page of the list, by its page token"):
        names(pages_of_three)


@pytest.mark.gcs
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_a_stat_that_is_none_is_asked_for_again_and_then_named(behind_proxy, proxy, answer):
    put(behind_proxy, "a")
    proxy.script = in_turn(NO_ANSWERS[answer], when=is_stat)
    assert behind_proxy.stat("a").num_bytes == 11
    assert sum(map(is_stat, proxy.seen)) == 2
    proxy.script = lambda seen: NO_ANSWERS[answer] if is_stat(seen) else None
    with pytest.raises(TransientError, match=r"/a: .*gave up after \d+ tries"):
        behind_proxy.stat("a")


@pytest.mark.gcs
@pytest.mark.parametrize(("is_stored", "options"), [(False, {}), (True, {"if_generation": ABSENT})])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_upload_whose_answer_is_none_is_sent_again(behind_proxy, proxy, answer, is_stored, options):
    fault = NO_ANSWERS[answer]
    fault = replace(fault, kind="instead") if is_stored and fault.kind in ("answer", "chunked") else fault
    proxy.script = in_turn(fault, when=is_upload)
    put(behind_proxy, "a", **options)
    assert sum(map(is_upload, proxy.seen)) == 2
    assert behind_proxy.read("a") == HELLO
    proxy.script = lambda seen: NO_ANSWERS[answer] if is_upload(seen) else None
    with pytest.raises(TransientError, match=r"/b: .*gave up after \d+ tries"):
        put(behind_proxy, "b")


@pytest.mark.gcs
@pytest.mark.parametrize("answer", ["416", "{}", "HTML", "deep"])
def test_a_deletion_whose_answer_is_none_is_asked_for_again(behind_proxy, proxy, answer):
    put(behind_proxy, "a")
    proxy.script = in_turn(NO_ANSWERS[answer], when=lambda seen: seen.method == "DELETE")
    behind_proxy.delete("a")
    assert names(behind_proxy) == []


def is_deletion(seen):
    return seen.method == "DELETE"


@pytest.mark.gcs
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=404),
        Fault("status", status=410),
        Fault("status", status=412),
        Fault("answer", status=200),
    ],
    ids=lambda fault: str(fault.status),
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
    with pytest.raises(TransientError, match=r"/a: it is still stored after its deletion was answered with: .*gave up"):
        behind_proxy.delete("a", generation=generation)


@pytest.mark.gcs
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


@pytest.mark.gcs
@pytest.mark.parametrize(("start", "stop"), [(0, None), (3, 5)])
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_bytes_that_are_not_from_the_bucket_are_not_taken(behind_proxy, proxy, answer, start, stop):
    put(behind_proxy, "a")
    proxy.script = in_turn(replace(NO_ANSWERS[answer], at=1), when=is_media)
    assert behind_proxy.read("a", start, stop) == HELLO[start:stop]
    assert sum(map(is_media, proxy.seen)) == 2
    proxy.script = lambda seen: replace(NO_ANSWERS[answer], at=0) if is_media(seen) else None
    with pytest.raises(TransientError, match=r"/a.*gave up after \d+ tries"):
        behind_proxy.read("a", start, stop)


@pytest.mark.gcs
def test_a_location_that_is_none_is_asked_for_again(behind_proxy, proxy):
    proxy.script = in_turn(NO_ANSWERS["{}"], NO_ANSWERS["empty"])
    assert bucket_location("bucket", behind_proxy.retry) == bucket_location("bucket", RetryPolicy())


def without_size(seen):
    """What Google's test bench answers: an empty object has no size."""
    return None if is_media(seen) else Fault("replace", find=b'"size":"0",', put=b"")


@pytest.mark.gcs
def test_an_object_without_a_size_is_an_empty_one(behind_proxy, proxy):
    proxy.script = without_size
    put(behind_proxy, "a", b"", if_generation=ABSENT)
    put(behind_proxy, "a", b"")
    assert behind_proxy.stat("a").num_bytes == 0
    assert [(found.name, found.num_bytes) for found in behind_proxy.list()] == [("a", 0)]
    assert behind_proxy.read("a") == b""
    behind_proxy.delete("a")


@pytest.mark.gcs
@pytest.mark.parametrize("is_asked", [is_stat, is_listing, is_upload])
def test_a_size_that_is_missing_from_an_object_with_content_is_asked_for_again(behind_proxy, proxy, is_asked):
    proxy.script = in_turn(Fault("replace", find=b'"size":"11",', put=b""), when=is_asked)
    put(behind_proxy, "a")
    assert behind_proxy.stat("a").num_bytes == 11
    assert [found.num_bytes for found in behind_proxy.list()] == [11]
    assert sum(map(is_asked, proxy.seen)) == 2


@pytest.mark.gcs
def test_a_page_in_no_order_is_put_in_order(pages_of_three, proxy):
    # Google's test bench lists objects as they were written, all on one page.
    listed = [{"name": f"{pages_of_three.prefix}/{name}", "generation": "1", "size": "1"} for name in "cab"]
    page = json.dumps({"kind": "storage#objects", "items": listed}).encode()
    proxy.script = in_turn(Fault("answer", status=200, put=page), when=is_listing)
    assert names(pages_of_three) == ["a", "b", "c"]


@pytest.mark.gcs
def test_the_size_in_a_416_is_compared_with_the_object(behind_proxy, proxy):
    put(behind_proxy, "a")
    proxy.script = lambda seen: Fault("replace", find=b"bytes */11", put=b"bytes */99")
    with pytest.raises(StorageError, match="bytes 12 to 15 were asked for but it holds 11"):
        behind_proxy.read("a", 12, 15)


@pytest.mark.gcs
def test_content_may_hold_what_parts_another_upload(behind_proxy, proxy):
    boundaries = set()

    def boundary_of(seen):
        boundaries.add(seen.headers["content-type"].partition("boundary=")[2])

    proxy.script = lambda seen: boundary_of(seen) if is_upload(seen) else None
    content = b"a\r\n--shardset-2f9f6e0b8f5c4d6c\r\nb\r\n--shardset-2f9f6e0b8f5c4d6c--\r\n"
    put(behind_proxy, "a", content)
    content += b"".join(f"\r\n--{found}--\r\n".encode() for found in boundaries)
    put(behind_proxy, "a", content)
    assert behind_proxy.read("a") == content
    assert len(boundaries) == 2


@pytest.mark.gcs
def test_folders_drawn_by_consoles_are_not_listed(gcs_root, gcs_emulator):
    storage = open_storage(gcs_root)
    put(storage, "train/a")
    url = f"{gcs_emulator}/upload/storage/v1/b/bucket/o?uploadType=media&name={storage.prefix}/train/"
    subprocess.run(["curl", "-sf", "-XPOST", url, "-d", ""], check=True, stdout=subprocess.DEVNULL)
    assert names(storage) == ["train/a"]


@pytest.mark.gcs
def test_an_emulator_may_be_named_without_a_scheme(gcs_root, gcs_emulator, monkeypatch):
    put(open_storage(gcs_root), "a")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_emulator.removeprefix("http://"))
    assert open_storage(gcs_root).read("a") == HELLO
