"""Readers of tiny images read little of large indexes, whatever their number."""

import pytest

from benchmarks import index_rows


@pytest.mark.parametrize("world", [1, 8])
def test_a_first_batch_of_tiny_images_reads_less_than_three_times_its_bytes_of_large_shards(world):
    storage, split = index_rows.made(640_000, 20_000, 2265)
    order = index_rows.order_of(split, world)
    whole, rows = (index_rows.measure(storage, split, order, world, by_rows=each) for each in (False, True))
    assert rows.first_samples == whole.first_samples
    assert rows.first_indexes < 2 * rows.first_samples
    assert whole.first_indexes > 10 * whole.first_samples
    assert rows.num_blocks == whole.num_blocks
    assert rows.later_gets <= rows.num_blocks


def test_a_reader_of_a_large_pod_reads_few_rows_for_each_block():
    storage, split = index_rows.made(640_000, 20_000, 2265)
    order = index_rows.order_of(split, 512)
    whole, rows = (index_rows.measure(storage, split, order, 512, by_rows=each) for each in (False, True))
    assert rows.later_gets <= rows.num_blocks
    assert rows.later_indexes < 0.1 * rows.block_bytes < whole.later_indexes
