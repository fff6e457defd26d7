import subprocess
import sys
import uuid

import msgspec
import pytest

from shardset.errors import ConfigError
from shardset.storage.open import open_storage
from tests.makers.doors import told
from trainer.errors import RunTaken
from trainer.run_folder.lock import (
    HOLDER,
    Holder,
    Lease,
    acquire_run_lock,
    this_process,
)

BEAT_S = 0.02
LONG_S = 600.0
"""Longer than any test: who waits so long has not seen what was there to see."""


def unexpected(text):
    raise AssertionError(text)


def take(storage):
    return acquire_run_lock(storage, lambda _: None, beat_s=BEAT_S, patience_s=LONG_S)


def stands(storage):
    return msgspec.json.decode(storage.read(HOLDER), type=Holder)


def leave_behind(storage, holder):
    """The lease of a run that was killed."""
    with storage.writer(HOLDER) as writer:
        writer.write(msgspec.json.encode(holder))


@pytest.mark.parametrize("url", ["~/run", "gs:/bucket/run"])
def test_a_mistyped_address_creates_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{url}: "):
        acquire_run_lock(open_storage(url), unexpected)
    assert not list(tmp_path.iterdir())


def of_another_machine():
    return msgspec.structs.replace(this_process(), host="elsewhere", machine="", pid=7)


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(params=["memory", pytest.param("gcs_root", marks=pytest.mark.gcs), "s3_root"])
def bucket(request):
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}/run")
    return open_storage(request.getfixturevalue(request.param))


def test_a_second_living_run_is_refused_and_the_first_one_named(storage):
    first = take(storage)
    with pytest.raises(
        ConfigError, match=f"process {this_process().pid} on .* writes to this run folder"
    ):
        take(storage)
    first.check()
    first.close()
    take(storage).close()


@pytest.mark.parametrize("content", [None, b"", b"\xff not json"])
def test_a_lease_that_nobody_renews_is_taken_after_a_while(bucket, content):
    with bucket.writer(HOLDER) as writer:
        writer.write(msgspec.json.encode(of_another_machine()) if content is None else content)
    heard: list[str] = []
    acquire_run_lock(bucket, heard.append, beat_s=BEAT_S, patience_s=0.05).close()
    assert len(heard) == 1
    assert (
        f"is held by {'process 7 on elsewhere' if content is None else 'another process'}"
        in heard[0]
    )


def test_a_hold_of_a_young_lease_is_kept_without_a_request_and_an_old_one_is_renewed(
    bucket,
):
    now, asked = [0.0], []
    door = told(bucket, uuid.uuid4().hex, lambda verb, name: asked.append(verb))
    held = Lease(
        door, this_process(), unexpected, beat_s=LONG_S, patience_s=35.0, clock=lambda: now[0]
    )
    asked.clear()
    for moment in (1.0, 17.0, 18.0, 35.0):
        now[0] = moment
        held.keep()
    assert asked == ["read", "write", "close", "closed"]
    leave_behind(bucket, of_another_machine())
    now[0] = 60.0
    with pytest.raises(RunTaken, match="process 7 on elsewhere"):
        held.keep()
    held.close()


def test_a_lease_of_a_killed_process_of_this_machine_is_taken_at_once(bucket):
    leave_behind(bucket, msgspec.structs.replace(this_process(), pid=dead_pid()))
    taken = take(bucket)
    assert stands(bucket).pid == this_process().pid
    taken.close()


def test_a_lock_ends_with_its_process(tmp_path):
    code = (
        "from shardset.storage.open import open_storage; from trainer.run_folder.lock import *;"
        f" held = acquire_run_lock(open_storage({str(tmp_path)!r}), print); print(1)"
    )
    words = [sys.executable, "-uc", f"{code}; time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {process.pid} on"):
            acquire_run_lock(open_storage(str(tmp_path)), unexpected)
        process.kill()
    acquire_run_lock(open_storage(str(tmp_path)), unexpected).close()


@pytest.mark.parametrize("name", ["file", "file/run", "folder"])
def test_a_folder_that_can_not_be_one_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "folder" / HOLDER).mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=rf"{name}: can't be a run folder \(.*\); take another --run-dir"
    ):
        acquire_run_lock(open_storage(str(tmp_path / name)), unexpected)
