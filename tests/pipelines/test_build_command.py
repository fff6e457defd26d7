"""The command line of the build: what it prints, and what it refuses."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from apache_beam.runners.portability.prism_runner import PrismJobServer
from rich.filesize import decimal

from pipelines import cli as command
from pipelines import parsers
from pipelines.config import BuildConfig
from shardset.settings import record_of
from tests.makers import odd_images
from tests.makers.built import add
from tests.makers.folders import write_class_folders, write_csv, write_images


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_class_folders(
        tmp_path / "raw", ["cat", "dog", "owl"], 20, splits=["train", "test"]
    )


@pytest.mark.slow
def test_the_closing_table_shows_the_size_of_the_stored_shards(tmp_path, capfd):
    raw = tmp_path / "raw"
    for number in range(8):
        add(
            raw,
            f"a/{number}.png",
            odd_images.encoded(odd_images.picture(number, (500, 400)), "PNG"),
        )
    words = [
        "build",
        "--source",
        "folder",
        "--input",
        str(raw),
        "--num-shards",
        "2",
        "--direct_running_mode=in_memory",
    ]
    words += ["--no-report", "--resize-shorter", "16", "--image-format", "jpg", "--output"]

    def shown(*more: str) -> str:
        capfd.readouterr()
        assert command.main([*words, *more]) == 0
        return capfd.readouterr().out

    out = tmp_path / "out"
    assert "input size" not in shown(str(out))
    assert "input size" in shown(str(tmp_path / "dry"), "--dry-run")
    assert "input size" in shown(str(tmp_path / "part"), "--only-shards", "train:0")
    text = shown(
        str(out), "--overwrite", "--seed", "1", "--image-format", "png", "--resize-shorter", "400"
    )
    assert decimal(sum(path.stat().st_size for path in out.rglob("*.tar"))) in text


def pipelines(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_command_builds_verifies_and_inspects(raw, tmp_path):
    done = pipelines(
        "build",
        "--source",
        "folder",
        "--input",
        raw,
        "--output",
        tmp_path / "out",
        "--num-shards",
        "train=3,test=2",
    )
    assert done.returncode == 0, done.stderr
    assert "120" in done.stdout or "60" in done.stdout
    assert "Traceback" not in done.stderr
    assert pipelines("verify", tmp_path / "out", "--deep").returncode == 0
    shown = pipelines("inspect", tmp_path / "out", "--name", "train/cat/000.png")
    assert shown.returncode == 0, shown.stderr
    assert "train/cat/000" in shown.stdout
    (tmp_path / "out" / "train" / "train-000000.tar").unlink()
    broken = pipelines("verify", tmp_path / "out", "--json")
    assert broken.returncode == 1
    assert "train/train-000000.tar" in broken.stdout


@pytest.mark.slow
def test_names_are_printed_as_they_are(tmp_path):
    write_images(tmp_path, ["1.png", "2.png"])
    rows = [["1.png", "y[/b]", "train"], ["2.png", "[red]x", "test"]]
    listing = write_csv(tmp_path / "list.csv", ["path", "label", "split"], rows)
    output = tmp_path / "out [bold]"
    done = pipelines(
        "build", "--source", "listing", "--input", listing, "--output", output, "--num-shards", 1
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.replace("\n", "").replace(" ", "")
    for sentence in ("splittesthasnoimagesof1class:y[/b]", "out[bold]/manifest.json"):
        assert sentence in shown
    planned = pipelines("estimate", output)
    assert planned.returncode == 0
    assert "out [bold]" in " ".join(planned.stdout.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--no-such-flag"], "unknown arguments: --no-such-flag"),
        (["--num-shard", "3"], "unknown arguments: --num-shard 3, did you mean '--num-shards'?"),
        (["--num-shards", "0"], "num_shards is 0, expected N or SPLIT=N,SPLIT=N, each int >= 1"),
        (
            ["--verify", "non"],
            "--verify: no choice 'non', did you mean 'none'?; there are",
        ),
        (["--holdout", "test=2"], "--holdout test=2.0: expected a fraction"),
        (["--source", "nope"], "no source 'nope'; there are cifar10"),
        (["--only-shards", "train:3-1"], "--only-shards train:3-1: expected SPLIT:NUMBERS"),
        (["--only-shards", "train:9"], "--only-shards train:9: no such shard, only test:0-0, "),
        (
            ["--num-shards", "bogus=3"],
            "sizes were given for split 'bogus', but the input has test, train",
        ),
        (["--resize-shorter", "shorter=256"], "resize_shorter is shorter=256, expected int >= 1"),
        (
            ["--num-shards", "train=3,train=5"],
            "num_shards is train=3,train=5, expected one value for each name",
        ),
        *[
            (["--runner", name], f"--runner {name}: was never tested; use one of FnApiRunner, ")
            for name in (
                *("FlnkRunner", "dask", "apache_beam.runners.dask.dask_runner.DaskRunner"),
                *("InteractiveRunner", "PortableRunner"),
            )
        ],
        (["--runner=PortableRunner"], "or add --any-runner"),
        (
            ["--any-runner", "--runner=FlnkRunner"],
            "--runner FlnkRunner: Unexpected pipeline runner",
        ),
        (["--runner=PrismRunner", "--prism_location=/nowhere"], "--runner PrismRunner: Unable to"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_one_sentence(
    raw, tmp_path, capsys, words, sentence
):
    with pytest.raises(SystemExit) as ended:
        sys.exit(
            command.main(
                [
                    "build",
                    "--source=folder",
                    f"--input={raw}",
                    f"--output={tmp_path / 'out'}",
                    *words,
                ]
            )
        )
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors


def test_prism_that_can_not_be_downloaded_is_said_before_anything_is_written(
    raw, tmp_path, monkeypatch, said
):
    monkeypatch.setattr(PrismJobServer, "BIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    words = "--source=folder", f"--input={raw}", f"--output={tmp_path / 'out'}"
    text = said("build", *words, "--runner=PrismRunner", code=2)
    assert re.match("ConfigError: --runner PrismRunner: .*; leave it out to build here$", text)
    assert not (tmp_path / "out").exists()
    with socket.create_server(("127.0.0.1", 0)) as running:  # of which none is downloaded
        endpoint = f"--job_endpoint=127.0.0.1:{running.getsockname()[1]}"
        shutil.rmtree(raw)
        assert "SourceError" in said("build", *words, "--runner=PrismRunner", endpoint, code=1)


def test_what_a_flag_says_of_several_splits_may_be_given_one_at_a_time(tmp_path):
    words = [
        "build",
        "--source",
        "folder",
        "--input",
        "in",
        "--output",
        "out",
        "--num-shards",
        "train=3",
    ]
    words += ["--num-shards", "test=2", "--holdout", "test=0.1", "--holdout", "val=0.2"]
    words += ["--class-depth", "2", "--path-column", "photo", "--label-column", ""]
    words += ["--only-shards", "train:0", "--only-shards", "test:1"]
    args = record_of(BuildConfig, parsers.parser().parse_args(words))
    assert args.num_shards == {"train": 3, "test": 2}
    assert args.holdout == {"test": 0.1, "val": 0.2}
    assert (args.class_depth, args.path_column, args.label_column) == (2, "photo", "")
    assert args.only_shards == {("train", 0), ("test", 1)}
    assert args.repeat == {}
    assert parsers.parser().parse_args(["export", "out", "--to", "wids", "--to", "hf,wids"]).to == [
        "wids",
        "hf",
        "wids",
    ]


def test_a_failure_in_a_worker_is_one_sentence_without_a_traceback(raw, tmp_path):
    add(raw, "train/cat/bad.jpg", b"")
    words = [
        "--source",
        "folder",
        "--input",
        raw,
        "--output",
        tmp_path / "out",
        "--max-bad-fraction",
        "0",
    ]
    done = pipelines("build", *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") <= 3
    assert "TooManyBad: split 'train': 1 of 61 raw samples are bad" in done.stderr
