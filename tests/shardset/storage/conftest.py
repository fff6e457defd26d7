"""A folder of each remote scheme behind a proxy that loses and damages what passes it."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shardset.storage.base import Storage
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import FaultyProxy, is_read
from tests.makers.azure import ACCOUNT, CONTAINER, azure_environment, azurite
from tests.makers.objects import Clock, put
from tests.makers.web import WebServer

ENDPOINTS = {
    "gs": "STORAGE_EMULATOR_HOST",
    "s3": "AWS_ENDPOINT_URL",
    "az": "AZURE_STORAGE_ENDPOINT",
}
MARKS = {"https": [], "gs": [pytest.mark.gcs], "s3": [], "az": [pytest.mark.nightly]}


def schemes(*names):
    """Has a test run for these schemes."""
    return pytest.mark.parametrize(
        "scheme", [pytest.param(name, marks=MARKS[name]) for name in names], indirect=True
    )


@dataclass
class Far:
    """A folder behind the proxy, with retries that cost no time, and an unbroken way to it."""

    storage: Any
    origin: Storage
    proxy: FaultyProxy

    def with_retry(self, **changes):
        """The same folder with another policy."""
        return replace(self.storage, retry=replace(self.storage.retry, **changes))

    def store(self, data):
        """Stores an object `a`, and forgets the requests of that: Azure's is read back."""
        put(self.origin, "a", data)
        self.proxy.seen.clear()

    def num_reads(self):
        return sum(map(is_read, self.proxy.seen))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def scheme(request):
    """Each remote scheme in turn."""
    return request.param


@pytest.fixture
def far(scheme, request, tmp_path, clock, monkeypatch):
    """A folder of the scheme."""
    policy = RetryPolicy(stall_timeout_s=60.0, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)
    with ExitStack() as exits:
        if scheme == "https":
            proxy = exits.enter_context(FaultyProxy(exits.enter_context(WebServer(tmp_path)).url))
            storage = replace(open_storage(f"{proxy.url}/in/side"), retry=policy)
            yield Far(storage, open_storage(str(tmp_path / "in/side")), proxy)
            return
        if scheme == "az":
            server = exits.enter_context(azurite(tmp_path / "log"))
            root = f"az://{CONTAINER}/folder"
            for name, value in azure_environment(server).items():
                monkeypatch.setenv(name, value)
        else:
            server = request.getfixturevalue("gcs_emulator" if scheme == "gs" else "s3_server")
            root = request.getfixturevalue("gcs_root" if scheme == "gs" else "s3_root")
        proxy = exits.enter_context(FaultyProxy(server.removesuffix(f"/{ACCOUNT}")))
        storage = replace(open_storage(root), retry=policy)
        monkeypatch.setenv(ENDPOINTS[scheme], proxy.url + (f"/{ACCOUNT}" if scheme == "az" else ""))
        yield Far(storage, storage, proxy)


@pytest.fixture
def proxy(far):
    return far.proxy


@pytest.fixture
def behind_proxy(far):
    return far.storage
