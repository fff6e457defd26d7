import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import IterableDataset
from torch.utils.data import DataLoader

from shardset.adapters.huggingface import iterable_dataset
from shardset.stream.decode_batch.finish import row_of
from tests.makers.reading import same
from tests.shardset.adapters.conftest import RAW


def rows_of(stream, epoch):
    return [
        row_of(batch, slot)
        for batch in stream.epoch(epoch)
        for slot in np.flatnonzero(batch["weight"])
    ]


def test_the_rows_are_those_of_the_stream(make):
    dataset = iterable_dataset(make(), 2)
    assert isinstance(dataset, IterableDataset)
    for _ in range(2):
        rows = list(dataset)
        assert len(rows) == 50
        assert all(
            same(row, expected) for row, expected in zip(rows, rows_of(make(), 2), strict=True)
        )


@pytest.mark.parametrize("num_taken", [0, 8, 21])
def test_it_goes_on_where_it_was_saved(make, num_taken):
    dataset = iterable_dataset(make(), 1)
    rows = iter(dataset)
    for _ in range(num_taken):
        next(rows)
    saved = dataset.state_dict()
    again = iterable_dataset(make(), 1)
    again.load_state_dict(saved)
    assert [row["id"] for row in again] == [row["id"] for row in rows_of(make(), 1)][num_taken:]


def test_workers_of_a_loader_share_the_steps(make):
    loader = DataLoader(iterable_dataset(make()).with_format("torch"), batch_size=5, num_workers=3)
    ids = [id_ for batch in loader for id_ in batch["id"].tolist()]
    assert sorted(ids) == list(range(50))


def test_existing_stages_keep_working(make):
    dataset = (
        iterable_dataset(make(**RAW))
        .map(lambda row: {"number": int(row["cls"])})
        .filter(lambda row: row["number"] < 5)
    )
    rows = list(dataset)
    assert len(rows) == 25
    assert all(row["number"] == row["label"] for row in rows)


def test_steps_are_read_once_whatever_the_worker_skips(make):
    stream = make()
    runs = []
    run = stream.run
    stream.run = lambda spans: runs.append(1) or run(spans)
    assert len(list(iterable_dataset(stream))) == 50
    assert len(runs) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffled_rows_come_once_although_threads_ask_for_several_steps_at_once(make, workers):
    # 25 steps, of which `datasets` reads ten at once
    dataset = iterable_dataset(make(batch_size=2))
    for seed in range(2):
        rows = dataset.shuffle(seed=seed, buffer_size=10)
        ids = [
            row["id"]
            for row in (DataLoader(rows, batch_size=None, num_workers=workers) if workers else rows)
        ]
        assert sorted(ids) == list(range(50))


FORKED = """
import os, sys, threading
from torch.utils.data import DataLoader
from shardset import Stream
from shardset.adapters.huggingface import iterable_dataset

parent, may_go_on, first_ids = os.getpid(), threading.Event(), set()

def hold_after_first_step(row, rng):
    if os.getpid() == parent and row["id"] not in first_ids:
        may_go_on.wait()
    return row

stream = Stream(
    sys.argv[1], "train", batch_size=8, image_size=8, num_threads=1, transform=hold_after_first_step
)
first_ids.update(stream.order.batch(0, 0).ids.tolist())
dataset = iterable_dataset(stream).with_format("torch")
next(iter(dataset))
how = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
loader = DataLoader(dataset, batch_size=5, **how)
try:
    print(sorted(id_ for batch in loader for id_ in batch["id"].tolist()) == list(range(50)))
finally:
    may_go_on.set()
"""


@pytest.mark.slow
def test_forked_workers_start_anew_where_the_parent_has_begun(shards):
    # The loader's timeout ends workers that wait for a thread of their parent.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, shards], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr
