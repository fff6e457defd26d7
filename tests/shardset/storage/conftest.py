"""A `gs://` folder behind a proxy that loses and damages what passes it."""

from dataclasses import replace

import pytest

from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from tests.faulty_proxy import FaultyProxy
from tests.makers.objects import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def proxy(gcs_emulator):
    with FaultyProxy(gcs_emulator) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(gcs_root, proxy, clock, monkeypatch):
    """A `gs://` folder behind the faulty proxy, with retries that cost no time."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
    policy = RetryPolicy(stall_timeout_s=60.0, clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)
    return replace(open_storage(gcs_root), retry=policy)
