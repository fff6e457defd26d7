from pathlib import Path

import pytest

from tests.makers.paused import Arrival, Moment, Way, attempt
from tests.makers.training import shard_set


@pytest.mark.slow
@pytest.mark.gcs
@pytest.mark.parametrize(
    ("way", "moment", "arrival"),
    [
        pytest.param("stopped", "mark", "late", marks=pytest.mark.nightly),
        ("cut off", "verify", "at once"),
    ],
)
def test_a_run_that_resumes_after_another_one_took_its_folder_stops_and_changes_nothing(
    gcs_emulator: str, gcs_root: str, tmp_path: Path, way: Way, moment: Moment, arrival: Arrival
) -> None:
    attempt(gcs_emulator, shard_set(tmp_path), gcs_root, way, moment, arrival)
