"""Training, evaluation and `explain` on a view: its samples, labels and weights."""

import json

import numpy as np
import pytest

from shardset.errors import ConfigError
from shardset.format.manifest import load
from shardset.program import OK
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from tests.makers.training import read_records, shard_set, tiny_config
from tests.makers.views import put_view
from trainer import loop
from trainer.cli import main
from trainer.data.epochs import SampleDigest, steps_of
from trainer.data.splits import open_data
from trainer.runtime.launch import running
from trainer.telemetry.sample_losses import read_losses
from trainer.tools.explain import explain_sample, explain_step, opened, timetable_of

KEPT = [id_ for id_ in range(52) if id_ % 5]


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """A view of 41 of 52 training samples with one label and a weight of 2,
    beside the split `val`.
    """
    url = shard_set(tmp_path_factory.mktemp("views") / "set")
    return put_view(url, load(url), id=KEPT, label=[3] * len(KEPT), weight=[2.0] * len(KEPT))


def test_a_run_trains_on_a_view_and_is_explained(view, tmp_path):
    with running("single", "fp32") as here:
        # weights count in training only
        loop.train(here, tiny_config(view, tmp_path, epochs=1, eval_split="train"))
    [epoch], [evaluation] = read_records(tmp_path, "epoch"), read_records(tmp_path, "eval")
    assert (epoch["samples"], evaluation["samples"]) == (len(KEPT), len(KEPT))
    assert json.loads((tmp_path / "order.json").read_text())["view"] == load(view).digest
    config, stream = opened(str(tmp_path))
    assert isinstance(stream, Stream)
    timetable = timetable_of(config, stream)
    assert timetable.num_steps == 6
    rows = explain_step(timetable, 0).rows
    assert {row["label"] for row in rows} == {3}
    assert {row["id"] for row in rows} <= set(KEPT)
    assert len(explain_sample(timetable, KEPT[-1]).rows) == 1
    with pytest.raises(ConfigError, match="not in the view"):
        explain_sample(timetable, 5)


def test_an_epoch_has_the_samples_of_the_view_and_losses_are_divided_by_their_number(
    view,
):
    data = open_data(tiny_config(view, "run", eval_split="train"), 0, 1)
    batches = [batch for _, _, batch in steps_of(data.train, 0, 6)]
    assert [data.weight_of_step(step, 8) for step in (0, 4, 5)] == [8, 8, 1]
    assert sum(batch["weight"].sum() for batch in batches) == 2 * len(KEPT)
    assert data.num_eval_samples == len(KEPT)
    assert data.expected(0) == SampleDigest().add(np.array(KEPT))


def test_losses_of_a_view_have_the_ids_of_its_split_and_the_worst_are_its_samples(
    view, tmp_path, capsys
):
    sets = {"manifest": view, "mix": f"{view}=1"}
    config = tiny_config(view, tmp_path, epochs=1, eval_split="train", record_losses=True)
    with running("single", "fp32") as here:
        loop.train(here, config)
        loop.evaluate_checkpoint(here, config)
    [(ids, losses, _)] = read_losses(open_storage(str(tmp_path)))
    assert sorted(ids.tolist()) == KEPT
    worst = json.loads((tmp_path / "worst.json").read_text())
    assert sorted(key for _, key, _ in worst) == [f"train-{number:06d}" for number in KEPT]
    assert main(["explain", "--run-dir", str(tmp_path), "--worst", "1"]) == OK
    assert f"train-{ids[losses.argmax()]:06d}" in capsys.readouterr().out.replace("\n", "")
    mixed = open_data(tiny_config(run_dir="run", eval_split="train", **sets), 0, 1)
    found = [batch["id"] for _, _, batch in steps_of(mixed.train, 0, len(mixed.train))]
    assert {number for batch in found for number in batch.tolist()} <= set(KEPT)
