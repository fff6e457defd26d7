import json
import sys
import uuid

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardset.errors import ConfigError
from shardset.storage.memory import MemoryStorage
from tests.makers.records import EVALUATION, FINAL, STEP
from trainer.data.step_rows import Totals, seen
from trainer.run_folder import names
from trainer.telemetry import metrics
from trainer.telemetry.counts import SMOOTHING, Rates
from trainer.telemetry.metrics import RunLog


@given(st.integers(1, 40), st.integers(0, 40), st.integers(2, 12), st.integers(0, 1000))
@pytest.mark.parametrize("scale", [1e-6, 1 / 64, 1.0, 1e6])
def test_weighted_means_leave_out_the_pads_whatever_the_scale_of_the_weights(
    scale, real, pads, classes, seed
):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(real + pads, classes, generator=draw)
    labels = torch.randint(0, classes, (real + pads,), generator=draw)
    weights = scale * torch.cat([torch.ones(real), torch.zeros(pads)])
    batch = {"label": labels, "weight": weights}
    totals = Totals().add(seen(batch, torch.ones(real + pads), logits).sums.unsqueeze(0))
    ranks = (logits > logits.gather(1, labels.unsqueeze(1))).sum(1)[:real]
    # over samples, however they lie in batches
    shares = [int((ranks < most).sum()) / real for most in (1, 5)]
    found = [totals.mean(name) for name in ("loss", "top1", "top5")]
    assert found == pytest.approx([1.0, *shares], rel=1e-5)
    assert Totals().mean("loss") == 0


def test_rates_leave_out_what_comes_before_a_mark():
    rates = Rates()
    rates.add(10, 100.0)
    rates.add(10, 101.0)
    rates.start = 500.0
    rates.add(60, 503.0)
    assert (rates.samples, rates.seconds, rates.global_rate) == (70, 4.0, 17.5)
    assert rates.rate == pytest.approx(SMOOTHING * 20 + (1 - SMOOTHING) * 10)


def test_a_step_line_has_the_fields_of_the_original_by_name():
    line = metrics.line_of(STEP)
    assert line.startswith("step device=cpu epoch=1 step=0 ")
    assert {"loss=2", "rate=90", "global_rate=80"} <= set(line.split())


def test_records_go_to_the_log_the_json_lines_and_tensorboard(tmp_path, capsys):
    other = RunLog(tmp_path, 3)  # only the first host prints and writes events
    other.record(STEP)
    other.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["host-003.log"]
    log = RunLog(tmp_path)
    log.start(0)
    log.record(STEP)
    log.record(EVALUATION)
    log.note("a sentence")
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["step", "eval"]
    assert (tmp_path / "logs/host-000.log").read_text().count("\n") == 3
    assert list((tmp_path / "tensorboard").glob("events.*"))
    assert capsys.readouterr().out == "a sentence\n"


def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path):
    for start in (0, 2):  # the second run resumes at step 2, after which the first one wrote
        log = RunLog(tmp_path)
        log.start(start)
        for step in range(start, 4):
            log.record(msgspec.structs.replace(STEP, global_step=step, loss=float(start)))
            log.record(msgspec.structs.replace(EVALUATION, global_step=step + 1))
        log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("step/loss")]
    assert found == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)]
    assert [event.step for event in events.Scalars("eval/top1")] == [1, 2, 3, 4]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_has_a_progress_line_and_it_makes_way_for_others(
    tmp_path,
    capsys,
    monkeypatch,
    is_terminal,
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    log = RunLog(tmp_path)
    log.progress("step 10")
    log.note("a sentence")
    assert capsys.readouterr() == ("a sentence\n", "\rstep 10\x1b[K\r\x1b[K" if is_terminal else "")
    log.close()


def test_merged_logs_are_in_the_order_of_time_and_an_entry_of_several_lines_stays_whole():
    storage = MemoryStorage(uuid.uuid4().hex, "")
    with pytest.raises(
        ConfigError,
        match=f"{storage.url}: no logs/host-000.log there, expected the folder of a run",
    ):
        names.merged_logs(storage)
    for host in (0, 1):
        entries = [
            f"2026-01-01T00:00:0{moment + host} trainer: {{\n }},\n}}\n" for moment in (1, 3)
        ]
        with storage.writer(names.log_name(host)) as writer:
            writer.write("".join(entries).encode())
    texts = ("trainer: {", " },", "}")
    assert names.merged_logs(storage) == [
        f"2026-01-01T00:00:0{moment} host-00{(moment - 1) % 2} {text}"
        for moment in (1, 2, 3, 4)
        for text in texts
    ]


def test_a_run_without_an_evaluation_has_a_final_line():
    assert "accuracy=None" in metrics.line_of(msgspec.structs.replace(FINAL, accuracy=None))


def test_a_record_after_one_that_was_cut_has_a_line_of_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "epo')
    log = RunLog(tmp_path)
    log.record(STEP)
    log.close()
    cut, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert (cut, json.loads(line)["kind"]) == ('{"kind": "epo', "step")
