import shutil
import uuid

import pytest

from shardset.errors import StorageError, TransientError
from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, FaultyProxy
from tests.makers.doors import told
from trainer.run_folder import upload
from trainer.run_folder.upload import RunFolder


def test_files_of_a_run_are_in_its_storage_when_it_closes(storage: Storage) -> None:
    folder = RunFolder(storage.url)
    (folder.local / "logs/host-000.log").write_text("a line\n")
    folder.close()
    assert storage.read("logs/host-000.log") == b"a line\n"


def test_a_resumed_remote_run_appends() -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    for number in range(2):
        folder = RunFolder(url)
        with (folder.local / "metrics.jsonl").open("a") as file:
            file.write(f"{number}\n")
        folder.close()
    assert open_storage(url).read("metrics.jsonl") == b"0\n1\n"


def test_growing_files_take_no_more_of_the_network_the_longer_a_run_is() -> None:
    folder = RunFolder(f"memory://{uuid.uuid4().hex}/run")
    (folder.local / "metrics.jsonl").write_bytes(bytes(8 << 20))
    (folder.local / "once").write_bytes(bytes(8 << 20))
    for sent in (16 << 20, (8 << 20) + 1):
        folder.flush()
        assert folder.pause_s == sent / upload.UPLOAD_BYTES_PER_S
        with (folder.local / "metrics.jsonl").open("ab") as file:
            file.write(b"1")
    (folder.local / "metrics.jsonl").write_bytes(b"")
    folder.flush()
    assert folder.pause_s == upload.UPLOAD_EVERY_S
    folder.close()


@pytest.mark.gcs
def test_what_could_not_be_copied_stays_on_the_disk_and_is_named(
    gcs_root: str, gcs_emulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        folder = RunFolder(gcs_root)
        for name in ("a.txt", "metrics.jsonl"):
            (folder.local / name).write_text(name)
        proxy.script = lambda seen: (
            Fault("status", status=403) if b"metrics.jsonl" in seen.start else None
        )
        with pytest.raises(StorageError, match="403") as caught:
            folder.close()
        assert f"copy what is missing from {folder.local}" in str(caught.value)
    assert (folder.local / "metrics.jsonl").read_text() == "metrics.jsonl"
    shutil.rmtree(folder.local)


def test_closing_waits_for_one_file_where_the_storage_is_out_of_reach() -> None:
    tried: list[str] = []

    def refuse(verb: str, name: str) -> None:
        if verb == "write":
            tried.append(name)
            raise TransientError(f"{name}: no answer; gave up")

    folder = RunFolder(f"memory://{uuid.uuid4().hex}/run")
    folder.storage = told(folder.storage, uuid.uuid4().hex, refuse)
    for name in ("a.txt", "b.txt"):
        (folder.local / name).write_text(name)
    with pytest.raises(
        TransientError, match=f"a.txt: no answer.*copy what is missing from {folder.local}"
    ):
        folder.close()
    assert tried == ["a.txt"]
    shutil.rmtree(folder.local)
