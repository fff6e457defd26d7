import pytest
import torch

from tests.makers.training import shard_set


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny layers on several threads mostly wait for each other, and sums depend on the number of
    threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def manifest(tmp_path_factory):
    """The URL of a set that no test changes."""
    return shard_set(tmp_path_factory.mktemp("set"))
