"""Readers are lost and come back; every sample is still in one global batch of each epoch."""

import pytest

from benchmarks import chaos

pytestmark = [pytest.mark.nightly, pytest.mark.gcs]


def test_a_pod_that_loses_and_gains_readers_reads_every_sample_once_an_epoch(
    gcs_emulator, monkeypatch
):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_emulator)
    outcome = chaos.run(
        gcs_emulator, max_readers=6, lives=3, samples=150, batch=16, epochs=2, seed=2
    )
    assert outcome.num_recorded == 20
    assert len(set(outcome.worlds)) > 1
