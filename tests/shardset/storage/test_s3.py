"""What is special about S3: its checksums are ours, its client must not be forked, nothing is
deleted conditionally.
"""

import urllib.request

import obstore
import pytest

from shardset.errors import (
    ConfigError,
    PreconditionFailed,
    StorageError,
)
from shardset.storage import s3
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, in_turn, is_upload
from tests.makers.objects import BIG, HELLO, in_child, names, put


@pytest.fixture
def scheme():
    return "s3"


@pytest.fixture
def storage(s3_root):
    return open_storage(s3_root)


def test_a_conflict_with_a_write_under_way_is_tried_again(behind_proxy, proxy):
    conflict = Fault(
        "status", status=409, put=b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    )
    proxy.script = in_turn(conflict, conflict, when=is_upload)
    put(behind_proxy, "a", if_generation=ABSENT)
    assert behind_proxy.read("a") == HELLO


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

    def put_and_be_replaced(store, name, data, **options):
        put_one(store, name, data, **options)
        put_one(store, name, b"damaged", attributes={"crc32c": "AAAAAA=="})
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
