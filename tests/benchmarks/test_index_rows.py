"""Readers of tiny images read little of large indexes, whatever their number."""

from benchmarks import index_rows


def test_readers_of_tiny_images_read_few_rows_of_large_indexes():
    storage, split = index_rows.made(640_000, 20_000, 2265)
    for world in (8, 512):
        order = index_rows.order_of(split, world)
        whole, rows = (
            index_rows.measure(storage, split, order, world, by_rows=each) for each in (False, True)
        )
        assert rows.later_gets <= rows.num_blocks
        if world == 8:
            assert rows.first_samples == whole.first_samples
            assert rows.first_indexes < 2 * rows.first_samples
            assert whole.first_indexes > 10 * whole.first_samples
            assert rows.num_blocks == whole.num_blocks
        else:
            assert rows.later_indexes < 0.1 * rows.block_bytes < whole.later_indexes
