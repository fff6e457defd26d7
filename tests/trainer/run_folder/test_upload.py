import shutil
import uuid

import pytest

from shardset.errors import StorageError, TransientError
from shardset.storage.open import open_storage
from tests.makers.doors import told
from trainer.run_folder import upload
from trainer.run_folder.upload import RunFolder


def test_files_of_a_run_are_in_its_storage_when_it_closes(storage):
    folder = RunFolder(storage)
    (folder.local / "logs/host-000.log").write_text("a line\n")
    folder.close()
    assert storage.read("logs/host-000.log") == b"a line\n"


def test_a_resumed_remote_run_appends():
    url = f"memory://{uuid.uuid4().hex}/run"
    for number in range(2):
        folder = RunFolder(open_storage(url))
        with (folder.local / "metrics.jsonl").open("a") as file:
            file.write(f"{number}\n")
        folder.close()
    assert open_storage(url).read("metrics.jsonl") == b"0\n1\n"


def test_growing_files_take_no_more_of_the_network_the_longer_a_run_is():
    folder = RunFolder(open_storage(f"memory://{uuid.uuid4().hex}/run"))
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [(TransientError, ["a.txt"]), (StorageError, ["a.txt", "b.txt"])],
    ids=["out of reach", "refused"],
)
def test_what_could_not_be_copied_stays_on_the_disk_and_one_file_is_enough_to_see_it(
    error, expected
):
    tried: list[str] = []

    def refuse(verb: str, name: str) -> None:
        if verb == "write":
            tried.append(name)
            raise error(f"{name}: no answer; gave up")

    folder = RunFolder(open_storage(f"memory://{uuid.uuid4().hex}/run"))
    folder.storage = told(folder.storage, uuid.uuid4().hex, refuse)
    for name in ("a.txt", "b.txt"):
        (folder.local / name).write_text(name)
    with pytest.raises(error, match=f"txt: no answer.*copy what is missing from {folder.local}"):
        folder.close()
    assert tried == expected
    assert (folder.local / "a.txt").read_text() == "a.txt"
    shutil.rmtree(folder.local)
