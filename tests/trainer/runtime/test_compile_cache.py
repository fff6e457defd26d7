import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from shardset.errors import ConfigError
from shardset.storage.base import Writer
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from tests.faulty_proxy import Fault, FaultyProxy, Seen, is_media, is_upload
from trainer.runtime import compile_cache
from trainer.runtime.compile_cache import VARIABLE, CacheCopy, local_folder, opened, settled


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder of the user, and an environment that the test may change."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(VARIABLE, "unset")
    return tmp_path / "home"


@pytest.fixture(params=["memory", pytest.param("gs", marks=pytest.mark.gcs)])
def bucket(request: pytest.FixtureRequest) -> str:
    """The address of an empty remote folder."""
    if request.param == "gs":
        return str(request.getfixturevalue("gcs_root"))
    return f"memory://{uuid.uuid4().hex}/cache"


def compile_graph(name: str, data: bytes = b"a graph") -> None:
    """Writes what torch_xla writes when it compiles."""
    (Path(os.environ[VARIABLE]) / name).write_bytes(data)


def graphs_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_process_has_a_folder_of_its_own(home: Path, tmp_path: Path) -> None:
    assert local_folder(None, 3) == home / "shardset/xla/process-003"
    assert local_folder(str(tmp_path / "here"), 0) == tmp_path / "here/process-000"
    folders = {local_folder(address, 0) for address in (None, "gs://a/b", "gs://a-b", "gs://a/b/c")}
    assert len(folders) == 4


def test_without_a_home_for_caches_it_is_below_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert local_folder(None, 0) == Path.home() / ".cache/shardset/xla/process-000"


def test_graphs_stay_in_a_local_folder(tmp_path: Path) -> None:
    with opened(str(tmp_path / "cache"), 0):
        compile_graph("17")
    assert graphs_of(tmp_path / "cache/process-000") == {"17": b"a graph"}


def test_graphs_come_back_from_the_bucket_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(bucket + "/", 1):
        compile_graph("17")
        compile_graph(".17.tmp", b"half")
    assert [stat.name for stat in open_storage(bucket).list()] == ["process-001/17"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with opened(bucket, 1):
        assert graphs_of(Path(os.environ[VARIABLE])) == {"17": b"a graph"}
        compile_graph("18", b"another graph")
    assert open_storage(bucket).read("process-001/18") == b"another graph"


def test_a_graph_that_was_cut_is_fetched_again_and_one_compiled_anew_is_stored(bucket: str) -> None:
    with opened(bucket, 0):
        compile_graph("17")
    (Path(os.environ[VARIABLE]) / "17").write_bytes(b"a gr")
    with opened(bucket, 0):
        assert graphs_of(Path(os.environ[VARIABLE])) == {"17": b"a graph"}
        compile_graph("17", b"another")
    assert open_storage(bucket).read("process-000/17") == b"another"


def test_two_replicas_of_one_process_fetch_the_same_graphs(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {f"{number}": b"a graph" for number in range(100)}
    storage = open_storage(f"{bucket}/process-000")
    for name, data in stored.items():
        with storage.writer(name) as writer:
            writer.write(data)
    both = threading.Barrier(2, timeout=60)

    def fetch(_: int) -> None:
        both.wait()
        with opened(bucket, 0):
            both.wait()

    with ThreadPoolExecutor(2) as replicas:
        list(replicas.map(fetch, range(2)))
    assert capsys.readouterr().err == ""
    assert graphs_of(Path(os.environ[VARIABLE])) == stored


class Meeting(MemoryStorage):
    """A bucket that serves two replicas of a process once both have looked at their folder; notes what it is sent."""

    both = threading.Barrier(2, timeout=60)
    sent: ClassVar[list[str]] = []

    def read(self, name: str, start: int = 0, stop: int | None = None, *, generation: str | None = None) -> bytes:
        self.both.wait()
        data = super().read(name, start, stop, generation=generation)
        self.both.wait()
        return data

    def writer(self, name: str, *, if_generation: str | None = None) -> Writer:
        self.sent.append(name)
        return super().writer(name, if_generation=if_generation)


def test_two_replicas_of_one_process_send_nothing_that_they_fetched(tmp_path: Path) -> None:
    bucket = Meeting(uuid.uuid4().hex)
    for number in range(8):
        with bucket.writer(str(number)) as writer:
            writer.write(b"a graph")
    bucket.sent.clear()
    fetched = threading.Barrier(2, timeout=60)

    def fetch(_: int) -> None:
        with CacheCopy(tmp_path, bucket):
            fetched.wait()

    with ThreadPoolExecutor(2) as replicas:
        list(replicas.map(fetch, range(2)))
    assert (len(graphs_of(tmp_path)), bucket.sent) == (8, [])


@pytest.mark.gcs
def test_what_the_bucket_has_is_neither_fetched_nor_sent_again(
    gcs_root: str, gcs_emulator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        for _ in range(2):
            with opened(gcs_root, 0):
                if not graphs_of(Path(os.environ[VARIABLE])):
                    compile_graph("17")
        assert [is_media(seen) or is_upload(seen) for seen in proxy.seen].count(True) == 1


def test_only_files_that_have_stopped_growing_are_copied_while_the_run_compiles() -> None:
    before = {"whole": (7, 1), "growing": (5, 1), "gone": (1, 1)}
    now = {"whole": (7, 1), "growing": (6, 2), "new": (1, 3)}
    assert settled(before, now) == {"whole": (7, 1)}


def test_a_graph_is_in_the_bucket_before_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "COPY_EVERY_S", 0.05)
    storage = open_storage(f"memory://{uuid.uuid4().hex}/cache")
    with opened(storage.url, 0):
        compile_graph("17")
        deadline = time.monotonic() + 60
        while not list(storage.list()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert storage.read("process-000/17") == b"a graph"


def test_a_folder_that_can_not_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with opened(str(tmp_path / "file"), 0):
        assert os.environ[VARIABLE] == "unset"
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: compile cache: {tmp_path}/file")
    assert "the run goes on without it" in warning


def test_a_user_without_a_home_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with opened(None, 0):
        assert os.environ[VARIABLE] == "unset"
    assert "relative: expected an absolute path; set HOME or XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.gcs
@pytest.mark.parametrize("is_refused", [lambda seen: True, is_media, is_upload])
def test_a_bucket_that_refuses_is_one_warning(
    gcs_root: str,
    gcs_emulator: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_refused: Callable[[Seen], bool],
) -> None:
    with open_storage(f"{gcs_root}/process-000").writer("17") as writer:
        writer.write(b"a graph")
    with FaultyProxy(gcs_emulator) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        proxy.script = lambda seen: Fault("status", status=403) if is_refused(seen) else None
        with opened(gcs_root, 0):
            compile_graph("18")
            compile_graph("19")
    assert graphs_of(Path(os.environ[VARIABLE])).keys() >= {"18", "19"}
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: compile cache: {gcs_root}/process-000")


@pytest.mark.gcs
def test_a_bucket_that_does_not_exist_is_an_error(gcs_root: str) -> None:
    with pytest.raises(ConfigError, match="compile_cache: gs://no-such-bucket"), opened("gs://no-such-bucket/c", 0):
        raise AssertionError("entered")


@pytest.mark.parametrize("address", ["s3://bucket/cache", "", "gs://", "gs:/bucket/cache"])
def test_an_address_that_names_no_storage_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError), opened(address, 0):
        raise AssertionError("entered")
