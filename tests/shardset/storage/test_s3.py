"""What is special about S3: its checksums are ours, its client must not be forked, nothing is
deleted conditionally.
"""

import random
import urllib.request
from dataclasses import replace

import obstore
import pytest

from shardset.errors import (
    ConfigError,
    DamagedShard,
    NotFound,
    PreconditionFailed,
    StorageError,
    TransientError,
)
from shardset.storage import s3
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import FAULTS, Fault, FaultyProxy, in_turn, is_read, names_of_faults
from tests.makers.objects import BIG, HELLO, Clock, in_child, names, put


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def proxy(s3_server):
    with FaultyProxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def storage(s3_root):
    return open_storage(s3_root)


@pytest.fixture
def behind_proxy(storage, proxy, clock, monkeypatch):
    """An `s3://` folder behind the faulty proxy, with retries that cost no time."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    return replace(storage, retry=RetryPolicy(clock=clock, sleep=clock.sleep, stall_timeout_s=0.5))


def is_upload(seen):
    return seen.method == "PUT"


def is_listing(seen):
    return "list-type" in seen.path


def test_a_bit_flipped_on_its_way_down_is_read_again(behind_proxy, proxy):
    put(behind_proxy, "a", BIG)
    proxy.script = in_turn(Fault("flip", at=1234), when=is_read)
    assert behind_proxy.read("a") == BIG
    assert sum(map(is_read, proxy.seen)) == 2


def test_a_bit_flipped_on_its_way_up_is_an_error_of_the_writer_and_of_every_reader(
    behind_proxy, proxy
):
    # Amazon compares the body with its signature; this server does not.
    proxy.script = in_turn(Fault("flip_upload", at=1234), when=is_upload)
    with pytest.raises(DamagedShard, match="/a: has not the CRC32C it was written with"):
        put(behind_proxy, "a", BIG)
    with pytest.raises(DamagedShard, match="replace it"):
        behind_proxy.read("a")
    put(behind_proxy, "a", BIG)
    assert behind_proxy.read("a") == BIG


@pytest.mark.parametrize("fault", FAULTS[:5], ids=names_of_faults)
@pytest.mark.parametrize("condition", ["none", "absent", "replaced"])
def test_a_write_survives_a_fault(behind_proxy, proxy, fault, condition):
    options = {"if_generation": ABSENT} if condition == "absent" else {}
    if condition == "replaced":
        put(behind_proxy, "train/a")
        options = {"if_generation": behind_proxy.stat("train/a").generation}
    proxy.script = in_turn(fault, fault, when=is_upload)
    put(behind_proxy, "train/a", BIG, **options)
    assert behind_proxy.read("train/a") == BIG


@pytest.mark.parametrize("if_generation", [ABSENT, "seen"])
def test_a_lost_answer_does_not_hide_another_writer(behind_proxy, proxy, if_generation):
    put(behind_proxy, "a", b"old")
    seen = behind_proxy.stat("a").generation if if_generation == "seen" else ABSENT
    proxy.script = in_turn(Fault("reset"), when=is_upload)
    put(replace(behind_proxy, retry=RetryPolicy()), "a", b"theirs")
    with pytest.raises(PreconditionFailed, match="a different object exists"):
        put(behind_proxy, "a", b"ours", if_generation=seen)
    assert behind_proxy.read("a") == b"theirs"


def test_a_conflict_with_a_write_under_way_is_tried_again(behind_proxy, proxy):
    conflict = Fault(
        "status", status=409, put=b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    )
    proxy.script = in_turn(conflict, conflict, when=is_upload)
    put(behind_proxy, "a", if_generation=ABSENT)
    assert behind_proxy.read("a") == HELLO


@pytest.mark.parametrize("fault", [*FAULTS[:6], Fault("shorten", at=60)], ids=names_of_faults)
def test_a_listing_is_whole_or_asked_for_again(behind_proxy, proxy, fault, monkeypatch):
    monkeypatch.setattr(s3, "_PAGE_SIZE", 3)
    wanted = [f"a/{number}" for number in range(10)]
    for name in (*wanted, "b"):
        put(behind_proxy, name)
    proxy.script = in_turn(None, fault, fault, when=is_listing)
    assert names(behind_proxy, "a/") == wanted


def test_with_a_third_of_all_requests_failing_nothing_is_wrong(behind_proxy, proxy):
    chance = random.Random(7)
    proxy.script = lambda seen: chance.choice(FAULTS[:6]) if chance.random() < 1 / 3 else None
    wanted = {
        f"a/{number:02d}": chance.randbytes(chance.randrange(1, 5000)) for number in range(20)
    }
    for name, data in wanted.items():
        put(behind_proxy, name, data, if_generation=ABSENT)
        with pytest.raises(PreconditionFailed):
            put(behind_proxy, name, b"theirs", if_generation=ABSENT)
    assert names(behind_proxy) == list(wanted)
    for name, data in wanted.items():
        start = chance.randrange(len(data))
        assert behind_proxy.read(name) == data
        assert behind_proxy.read(name, start) == data[start:]
        behind_proxy.delete(name, generation=behind_proxy.stat(name).generation)
    assert names(behind_proxy) == []


@pytest.mark.parametrize("status", [301, 400, 401, 403, 418])
def test_a_refusal_is_said_at_once(behind_proxy, proxy, clock, status):
    proxy.script = lambda seen: Fault(
        "status", status=status, put=b"<Message>not like this</Message>"
    )
    with pytest.raises(StorageError, match=r"/a: .*check the name, AWS_ENDPOINT_URL, AWS_REGION"):
        behind_proxy.read("a")
    assert clock.pauses == []


def test_what_never_comes_is_an_error_that_says_so(behind_proxy, proxy, clock):
    proxy.script = lambda seen: Fault("status", status=503)
    with pytest.raises(TransientError, match=r"/a: .*503.*gave up after .* fewer readers"):
        behind_proxy.read("a")
    assert clock.now > 600


def test_a_missing_bucket_is_said(s3_root):
    for action in (lambda s: s.read("a"), lambda s: put(s, "a"), names):
        with pytest.raises(NotFound, match="no-such-bucket"):
            action(open_storage("s3://no-such-bucket/x"))


def test_a_process_that_was_forked_after_its_parent_used_s3_is_told_how_to_start_it(storage):
    put(storage, "a")
    kind, text = in_child(lambda: None, lambda: storage.read("a"))
    assert kind == "StorageError"
    assert "forkserver" in text


def test_an_object_of_another_program_has_no_checksum_and_is_no_match(storage):
    store = storage._client(len(HELLO))
    obstore.put(store, f"{storage.prefix}/a", HELLO)
    assert storage.stat("a").crc32c is None
    assert storage.read("a") == HELLO
    with pytest.raises(PreconditionFailed, match="a different object exists"):
        put(storage, "a", if_generation=ABSENT)


def test_an_object_in_parts_has_another_etag_and_is_read_back(storage, monkeypatch):
    # So does an encrypted one: the ETag is no checksum there.
    put_in_one = obstore.put
    parts = {"use_multipart": True, "chunk_size": 5 << 20, "mode": "overwrite"}
    monkeypatch.setattr(
        obstore, "put", lambda *words, **options: put_in_one(*words, **{**options, **parts})
    )
    put(storage, "a", BIG * 6)
    assert storage.stat("a").generation.endswith('-2"')
    assert storage.read("a") == BIG * 6


def test_what_is_read_back_is_what_was_written_and_not_what_has_replaced_it(storage, monkeypatch):
    put_one = obstore.put

    def put_and_be_replaced(*words, **options):
        put_one(*words, **options)
        put_one(*words[:2], b"damaged", attributes={"crc32c": "AAAAAA=="})
        return {"e_tag": '"of an encrypted bucket"'}

    monkeypatch.setattr(obstore, "put", put_and_be_replaced)
    put(storage, "a")


@pytest.mark.parametrize("name", ["a\nb", "a\x7f"])
def test_a_name_that_obstore_can_not_say_is_refused(storage, name):
    for action in (storage.read, lambda name: put(storage, name)):
        with pytest.raises(StorageError, match="Could not parse path"):
            action(name)


def test_folders_as_consoles_draw_them_and_names_with_empty_parts(storage, s3_server):
    put(storage, "x/a")
    folder = f"{s3_server}/{storage.bucket}/{storage.prefix}"

    def put_raw(name):
        urllib.request.urlopen(urllib.request.Request(f"{folder}/{name}", method="PUT")).close()

    put(storage, "empty", b"")
    put(storage, "x-1")
    for name in ("", "x/", "nothing/", "empty/"):
        put_raw(name)
    assert names(storage) == ["empty", "x-1", "x/a"]
    assert names(storage, "x/") == ["x/a"]
    put_raw("z/")  # the last key of all
    assert names(storage) == ["empty", "x-1", "x/a"]
    put_raw("y//b")
    with pytest.raises(StorageError, match=r"invalid path: .*y//b"):
        names(storage)


def test_more_than_one_request_can_carry_is_refused_when_it_is_written(storage, monkeypatch):
    monkeypatch.setattr(s3, "MAX_BYTES", 10)
    with storage.writer("a") as writer:
        writer.write(HELLO[:10])
        with pytest.raises(
            StorageError, match="/a: more than the 10 bytes that one request can carry"
        ):
            writer.write(HELLO[10:])


def test_an_endpoint_that_is_none_is_named(storage, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    with pytest.raises(
        ConfigError, match="AWS_ENDPOINT_URL is nonsense, expected an address such as https://"
    ):
        storage.read("a")
