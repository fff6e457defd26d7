"""Where a bucket has its bytes."""

import pytest

from shardset.storage.regions import holds, is_known


@pytest.mark.parametrize(
    ("location", "region", "expected"),
    [
        ("EUROPE-WEST4", "europe-west4", True),
        ("EUROPE-WEST4", "europe-west1", False),
        ("EU", "europe-west4", True),
        ("EU", "europe-west2", False),
        ("US", "us-east1", True),
        ("US", "europe-west4", False),
        ("ASIA", "asia-east1", True),
        ("EUR4", "europe-north1", True),
        ("NAM4", "us-west1", False),
        ("US-EAST1+US-WEST1", "us-west1", True),
        ("US-EAST1+US-WEST1", "us-central1", False),
        ("unknown", "us-central1", False),
    ],
)
def test_a_location_holds_its_regions(location, region, expected):
    assert holds(location, region) is expected


@pytest.mark.parametrize(
    ("location", "known"),
    [("EUROPE-WEST4", True), ("EU", True), ("US-EAST1+US-WEST1", True), ("NAM9", False), ("unknown", False)],
)
def test_what_can_not_be_judged_is_said(location, known):
    assert is_known(location) is known
