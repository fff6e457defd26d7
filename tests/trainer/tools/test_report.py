"""The page about a run: what counts after a resume, what is missing, what is damaged."""

import dataclasses
import json
import re

import pytest
from msgspec.structs import asdict, replace

from shardset.errors import ConfigError
from shardset.program import USAGE
from shardset.settings import with_values
from shardset.storage.open import open_storage
from tests.makers.records import EVALUATION, FINAL, STEP
from trainer import cli as command
from trainer import config as configs
from trainer import recipes
from trainer.telemetry.metrics import EpochRecord, EvalRecord, FinalRecord, StepRecord
from trainer.tools import report

EPOCH = EpochRecord(
    device="cpu",
    epoch=0,
    global_step=10,
    samples=80,
    replica_samples=80,
    key_digest="ab",
    loss=1.5,
    top1=0.4,
    reduced_global_rate=85.0,
    input_wait_percent=25.0,
    compilations=2,
    rate_per_device=21.25,
)
KINDS: dict = {StepRecord: "step", EpochRecord: "epoch", EvalRecord: "eval", FinalRecord: "final"}


def line(record):
    return json.dumps(
        {"kind": KINDS[type(record)], "time": "2026-01-01T00:00:00+00:00", **asdict(record)}
    )


def steps(start, stop, loss=2.0):
    return [
        replace(STEP, step=number, global_step=number, loss=loss - number / 10)
        for number in range(start, stop)
    ]


def whole():
    return [*steps(0, 10), EPOCH, EVALUATION, FINAL]


def folder(path, records):
    """A run folder as the trainer leaves it, without logs and checkpoints."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else line(one) for one in records]
    (path / "metrics.jsonl").write_text("".join(f"{one}\n" for one in lines))
    (path / "config.json").write_text(configs.to_json(recipes.digits_smoke()))
    return path


def read(path):
    return report.read(open_storage(str(path)))


def sentences(run):
    found = report.render(run).decode().partition('<ul class="findings">')[2].partition("</ul>")[0]
    return re.findall(r'<span class="mark">[^<]*</span><span>([^<]*)', found)


def test_the_page_shows_curves_epochs_evaluations_and_settings(tmp_path):
    url = str(folder(tmp_path / "run", whole()))
    (tmp_path / "notes.html").write_text("notes")
    with pytest.raises(ConfigError, match="not a page of shardset"):
        report.write(url, str(tmp_path / "notes.html"))
    report.write(url)
    run, where, num_bytes = report.write(url)
    assert where == f"{tmp_path / 'run'}/report.html"
    text = (tmp_path / "run/report.html").read_text()
    assert len(text.encode()) == num_bytes
    assert "<h1>tiny_resnet on" in text
    assert f"{tmp_path}/run · cpu · 10 steps · 2026-01-01" in text
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert titles == [
        "Loss",
        "Accuracy, %",
        "Learning rate",
        "Samples per second of the first host",
        "Time of an epoch, %",
    ]
    accuracy = "55.00\N{NO-BREAK SPACE}%"
    for wanted in (
        accuracy,
        "best val accuracy",
        "last val accuracy",
        "val, top-5",
        "optimizer.learning_rate",
        "2 min",
        "(best)",
        "compilations",
        "<dt>samples/s</dt><dd>85<",
        "<dt>samples/s per device</dt><dd>21<",
    ):
        assert wanted in text
    assert sentences(run)[0] == "The run has ended after 10 steps."
    assert any(text.startswith("Input-bound: steps waited 25 %") for text in sentences(run))


def test_the_title_names_all_sets_of_a_mixture(tmp_path):
    run = read(folder(tmp_path / "run", [STEP]))
    sets = {"manifest": "sets/one", "mix": "sets/one=3;gs://bucket/two=1,2@9"}
    text = report.render(dataclasses.replace(run, config=with_values(run.config, sets))).decode()
    assert "<h1>tiny_resnet on sets/one and bucket/two</h1>" in text


def test_after_a_resume_the_last_record_of_a_step_counts(tmp_path):
    again = steps(6, 10, loss=5.0)
    path = folder(tmp_path / "run", [*steps(0, 10), *again, EPOCH])
    run = read(path)
    assert [one.global_step for one in run.steps] == list(range(10))
    assert [one.loss for one in run.steps[6:]] == [one.loss for one in again]


def test_a_run_that_goes_on_is_not_called_finished(tmp_path):
    run = read(folder(tmp_path / "run", [*whole(), *steps(11, 14)]))
    assert run.final is None
    assert "The run has not ended: it is running, or was stopped at step 13." in sentences(run)


@pytest.mark.parametrize(
    "bad",
    [
        '{"kind": "step", "global_st',
        "[1]",
        '{"kind": "other", "global_step": 3}',
        "\x00",
        *(replace(EPOCH, **counts) for counts in ({"epoch": -1}, {"global_step": 10**400})),
    ],
)
def test_a_damaged_line_is_counted_and_left_out(tmp_path, bad):
    run = read(folder(tmp_path / "run", [STEP, bad, EPOCH]))
    assert (len(run.steps), len(run.epochs), run.num_damaged) == (1, 1, 1)
    assert "1 line is damaged in metrics.jsonl and left out." in sentences(run)


@pytest.mark.parametrize(
    "values",
    [{"loss": 5e-324}, {"loss": 1e308, "top1": -1e308}, {"loss": 1e-13}, {"loss": float("nan")}],
)
def test_an_odd_number_in_the_log_is_no_reason_for_no_page(tmp_path, values):
    odd = [replace(record, **values) for record in (STEP, EPOCH, EVALUATION)]
    run = read(folder(tmp_path / "run", [STEP, *odd, replace(EPOCH, global_step=0)]))
    page = report.render(run)
    assert b"<h1>tiny_resnet" in page
    assert b"nan" not in page.split(b"<svg")[1].split(b"</svg>")[0].lower()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: None, "no metrics.jsonl"),
        (lambda path: path.mkdir(), "no metrics.jsonl and config.json there, expected the folder"),
        (lambda path: folder(path, []), "no record in it yet"),
    ],
    ids=["no folder", "no metrics", "empty"],
)
def test_a_folder_that_is_no_run_is_a_wrong_command_line(tmp_path, capsys, made, message):
    made(tmp_path / "run")
    assert command.main(["report", str(tmp_path / "run")]) == USAGE
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1
