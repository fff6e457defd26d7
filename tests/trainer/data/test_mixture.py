"""A run on several sets: exact shares at every step, the same batches on any number of hosts, all
samples known.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.program import OK
from shardset.storage.open import open_storage
from tests.makers.shardset import new_set, png_samples
from tests.makers.training import losses, read_records, shard_set, tiny_config
from trainer import cli as command
from trainer import loop
from trainer.config import ImageConfig, TrainConfig, from_anywhere, mixed_sets
from trainer.data.epochs import SampleDigest, check_epoch, steps_of
from trainer.data.mixture import ID_OF_SET, MAX_SETS, Mixture
from trainer.data.splits import open_data
from trainer.errors import CheckpointError
from trainer.runtime.launch import launch
from trainer.telemetry.sample_losses import read_losses

NUM_OTHERS = 90
STEPS = 17
"""Steps of an epoch: 142 samples in batches of 8."""


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Two sets, of which the second has one, then two, then all of four shares."""
    folder = tmp_path_factory.mktemp("sets")
    new_set(png_samples("other", NUM_OTHERS, size=8), folder / "b", num_shards=3)
    return f"{shard_set(folder / 'a')}=3,2@5,0@24;{folder / 'b'}=1,2@5"


def config_of(mix, run_dir="run", **changes: Any):
    return tiny_config(mixed_sets(mix)[0][0], run_dir, mix=mix, **changes)


def opened(mix, num_hosts=1, **changes: Any):
    return [open_data(config_of(mix, **changes), host, num_hosts) for host in range(num_hosts)]


def ids(data, start=0, stop=2 * STEPS):
    """The ids of each global batch."""
    parts = [[batch["id"] for _, _, batch in steps_of(one.train, start, stop)] for one in data]
    return [np.concatenate(step).tolist() for step in zip(*parts, strict=True)]


def test_every_batch_has_the_share_of_each_set_that_its_step_says(mix):
    [data] = opened(mix)
    assert len(data.train) == STEPS
    numbers = [sum(one < ID_OF_SET for one in batch) for batch in ids([data])]
    assert numbers == [6] * 5 + [4] * 19 + [0] * 10
    assert data.weight_of_step(STEPS - 1, 8) == 8


def test_a_set_repeats_no_sample_before_its_epoch_ends(mix):
    later = [one for batch in ids(opened(mix), 5, 24) for one in batch if one >= ID_OF_SET]
    assert len(set(later)) == len(later) == 4 * 19
    assert max(later) < ID_OF_SET + NUM_OTHERS


@pytest.mark.parametrize("cut", [3, 5, STEPS, 26])
def test_any_number_of_hosts_goes_on_with_the_same_batches_from_the_states_of_all_streams(mix, cut):
    [data] = opened(mix)
    state = data.train.state(*divmod(cut, STEPS))
    assert isinstance(state, list)
    there = opened(mix, 3)
    for one in there:
        one.train.load_state_dict(state)
    assert ids(there, cut) == ids([data])[cut:]


@pytest.mark.parametrize("repeats", [1, 2])
def test_what_an_epoch_must_train_on_is_known_from_the_orders(mix, repeats):
    image = ImageConfig(size=8, train_crop="pad", eval_resize=8, augment_repeats=repeats)
    data = opened(mix, 2, image=image)
    length = len(data[0].train)
    assert length == STEPS if repeats == 1 else 35
    for epoch in range(2):
        batches = ids(opened(mix, image=image), epoch * length, (epoch + 1) * length)
        seen = SampleDigest().add(np.concatenate(batches))
        check_epoch(epoch, data[1].expected(epoch), seen)
        assert seen.samples == 8 * length


def train(config):
    launch(config, loop.train)


def test_a_run_on_a_mixture_goes_on_where_it_stopped_records_by_set_and_is_explained(
    mix, tmp_path, capsys
):
    whole, pieces = (
        config_of(mix, tmp_path / name, record_losses=True) for name in ("whole", "pieces")
    )
    train(whole)
    for stop in (4, 20, None):
        train(replace(pieces, max_steps=stop))
    assert losses(pieces.run_dir) == losses(whole.run_dir)
    assert [record["samples"] for record in read_records(pieces.run_dir, "epoch")] == [
        8 * STEPS
    ] * 2
    by_set = [
        [epoch[0].tolist() for epoch in read_losses(open_storage(whole.run_dir), number)]
        for number in (0, 1)
    ]
    expected = ids(opened(mix))
    assert sum(map(len, by_set[0])) == sum(one < ID_OF_SET for batch in expected for one in batch)
    assert sorted(by_set[1][1]) == sorted(
        one - ID_OF_SET for batch in expected[STEPS:] for one in batch if one >= ID_OF_SET
    )
    capsys.readouterr()
    for step, text in ((3, "3"), (STEPS + 2, "2:2"), (30, "30")):
        assert command.main(["explain", "--run-dir", whole.run_dir, "--step", text, "--json"]) == OK
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        firsts = {
            url: first for (url, _), first in zip(mixed_sets(mix), (0, ID_OF_SET), strict=True)
        }
        found = [firsts[one["manifest"]] + row["id"] for one in answers for row in one["rows"]]
        assert found == expected[step]
        assert {one["global_step"] for one in answers} == {step}
    assert command.main(["explain", "--run-dir", whole.run_dir, "--worst", "2"]) == OK
    printed = capsys.readouterr().out
    assert "set 0, " in printed
    assert "other-0000" in printed.replace("\n", "").partition("set 1, ")[2]
    assert command.main(["explain", "--run-dir", whole.run_dir, "--id", "2"]) != OK
    assert "ask for --step or --worst" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"mix is \[.*there and \[.*here"):
        train(replace(pieces, mix=mix.replace("0@24", "1@24"), epochs=3))
    with pytest.raises(CheckpointError, match=r"mix is \[.*there and \[\] here"):
        train(replace(pieces, mix=None, epochs=3))


def test_the_flags_of_a_mixture_mean_its_first_set_where_nothing_else_is_evaluated_on(
    mix, tmp_path, capsys
):
    sets = [word for one in mix.split(";") for word in ("--mix", one)]
    words = f"train --run-dir {tmp_path} --max-steps 2 --global-batch-size 8".split()
    assert command.main([*words, *sets]) == OK
    assert "chosen for 142 " in capsys.readouterr().out
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["mix"], written["manifest"]) == (mix, mix.partition("=")[0])
    assert command.main(["evaluate", "--run-dir", str(tmp_path)]) == OK
    assert "val accuracy" in capsys.readouterr().out
    assert (
        from_anywhere(TrainConfig(manifest="a", mix="a=1;gs://b/c=2")).mix
        == f"{Path('a').absolute()}=1;gs://b/c=2"
    )


def test_sets_whose_classes_differ_are_refused_with_the_difference(mix, tmp_path):
    samples = png_samples("train", 9, size=8, num_classes=3)
    new_set(samples, tmp_path, num_shards=1, num_classes=3)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} has other classes than .*/a \(\['class 3', "
    ):
        opened(f"{mix.partition(';')[0]};{tmp_path}=1")


@pytest.mark.parametrize("mix", ["a", "a=", "a=x", "a=1;", "=1", "a=-1", "a=1@5", "a=1,2", ""])
def test_what_is_no_mixture_is_refused_with_what_is_expected(mix):
    with pytest.raises(ConfigError, match="expected SET=WEIGHT or SET=WEIGHT,WEIGHT@STEP"):
        TrainConfig(manifest="a", mix=mix)


def test_weights_that_do_not_fit_the_batch_are_refused_before_the_first_step(mix):
    first, second = (url for url, _ in mixed_sets(mix))
    with pytest.raises(ConfigError, match="without one; raise its weight"):
        opened(f"{first}=1;{second}=1,0.001@1000")
    with pytest.raises(ConfigError, match="mix goes with manifest"):
        TrainConfig(mix="a=1")


def test_more_sets_than_ids_can_name_are_refused(tmp_path):
    sets = [manifests.load(shard_set(tmp_path))] * (MAX_SETS + 1)
    with pytest.raises(ConfigError, match="a mixture of 256 sets, expected at most 255"):
        Mixture(sets, [{0: 1}] * len(sets), "train", seed=0, global_batch_size=512)
