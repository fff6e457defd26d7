import itertools

import grain
import pytest
from absl import flags

from shardset.adapters.grain import StreamIterDataset
from shardset.errors import ConfigError
from tests.makers.reading import all_same


def test_the_batches_are_those_of_the_stream(make):
    dataset = StreamIterDataset(make(), num_epochs=2)
    assert isinstance(dataset, grain.IterDataset)
    expected = itertools.chain(make().epoch(0), make().epoch(1))
    assert all_same(dataset, expected)


@pytest.mark.parametrize("stage", ["map", "filter", "batch", "window_shuffle"])
def test_grains_own_checker_finds_every_state_restored(make, stage):
    ids = StreamIterDataset(make(image=None), num_epochs=2).map(lambda batch: batch["id"])
    datasets = {
        "map": lambda: ids.map(lambda each: each % 7),
        "filter": lambda: ids.filter(lambda each: each[0] % 3 > 0),
        "batch": lambda: ids.batch(2),
        "window_shuffle": lambda: grain.experimental.WindowShuffleIterDataset(
            ids, window_size=3, seed=1
        ),
    }
    grain.experimental.assert_equal_output_after_checkpoint(datasets[stage]())


def test_epochs_never_end_unless_they_are_counted(make):
    assert len(list(itertools.islice(StreamIterDataset(make()), 30))) == 30
    with pytest.raises(ConfigError, match="num_epochs is 0, expected at least 1"):
        StreamIterDataset(make(), num_epochs=0)


def test_a_closed_iterator_gives_nothing_more(make):
    iterator = iter(StreamIterDataset(make()))
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(iterator)


def test_a_stage_that_would_divide_the_stream_is_refused(make):
    flags.FLAGS.mark_as_parsed()  # otherwise Grain stops before it divides anything
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    with pytest.raises(ConfigError, match=r"mp_prefetch .* leave it out"):
        next(iter(StreamIterDataset(make()).mp_prefetch(options)))
