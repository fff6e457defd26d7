import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardset.errors import ConfigError, StorageError
from shardset.program import OK
from shardset.storage.memory import MemoryStorage
from shardset.storage.open import open_storage
from shardset.stream.stream import Stream
from shardset.writer import Writer
from tests.makers.shardset import encode, image_sample, new_set, pixels
from tests.makers.training import (
    BATCH,
    NUM_EVAL,
    NUM_TRAIN,
    STEPS,
    losses,
    read_records,
    shard_set,
    tiny_config,
)
from trainer import cli as command
from trainer import config as configs
from trainer import loop
from trainer.config import (
    ModelConfig,
    OptimizerConfig,
    RegularizeConfig,
    ScheduleConfig,
)
from trainer.data import splits
from trainer.data.splits import open_data
from trainer.errors import CheckpointError, EpochMismatch, NotFinite, Preempted
from trainer.model.learner import Learner
from trainer.model.networks import tiny_resnet
from trainer.run_folder import checkpoint
from trainer.run_folder.checkpoint import new_state_name
from trainer.run_folder.lock import HOLDER
from trainer.run_folder.names import folder_of, log_name
from trainer.runtime import preemption
from trainer.runtime.base import Single, Step
from trainer.runtime.launch import launch
from trainer.telemetry.sample_losses import losses_name


@pytest.fixture(scope="module")
def undisturbed(manifest, tmp_path_factory):
    """A run from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(tiny_config(manifest, folder, record_losses=True))
    return folder


def run(config):
    launch(config, loop.train)


def newest_state(folder):
    found = checkpoint.newest(open_storage(str(folder)), pytest.fail)
    assert found is not None
    return found[1]


def own(name):
    """A model of this module."""
    return ModelConfig(name=f"{__name__}:{name}")


class Failing(nn.Module):
    """A model whose output is not a number after four steps, or only in an evaluation."""

    in_training = True

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, num_classes)
        self.calls = 0

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        fails = self.calls > 4 if Failing.in_training else not self.training
        return self.head(images_NCHW.flatten(1)) * (float("nan") if fails else 1)


STEP_S = 0.05


class SlowlyTrained(nn.Sequential):
    """A model whose training steps take at least `STEP_S`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S * self.training)
        logits: torch.Tensor = super().forward(images_NCHW)
        return logits


class Asking(nn.Module):
    """The usual model.

    Sends SIGTERM in the call that uses up `calls_left` of those that train, or that evaluate.
    """

    training_asks = True
    calls_left = 0

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny_resnet(num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        if self.training == self.training_asks:
            Asking.calls_left -= 1
            if Asking.calls_left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return self.net(images_NCHW)


def dropout_model(num_classes):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 32), nn.Dropout(0.5), nn.Linear(32, num_classes)
    )


# --- a whole run ----------------------------------------------------------------------------------


def test_a_run_takes_every_sample_once_in_an_epoch_and_an_evaluation_and_leaves_all_in_its_folder(
    manifest, undisturbed
):
    epochs, evaluations = (read_records(undisturbed, kind) for kind in ("epoch", "eval"))
    assert [record["samples"] for record in epochs] == [NUM_TRAIN] * 2
    assert [record["samples"] for record in evaluations] == [NUM_EVAL] * 2
    assert all(one["rate_per_device"] == one["reduced_global_rate"] for one in epochs)
    assert [record["global_step"] for record in read_records(undisturbed, "step")] == list(
        range(2 * STEPS)
    )
    written = (undisturbed / "config.json").read_text()
    assert configs.from_dict(json.loads(written)) == tiny_config(
        manifest, undisturbed, record_losses=True
    )
    assert written in (undisturbed / "logs/host-000.log").read_text()
    assert list((undisturbed / "tensorboard").iterdir())
    assert newest_state(undisturbed)["step"] == 2 * STEPS


def test_a_run_that_waits_for_data_says_so_and_what_to_change(tmp_path):
    large = encode(pixels(0, 1200, 1200), "png")
    samples = {
        split: [image_sample(split, serial, large, "png", 10) for serial in range(16)]
        for split in ("train", "val")
    }
    run(tiny_config(new_set(samples, num_shards=2), tmp_path, epochs=1))
    assert read_records(tmp_path, "epoch")[0]["input_wait_percent"] > 10
    assert "input-bound: steps waited" in (tmp_path / "logs/host-000.log").read_text()


def test_the_live_line_has_a_rate_once_one_is_known(
    manifest,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(tiny_config(manifest, tmp_path, max_steps=3, log_every_steps=1))
    shown = [
        text
        for line in capsys.readouterr().err.split("\r")
        if (text := line.removesuffix("\x1b[K"))
    ]
    assert re.fullmatch(r"epoch 1/\d+ step 1/\d+ loss [0-9.]+", shown[0])
    assert all("samples/s, 0:0" in line and " 0 samples/s" not in line for line in shown[1:3])


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [3, STEPS, STEPS + 2])
def test_a_run_in_two_pieces_has_the_losses_of_a_run_in_one_bit_for_bit(
    manifest, undisturbed, tmp_path, cut
):
    config = tiny_config(manifest, tmp_path, record_losses=True)
    run(replace(config, max_steps=cut))
    assert len(losses(tmp_path)) == cut
    run(config)
    assert losses(tmp_path) == losses(undisturbed)
    one, whole = (
        [
            [record[name] for name in ("samples", "key_digest", "loss", "top1")]
            for record in read_records(folder, "epoch")
        ]
        for folder in (tmp_path, undisturbed)
    )
    assert one == whole
    for name in map(losses_name, range(2)):
        assert (tmp_path / name).read_bytes() == (undisturbed / name).read_bytes()
    left, right = (newest_state(folder)["model"] for folder in (tmp_path, undisturbed))
    assert all(torch.equal(left[name], right[name]) for name in right)


def notes_of(folder):
    return re.findall(r" note: (.*)", (folder / "logs/host-000.log").read_text())


def test_a_run_that_resumes_otherwise_says_what_has_changed(manifest, tmp_path):
    config = tiny_config(manifest, tmp_path, epochs=1)
    run(config)
    run(config)
    assert notes_of(tmp_path) == []
    longer = replace(
        config,
        epochs=4,
        max_steps=STEPS + 1,
        regularize=RegularizeConfig(ema_decay=0.9),
        image=replace(config.image, flip=False),
    )
    run(longer)
    run(replace(longer, resume=str(tmp_path)))
    settings, rates = notes_of(tmp_path)
    goes = r"the learning rate goes from (\S+) in step 6 of 7 to (\S+) in step 7 of 28"
    assert re.fullmatch(goes, rates)
    assert settings.startswith("settings have changed: ")
    for change in (
        "epochs is 1 before and 4 now",
        "image.flip is True before and False now",
        "regularize.ema_decay is None before and 0.9 now",
    ):
        assert change in settings


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({}, []),
        (
            {"global_batch_size": 128},
            ["larger than the split 'train': 59% of", "larger than the split 'val': 84% of"],
        ),
        ({"global_batch_size": 30}, ["30, is larger than the split 'val': 30% of"]),
        (
            {"epochs": 1, "schedule": ScheduleConfig(warmup_epochs=2)},
            ["the warm-up is longer than the run, 14 steps of 7: "],
        ),
    ],
)
def test_a_run_that_can_hardly_be_meant_says_so(manifest, tmp_path, changes, notes):
    run(replace(tiny_config(manifest, tmp_path / "run", max_steps=1), **changes))
    found = notes_of(tmp_path / "run")
    assert [note in text for note, text in zip(notes, found, strict=True)] == [True] * len(notes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model": own("dropout_model"),
            "regularize": RegularizeConfig(
                mixup=0.2, cutmix=1.0, ema_decay=0.9, clip_norm=1.0, label_smoothing=0.1
            ),
            "optimizer": OptimizerConfig(name="adamw", learning_rate=0.01),
        },
        {"precision": "fp16"},
    ],
    ids=["dropout, averages and mixing", "the scale of float16"],
)
def test_what_a_step_keeps_resumes_bit_for_bit_too(manifest, tmp_path, changes):
    config = tiny_config(manifest, tmp_path / "one", **changes)
    run(config)
    run(replace(config, run_dir=str(tmp_path / "two"), max_steps=5))
    run(replace(config, run_dir=str(tmp_path / "two")))
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    one, two = (newest_state(tmp_path / name) for name in ("one", "two"))
    assert one["scaler"] == two["scaler"]
    weights = "ema" if one["ema"] else "model"
    assert all(torch.equal(one[weights][name], two[weights][name]) for name in one[weights])


