"""Storage to test with: the GCS emulator over HTTP, fresh `gs://` folders, and every implementation
in turn.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from tests.makers.ports import free_port, send_when_up

REPOSITORY = Path(__file__).parent.parent
BUCKET = "bucket"

_folders = itertools.count()

# A shell that starts the tests in the background has them ignore Ctrl-C, `nohup` a hang-up, and
# what they start inherits that; it does not inherit handlers.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# How long an example takes says more about the machine's other work than about the code. CI tests
# the change, so it takes the same examples each time; elsewhere each run looks for new ones.
hypothesis.settings.register_profile("no deadline", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def unthrottled() -> None:
    """No test waits because the server of another one refused."""
    if served := sys.modules.get("shardset.storage.served"):
        served._throttle.take()


@pytest.fixture(scope="session")
def gcs_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a fake-gcs-server with one empty bucket; it runs as long as the tests."""
    with emulator(tmp_path_factory.mktemp("emulator") / "log") as url:
        yield url


@contextmanager
def emulator(log: Path) -> Iterator[str]:
    """The URL of a fake-gcs-server with one empty bucket; it runs as long as the block and keeps
    all in memory.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    address = f"-host=127.0.0.1 -port={port} -public-host=127.0.0.1:{port} -external-url={url}"
    flags = f"-backend=memory -scheme=http -log-level=warn {address}"
    with serving([emulator_binary(), *flags.split()], log):
        create_bucket(url, BUCKET)
        yield url


@contextmanager
def serving(command: list[str], log: Path) -> Iterator[None]:
    """Runs a server as long as the block."""
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as server,
    ):
        try:
            yield
        finally:
            server.terminate()


@pytest.fixture
def gcs_root(gcs_emulator: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh `gs://` folder, and STORAGE_EMULATOR_HOST so that everything finds it."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_emulator)
    return f"gs://{BUCKET}/folder-{next(_folders)}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a moto server with one empty bucket; it runs as long as the tests.

    Or of the one that SHARDSET_S3 names, such as a MinIO with the keys of `s3_environment` and a
    bucket `bucket`.
    """
    if url := os.environ.get("SHARDSET_S3"):
        yield url
        return
    with moto(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@contextmanager
def moto(log: Path) -> Iterator[str]:
    """The URL of a moto server with one empty bucket; it runs as long as the block and keeps all in
    memory.
    """
    port = free_port()
    with serving([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", f"{port}"], log):
        send_when_up(urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT"))
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def s3_root(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh `s3://` folder, and the environment by which everything finds it."""
    for name, value in s3_environment(s3_server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/folder-{next(_folders)}-{uuid.uuid4().hex[:8]}"


def s3_environment(url: str) -> dict[str, str]:
    """What has a process use the S3 server at a URL."""
    credentials = {"AWS_ACCESS_KEY_ID": "shardset", "AWS_SECRET_ACCESS_KEY": "shardset-tests"}
    return {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", **credentials}


@pytest.fixture(params=["memory", "local", pytest.param("gs", marks=pytest.mark.gcs), "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind in turn."""
    if root := {"gs": "gcs_root", "s3": "s3_root"}.get(request.param):
        return open_storage(request.getfixturevalue(root))
    memory = f"memory://{uuid.uuid4().hex}/in/side"
    return open_storage(memory if request.param == "memory" else str(tmp_path / "root"))


def emulator_binary() -> str:
    """The emulator that the environment names, else the repository's, else the one on the PATH."""
    named = os.environ.get("SHARDSET_FAKE_GCS")
    candidates = (
        [named]
        if named
        else [str(REPOSITORY / ".tools/bin/fake-gcs-server"), shutil.which("fake-gcs-server")]
    )
    found = next((path for path in candidates if path and os.access(path, os.X_OK)), None)
    if found is None:
        pytest.fail(
            f"no GCS emulator at {candidates}; run `make emulator`, or set SHARDSET_FAKE_GCS",
            pytrace=False,
        )
    return found


def create_bucket(url: str, name: str) -> None:
    """Creates a bucket in a GCS emulator."""
    body = f'{{"name": "{name}"}}'.encode()
    send_when_up(
        urllib.request.Request(f"{url}/storage/v1/b", body, {"Content-Type": "application/json"})
    )
