"""An input in another region is said before it is read, with its price."""

import pytest

from pipelines.estimate.egress import crossing
from shardset.errors import NotFound, StorageError

LOCATIONS = {"near": "US-CENTRAL1", "far": "EUROPE-WEST4", "wide": "US", "odd": "unknown"}


def said(source, output="gs://near/out", workers=None, num_reads=2):
    return crossing(source, output, workers, LOCATIONS.__getitem__, num_reads=num_reads)


def test_an_input_of_another_region_is_said_with_the_price_of_a_terabyte_and_of_a_petabyte():
    warning = said("gs://far/photos")
    assert warning.startswith(
        "warning: gs://far/photos is in EUROPE-WEST4, the build in US-CENTRAL1: every byte crosses"
    )
    assert "crosses twice, about $37 a TB" in warning
    assert "($37,253 a PB)" in warning
    assert "copy the input to US-CENTRAL1 first" in warning
    assert "crosses once, about $19 a TB" in said("gs://far/photos", num_reads=1)


def test_the_region_of_the_workers_decides_where_it_is_known():
    assert said("gs://far/photos", workers="europe-west4") is None
    assert "the build in EUROPE-WEST4" in said("gs://near/photos", workers="europe-west4")
    assert "the build in EUROPE-WEST4" in said("gs://near/photos", "gs://near/out", workers="europe-west4")


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("gs://near/photos", "gs://near/out"),
        ("gs://wide/photos", "gs://near/out"),
        ("gs://odd/photos", "gs://near/out"),
        ("/data/photos", "gs://near/out"),
        ("gs://far/photos", "/data/out"),
    ],
)
def test_nothing_is_said_of_an_input_that_is_near_or_of_which_nobody_knows(source, output):
    assert said(source, output) is None


@pytest.mark.parametrize("error", [NotFound("no such bucket"), StorageError("403: you may not look")])
def test_a_location_that_is_hidden_stops_no_build(error):
    def locate(bucket):
        raise error

    assert crossing("gs://far/photos", "gs://near/out", None, locate, num_reads=2) is None
