"""The guard that compares builds by two checkouts."""

import pytest

from benchmarks import build, environment


@pytest.mark.nightly
def test_a_checkout_is_compared_with_another(tmp_path, capsys):
    words = f"--against {environment.REPOSITORY} --scale 0.003 --repeats 1 --folder {tmp_path}"
    build.main(words.split())
    assert "| webdataset ShardWriter |" in capsys.readouterr().out
