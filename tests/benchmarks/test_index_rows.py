"""Readers of tiny images read little of large indexes, whatever their number."""

from benchmarks import index_rows


def test_readers_of_tiny_images_read_few_rows_of_large_indexes():
    storage, split = index_rows.made(640_000, 20_000, 2265)
    order = index_rows.order_of(split, 512)
    whole, rows = (
        index_rows.measure(storage, split, order, 512, by_rows=each) for each in (False, True)
    )
    # the footer of its index, and the group of rows of its samples, or two
    assert rows.later_gets <= 3 * rows.num_blocks
    assert rows.later_indexes < 0.1 * rows.block_bytes < whole.later_indexes
