"""Azure, as azurite speaks it: what every storage promises, a set that is written and read."""

from typing import ClassVar

import pytest

from shardset.errors import ConfigError
from shardset.storage.open import open_storage
from shardset.testing import StorageTests
from tests.makers.azure import CONTAINER, azure_environment, azurite
from tests.makers.objects import put

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


class TestAzureStorage(StorageTests):
    """With the fixture `storage`."""

    odd_names: ClassVar = [name for name in StorageTests.odd_names if "\\" not in name]


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
