"""Azure, as azurite speaks it: what every storage promises, faults of the network, a set that is
written and read.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

import shardset
from pipelines.check.verify import verify
from shardset.errors import ConfigError, DamagedShard, NotFound, PreconditionFailed
from shardset.storage import s3
from shardset.storage.base import ABSENT
from shardset.storage.open import open_storage
from shardset.storage.retry import RetryPolicy
from shardset.testing import StorageTests
from tests.faulty_proxy import FAULTS, Fault, FaultyProxy, in_turn
from tests.makers.azure import ACCOUNT, CONTAINER, azure_environment, azurite
from tests.makers.objects import BIG, Clock, names, put

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with azurite(tmp_path_factory.mktemp("azurite") / "log") as url:
        yield url


@pytest.fixture
def root(server, request, monkeypatch):
    for name, value in azure_environment(server).items():
        monkeypatch.setenv(name, value)
    return f"az://{CONTAINER}/{abs(hash(request.node.nodeid))}"


@pytest.fixture
def storage(root):
    return open_storage(root)


@pytest.fixture
def behind_proxy(storage, server, monkeypatch):
    """The folder behind a proxy, with retries that cost no time; and the proxy."""
    clock = Clock()
    with FaultyProxy(server.removesuffix(f"/{ACCOUNT}")) as proxy:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/{ACCOUNT}")
        yield (
            replace(
                storage, retry=RetryPolicy(clock=clock, sleep=clock.sleep, stall_timeout_s=0.5)
            ),
            proxy,
        )


class TestAzureStorage(StorageTests):
    """With the fixture `storage`."""

    odd_names = tuple(name for name in StorageTests.odd_names if "\\" not in name)


def test_a_backslash_is_refused_since_azure_takes_it_for_a_slash(storage):
    with pytest.raises(ConfigError, match="takes a backslash for a slash"):
        put(storage, "a\\b")


def test_without_an_account_the_error_says_which_variable_names_it(storage, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(
        ConfigError,
        match=r"^az://container: .*Account must be specified; check AZURE_STORAGE_ACCOUNT",
    ):
        storage.stat("a")


def test_a_set_is_written_read_and_verified(root):
    with shardset.Writer(root, samples_per_shard=10) as writer:
        for number in range(40):
            writer.write(image=np.full((8, 8, 3), number, np.uint8), label=number % 3)
    batches = shardset.Stream(root, "train", batch_size=8, image_size=8)
    assert sorted(int(image.max()) for batch in batches for image in batch["image"]) == list(
        range(40)
    )
    assert verify(root, deep=True).ok


def test_long_listings_come_in_pages_in_order(storage, monkeypatch):
    monkeypatch.setattr(s3, "_PAGE_SIZE", 3)
    wanted = [f"a/{number:02d}" for number in range(10)]
    for name in (*wanted, "a-", "b"):
        put(storage, name)
    assert names(storage, "a/") == wanted


def test_a_lost_answer_hides_neither_the_own_write_nor_that_of_another(behind_proxy):
    storage, proxy = behind_proxy
    proxy.script = in_turn(Fault("reset"), when=lambda seen: seen.method == "PUT")
    put(storage, "a", BIG, if_generation=ABSENT)
    proxy.script = lambda seen: None
    with pytest.raises(PreconditionFailed, match="a different object exists"):
        put(storage, "a", b"other", if_generation=ABSENT)
    assert storage.read("a") == BIG
    storage.delete("a")
    storage.delete("a")
    with pytest.raises(NotFound):
        storage.read("a")


@pytest.mark.parametrize("way", ["GET", "PUT"])
def test_a_flipped_bit_is_noticed_on_both_ways(behind_proxy, way):
    storage, proxy = behind_proxy
    put(storage, "a", BIG)
    if way == "GET":
        proxy.script = in_turn(Fault("flip", at=1234), when=lambda seen: seen.method == "GET")
        assert storage.read("a") == BIG
        return
    proxy.script = in_turn(Fault("flip_upload", at=1234), when=lambda seen: seen.method == "PUT")
    with pytest.raises(DamagedShard, match="/b: has not the CRC32C it was written with"):
        put(storage, "b", BIG)


def test_with_a_third_of_all_requests_failing_nothing_is_wrong(behind_proxy):
    storage, proxy = behind_proxy
    chance = random.Random(7)
    proxy.script = lambda seen: chance.choice(FAULTS[:6]) if chance.random() < 1 / 3 else None
    wanted = {
        f"a/{number:02d}": chance.randbytes(chance.randrange(1, 5000)) for number in range(20)
    }
    for name, data in wanted.items():
        put(storage, name, data, if_generation=ABSENT)
    assert names(storage) == list(wanted)
    for name, data in wanted.items():
        assert storage.read(name) == data
