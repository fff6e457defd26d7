import pytest


@pytest.fixture(scope="module", params=["disk", "memory"])
def location(request, tmp_path_factory):
    """Where a shard set is written: one on a disk is read by sample, one in memory by block."""
    return tmp_path_factory.mktemp("set") if request.param == "disk" else None