def test_a_run_resumes_in_the_order_in_which_it_began_whatever_the_budget_is_now(
    manifest, tmp_path
):
    narrow = tiny_config(manifest, tmp_path / "whole", budget_bytes=180_000)
    run(narrow)
    cut = replace(narrow, run_dir=str(tmp_path / "cut"))
    run(replace(cut, max_steps=3))
    run(replace(cut, budget_bytes=1 << 30))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    with pytest.raises(ConfigError, match="window is 5 here"):
        run(replace(cut, window=5))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"model": ModelConfig(name="trainer.model:tiny_resnet", norm="group")}, "model is"),
        ({"manifest": "OTHER"}, "manifest digest"),
    ],
)
def test_a_checkpoint_of_another_run_is_named_where_it_is_refused(
    manifest, undisturbed, tmp_path, changes, difference
):
    if "manifest" in changes:
        changes = {"manifest": shard_set(tmp_path / "other", size=12)}
    with pytest.raises(CheckpointError, match=rf"^{undisturbed}: step {2 * STEPS}: .*{difference}"):
        run(replace(tiny_config(manifest, tmp_path / "run", resume=str(undisturbed)), **changes))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"resume": "never"}, "would mix"),
        ({"optimizer": OptimizerConfig(name="sdg")}, "sdg"),
    ],
)
def test_a_refused_run_leaves_the_record_of_the_run_that_was(manifest, tmp_path, refused, message):
    # what would be copied to a bucket counts too
    url = f"memory://{tmp_path.name}-{next(iter(refused))}/run"
    run(tiny_config(manifest, url, max_steps=1))
    storage = open_storage(url)
    before = storage.read(configs.RECORD)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        run(tiny_config(manifest, url, **refused))
    assert storage.read(configs.RECORD) == before
    assert b"1 device:" in storage.read(log_name(0))


def test_a_run_that_began_at_another_runs_checkpoint_goes_on_from_its_own(
    manifest, undisturbed, tmp_path
):
    config = tiny_config(manifest, tmp_path, resume=f"{undisturbed}/{folder_of(STEPS)}")
    run(replace(config, max_steps=STEPS + 2))
    run(config)
    assert losses(tmp_path) == losses(undisturbed)[STEPS:]
    log = (tmp_path / "logs/host-000.log").read_text()
    assert f"resumed at step {STEPS + 2}" in log
    assert f"already has checkpoints: it resumes from them, not from {config.resume}" in log


def test_a_run_does_not_go_back_in_its_own_folder(manifest, tmp_path):
    # Its later checkpoints would count as the newest ones, and what it saves be removed for them.
    config = tiny_config(manifest, tmp_path, max_steps=6, checkpoint_every_steps=3)
    run(config)
    older = f"{tmp_path}/{folder_of(3)}"
    with pytest.raises(
        ConfigError, match=r"step 6, so it can't resume from .*000003.*; take another --run-dir"
    ):
        run(replace(config, resume=older))
    run(replace(config, resume=older, run_dir=str(tmp_path / "other")))
    run(replace(config, max_steps=7, resume=f"{tmp_path}/{folder_of(6)}"))
    run(replace(config, max_steps=8, resume=str(tmp_path)))


# --- stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "epochs"), [(1.0, 2), (0.02, 1)])
def test_a_target_accuracy_ends_a_run_and_can_be_raised_or_dropped(
    manifest, tmp_path, target, epochs
):
    # Weights that do not move have the accuracy of chance: above 2 %, below 100 %.
    config = tiny_config(
        manifest, tmp_path, target_accuracy=0.01, optimizer=OptimizerConfig(learning_rate=0.0)
    )
    run(config)
    (final,) = read_records(tmp_path, "final")
    assert final["epochs"] == len(read_records(tmp_path, "epoch")) == 1
    assert 0 < final["seconds_to_target"] <= final["seconds"]
    run(replace(config, target_accuracy=target))
    assert len(read_records(tmp_path, "epoch")) == epochs
    assert (read_records(tmp_path, "final")[-1]["seconds_to_target"] is None) == (epochs == 2)


def test_a_run_is_evaluated_from_another_folder_than_it_was_started_in(
    manifest,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.chdir(Path(manifest).parent)
    config = tiny_config(Path(manifest).name, tmp_path / "run", max_steps=2)
    run(config)
    far = replace(config, manifest="gs://bucket/set", cache_dir="cache", cache_bytes=1)
    assert configs.from_anywhere(far) == replace(far, cache_dir=os.path.abspath("cache"))
    monkeypatch.chdir(tmp_path)
    assert command.main(["evaluate", "--run-dir", "run"]) == OK
    assert "step 2: val accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("less", [{}, {"epochs": 1, "max_steps": None}])
def test_a_run_that_is_told_to_do_no_more_than_it_has_done_is_done(
    manifest, tmp_path, less, capsys
):
    config = tiny_config(manifest, tmp_path, epochs=3, max_steps=2 * STEPS + 1)
    run(config)
    before = (tmp_path / "config.json").read_text()
    run(replace(config, **less))
    printed = capsys.readouterr().out
    assert f"already complete at step {2 * STEPS + 1}" in printed
    assert f"after {2 * STEPS + 1} steps (2 epochs)" in printed.splitlines()[-2]
    assert len(losses(tmp_path)) == 2 * STEPS + 1
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("when", ["train step", "evaluation step"])
def test_sigterm_saves_and_the_same_command_goes_on(
    manifest, undisturbed, tmp_path, monkeypatch, when
):
    monkeypatch.setattr(loop, "FETCH_EVERY", 1)
    config = tiny_config(manifest, tmp_path, model=own("Asking"))
    Asking.training_asks, Asking.calls_left = when == "train step", 3
    with pytest.raises(Preempted, match=f"saved at step {3 if when == 'train step' else STEPS}"):
        run(config)
    run(config)
    assert losses(tmp_path) == losses(undisturbed)
    assert len(read_records(tmp_path, "eval")) == 2


class OutOfReach:
    """A stream whose bucket answers no more after step 3; then the run is asked to stop."""

    def __init__(self, stream: Any, runtime: Single) -> None:
        self._stream, self._runtime, self.stopped = stream, runtime, threading.Event()

    def __len__(self) -> int:
        return len(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def stop(self) -> None:
        self.stopped.set()

    def run(self, spans: Iterator[tuple[int, range]]) -> Iterator[Any]:
        yield from itertools.islice(self._stream.run(spans), 3)
        while self._runtime.heartbeat._state.step != 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        self.stopped.wait()


def test_a_run_whose_data_is_out_of_reach_ends_when_it_is_told_to(manifest, tmp_path):
    config, alone = tiny_config(manifest, tmp_path), Single("fp32")
    data = open_data(config, 0, 1)
    data = replace(data, train=OutOfReach(data.train, alone))
    with pytest.raises(Preempted, match="saved at step 3"):
        loop.train(alone, config, open_data=lambda *_: data)
    assert newest_state(tmp_path)["step"] == len(losses(tmp_path)) == 3


def test_an_evaluation_that_is_not_a_number_is_neither_logged_nor_saved_nor_a_target(
    manifest, tmp_path, monkeypatch
):
    monkeypatch.setattr(Failing, "in_training", False)
    config = tiny_config(
        manifest, tmp_path, model=own("Failing"), target_accuracy=0.01, checkpoint_every_steps=2
    )
    with pytest.raises(NotFinite, match="the loss of the evaluation is nan"):
        run(config)
    assert newest_state(tmp_path)["step"] == 6
    assert not read_records(tmp_path, "eval")
    with pytest.raises(NotFinite, match="the loss of the evaluation is nan"):
        launch(config, loop.evaluate_checkpoint)


def test_a_loss_that_is_no_number_stops_with_the_step_and_the_samples(manifest, tmp_path):
    config = tiny_config(
        manifest, tmp_path, model=own("Failing"), checkpoint_every_steps=2, log_every_steps=3
    )
    order = open_data(config, 0, 1).train
    assert isinstance(order, Stream)
    ids = order.order.batch(0, 4).ids.tolist()
    with pytest.raises(NotFinite, match="epoch 1 step 4") as error:
        run(config)
    assert str(ids) in str(error.value)
    assert newest_state(tmp_path)["step"] == 4
    assert (tmp_path / log_name(0)).read_text().endswith(f" NotFinite: {error.value}\n")


def test_a_run_that_is_asked_before_its_first_step_leaves_its_checkpoint_as_it_is(
    manifest, tmp_path, monkeypatch
):
    config = tiny_config(manifest, tmp_path)
    run(replace(config, max_steps=STEPS))
    before = checkpoint.commits(open_storage(str(tmp_path)))
    assert before[-1].top1 is not None
    asked = tmp_path / "asked to stop"
    asked.touch()
    monkeypatch.setenv(preemption.RELAY, str(asked))
    with pytest.raises(Preempted, match=f"saved at step {STEPS}"):
        run(config)
    assert checkpoint.commits(open_storage(str(tmp_path))) == before


class Two(Single):
    """A process that is one of two; the other one does as it does."""

    def __init__(self) -> None:
        super().__init__("fp32")
        self.num_hosts = 2
        self.looks = 0
        self.happened: list[str] = []

    def sum_hosts(self, values: Sequence[int]) -> list[int]:
        return [2 * value for value in values]

    def text_of_master(self, text: str) -> str:
        return text

    def any_host(self, flag: bool) -> bool:
        self.looks += 1
        return super().any_host(flag)

    def ask_hosts(self, flag: bool) -> Callable[[], bool]:
        self.happened.append("asked")
        return self._noting("answered", super().ask_hosts(flag))

    def compiled(self, step: Step, name: str) -> Step:
        return self._noting(name, step)

    def fetch(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        self.happened.append(f"fetched {len(rows)}")
        return super().fetch(rows)

    def _noting(self, text: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.happened.append(text)
            return function(*args)

        return called


def test_no_line_of_the_log_has_a_rate_above_that_of_the_steps(manifest, tmp_path):
    model = own("SlowlyTrained")
    run(
        tiny_config(
            manifest, tmp_path, log_every_steps=3, model=model, epochs=1, checkpoint_every_steps=4
        )
    )
    records = read_records(tmp_path, "step")
    rates = [record[name] for record in records for name in ("rate", "global_rate")]
    assert max(rates) <= BATCH / STEP_S, rates


def test_a_report_and_a_question_to_the_hosts_wait_for_no_step_that_was_just_begun(
    manifest, tmp_path
):
    two = Two()
    loop.train(two, tiny_config(manifest, tmp_path, log_every_steps=3, max_steps=6))
    step = "train step"
    assert two.happened == [
        step, "fetched 1", "asked", step, "answered", step,
        step, "fetched 2", "asked", step, "answered", step, "fetched 3",
    ]  # fmt: skip


def test_an_evaluation_fetches_while_its_newest_step_is_under_way(
    manifest, undisturbed, monkeypatch
):
    monkeypatch.setattr(loop, "FETCH_EVERY", 1)
    two = Two()
    two.num_hosts = 1
    config = tiny_config(manifest, undisturbed)
    learner = Learner(two, config, 10, newest_state(undisturbed))
    loop.evaluate(two, learner, open_data(config, 0, 1).evaluation, lambda: False)
    step = "evaluation step"
    assert two.happened == [step, step, "fetched 1", step, "fetched 1", "fetched 1"]


def test_samples_that_were_not_those_of_the_plan_stop_the_run(manifest, tmp_path):
    # The other process does as this one does, so the half of the samples that is its own is trained
    # on by nobody.
    with pytest.raises(EpochMismatch, match="epoch 1: trained on"):
        loop.train(Two(), tiny_config(manifest, tmp_path))
    assert checkpoint.commits(open_storage(str(tmp_path))) == []


def die_while_saving(folder):
    with open_storage(folder).writer(folder_of(9) + new_state_name()) as writer:
        writer.write(bytes(1 << 20))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("writes", "copies"), [(True, 2), (False, 0)])
def test_only_the_host_that_writes_copies_the_state(manifest, tmp_path, writes, copies):
    class Counting(Single):
        is_master, copies = writes, 0

        def text_of_master(self, text: str) -> str:
            return text

        def to_host(self, tree: Any) -> Any:
            self.copies += 1
            return super().to_host(tree)

    runtime = Counting("fp32")
    loop.train(runtime, tiny_config(manifest, tmp_path))
    assert runtime.copies == copies


def test_what_a_kill_leaves_of_a_checkpoint_goes_when_the_run_goes_on(manifest, tmp_path):
    config = tiny_config(manifest, tmp_path)
    run(replace(config, max_steps=3))
    child = multiprocessing.get_context("fork").Process(
        target=die_while_saving, args=(str(tmp_path),)
    )
    child.start()
    child.join()
    left = tmp_path / folder_of(9)
    assert [path.stat().st_size for path in left.iterdir()] == [1 << 20]
    run(replace(config, max_steps=4))
    assert not left.exists()


# --- refusals -------------------------------------------------------------------------------------


def test_fake_data_takes_the_same_path(tmp_path, monkeypatch):
    monkeypatch.setattr(splits, "NUM_SAMPLES", 20)
    monkeypatch.setattr(splits, "NUM_EVAL_SAMPLES", 9)
    run(tiny_config(None, tmp_path, fake_data=True, epochs=1))
    assert read_records(tmp_path, "eval")[0]["samples"] == 9
    assert read_records(tmp_path, "epoch")[0]["samples"] == 20


def test_profiled_steps_leave_a_trace_also_where_a_run_ends_or_begins_among_them(
    manifest, tmp_path
):
    config = tiny_config(manifest, tmp_path, profile_steps=(1, 5))
    run(replace(config, max_steps=3))
    trace = next((tmp_path / "profile").iterdir())
    trace.unlink()
    run(replace(config, max_steps=6))
    assert trace.exists()


@pytest.mark.parametrize(("decay", "is_the_runs"), [(None, True), (0.0, False)])
def test_an_evaluation_by_command_is_of_the_averaged_weights_that_a_checkpoint_has(
    manifest,
    tmp_path,
    capsys,
    decay,
    is_the_runs,
):
    run(
        tiny_config(
            manifest, tmp_path / "run", epochs=1, regularize=RegularizeConfig(ema_decay=0.9)
        )
    )
    loss = read_records(tmp_path / "run", "eval")[0]["loss"]
    config = tiny_config(
        manifest,
        tmp_path,
        resume=str(tmp_path / "run"),
        regularize=RegularizeConfig(ema_decay=decay),
    )
    launch(config, loop.evaluate_checkpoint)
    assert (f"loss {loss:.4f}, {NUM_EVAL} samples" in capsys.readouterr().out) == is_the_runs


def test_an_evaluation_of_another_model_than_the_checkpoints_is_refused(manifest, undisturbed):
    other = ModelConfig(name="trainer.model:tiny_resnet", norm="group")
    with pytest.raises(
        CheckpointError, match=r"step \d+: .*model is '.* norm=batch .* and '.* norm=group "
    ):
        launch(tiny_config(manifest, undisturbed, model=other), loop.evaluate_checkpoint)


CLASSES = [f"class {label}" for label in range(10)]
OTHERS = {
    "another order": ([*CLASSES[:8], *CLASSES[:7:-1]], "label 8 is class 9 here and class 8 there"),
    "fewer": (CLASSES[:9], "9 classes, the run knows 10: label 9 is no class here and class 9 "),
    "more": ([*CLASSES, "owl"], "11 classes, the run knows 10: label 10 is owl here and no class "),
    "no names": ([str(label) for label in range(10)], None),
}


@pytest.mark.parametrize("where", ["", "{run}", "{run}/checkpoints/step-000000014"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_set_is_evaluated_whose_labels_mean_the_classes_of_the_run(
    kind, where, undisturbed, tmp_path, capsys
):
    names, sentence = OTHERS[kind]
    with Writer(tmp_path / "set", classes=names) as writer:
        for label in range(4):
            writer.write(image=pixels(label, 8, 8), label=label)
    config = tiny_config(str(tmp_path / "set"), undisturbed, eval_split="train")
    if where:
        resume = where.format(run=undisturbed)
        config = replace(config, run_dir=str(tmp_path / "run"), resume=resume)
    with ExitStack() as exits:
        if sentence:
            exits.enter_context(pytest.raises(ConfigError, match=f"/set: has .*{sentence}"))
        launch(config, loop.evaluate_checkpoint)
    assert ("4 samples" in capsys.readouterr().out) == (sentence is None)


def test_a_lease_that_can_not_be_removed_does_not_end_a_run(manifest, monkeypatch, capsys):
    def refuse(self: MemoryStorage, name: str, *, generation: str | None = None) -> None:
        refused.append(name)
        raise StorageError(f"{self.url}/{name}: is subject to the bucket's retention policy")

    refused = list[str]()
    monkeypatch.setattr(MemoryStorage, "delete", refuse)
    run(tiny_config(manifest, f"memory://{uuid.uuid4().hex}/run", max_steps=2))
    assert "done after 2 steps" in capsys.readouterr().out
    assert HOLDER in refused
