"""The guard that compares two checkouts by an epoch of the stream."""

import sys

import pytest

from benchmarks import environment, stream


@pytest.mark.nightly
def test_an_epoch_of_a_checkout_is_compared_with_that_of_another(monkeypatch, capsys):
    words = f"stream --against {environment.REPOSITORY} --kind png --samples 64 --rounds 1"
    monkeypatch.setattr(sys, "argv", words.split())
    stream.main()
    assert "| 64 png images, medians of 1 | seconds | processor time |" in capsys.readouterr().out
