"""Readers of tiny images read little of large indexes, whatever their number."""

import pytest

from benchmarks import index_pages


@pytest.mark.parametrize("world", [1, 8])
def test_a_first_batch_of_tiny_images_reads_less_than_three_times_its_bytes_of_large_shards(world):
    storage, split = index_pages.made(640_000, 20_000, 2265)
    order = index_pages.order_of(split, world)
    whole, pages = (index_pages.measure(storage, split, order, world, by_pages=each) for each in (False, True))
    assert pages.first_samples == whole.first_samples
    assert pages.first_indexes < 2 * pages.first_samples
    assert whole.first_indexes > 10 * whole.first_samples
    assert pages.num_blocks == whole.num_blocks
    assert pages.later_gets <= pages.num_blocks


def test_a_reader_of_a_large_pod_reads_a_few_pages_for_each_block():
    storage, split = index_pages.made(640_000, 20_000, 2265)
    order = index_pages.order_of(split, 512)
    whole, pages = (index_pages.measure(storage, split, order, 512, by_pages=each) for each in (False, True))
    assert pages.later_gets <= pages.num_blocks + 1  # the checksums of all shards
    assert pages.later_indexes < 0.1 * pages.block_bytes < whole.later_indexes
