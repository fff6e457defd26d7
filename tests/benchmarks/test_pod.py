"""A pod reads every byte about once, whatever its size."""

import pytest

from benchmarks import pod


@pytest.mark.parametrize("world", [1, 8, 300, 512])
def test_each_byte_is_read_about_once_by_any_number_of_readers(world):
    point = pod.measure(1_000_000, world, 110_000, 4 * max(256, world))
    assert point.bytes_factor == pytest.approx(1, abs=0.05)
    assert point.window == (47 if world == 1 else 256)


def test_a_pod_that_lost_a_reader_reads_less_than_twice_what_it_wants():
    point = pod.measure(1_000_000, 512, 110_000, 2048, num_lost=1)
    assert (point.world_size, point.num_lost, point.num_lanes) == (512, 1, 512)
    assert 1.05 < point.bytes_factor < 2


@pytest.mark.nightly
def test_a_thousand_million_samples_and_a_thousand_hosts_are_planned_in_little_memory():
    point = pod.run_point(10**9, 8192, 100_000, 4 * 8192, 0)
    assert (point.num_lanes, point.window) == (8192, 256)
    assert point.bytes_factor == pytest.approx(1, abs=0.06)
    assert point.peak_bytes < 500 << 20
