"""The verbs against the stand-in for gcloud: what they call, what the workers run, and what fails
in which words.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardset.program import FAILED, OK, PREEMPTED, USAGE
from tests.makers.documented import commands_of, shown
from tests.makers.training import finish
from tests.trainer.tpu.fake_gcloud import parsed
from trainer import cli as command
from trainer.tpu import cli as tpu_cli

FAKE = Path(__file__).with_name("fake_gcloud.py")
PLACE = ["my-tpu", "--zone=us-central2-b"]
RUN = ["--fake-data", "--run-dir=gs://bucket/run"]

# Answers like uv: `uv venv ... FOLDER` makes an environment, `uv pip install ... WHEEL[EXTRAS]`
# looks at the wheel.
UV = """\
#!/bin/sh
for word; do last=$word; done
case $1 in
venv) mkdir -p "$last/bin" ;;
pip) test -f "${last%%\\[*}" && echo "$*" > "$HOME/installed" ;;
esac
"""
# A worker's Python notes what it was to run. It ends with the code in the file `code`, or waits for
# SIGTERM.
PYTHON = """\
#!/bin/bash
echo "PJRT_DEVICE=$PJRT_DEVICE A=$A $*" >> "$HOME/ran"
echo "step 0"
trap 'echo saved; exit 3' TERM
while [ ! -e "$HOME/code" ]; do sleep 0.02; done
exit "$(cat "$HOME/code")"
"""

Run = Callable[..., tuple[int, str, str]]


class Cloud:
    """A slice with two workers that is set up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program(folder / "bin/gcloud", f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
        self.homes = [folder / str(worker) for worker in range(2)]
        for home in self.homes:
            program(home / ".local/bin/uv", UV)
            program(home / "shardset-tpu/env/bin/python", PYTHON)

    @property
    def environment(self) -> dict[str, str]:
        """What lets a process find this cloud and no other: nobody's gcloud and no login."""
        login = str(self.folder / "no-login")
        return {
            "FAKE_GCLOUD": str(self.folder),
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "CLOUDSDK_CONFIG": login,
        }

    @property
    def calls(self) -> list[list[str]]:
        """Every call of gcloud so far, as its words."""
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def ends(self, *codes: int) -> None:
        """The codes with which the workers' Python ends."""
        for home, code in zip(self.homes, codes, strict=True):
            (home / "code").write_text(str(code))

    def ran(self) -> list[str]:
        return [
            (home / "ran").read_text().strip() for home in self.homes if (home / "ran").exists()
        ]


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    made = Cloud(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def tpu(cloud, capfd):
    """Runs a verb on `my-tpu`; returns its exit code, output and errors."""

    def run(verb: str, *words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return command.main(["tpu", verb, *PLACE, *words]), *capfd.readouterr()

    return run


def last(errors):
    return errors.strip().splitlines()[-1]


# --- create, setup and doctor ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "runtime"),
    [
        ("v3-32", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_create_takes_the_runtime_that_google_names_for_the_generation(cloud, tpu, type_, runtime):
    words = ("create", f"--accelerator-type={type_}")
    assert tpu(*words, "--spot")[0] == OK
    assert tpu(*words, "--runtime-version=mine", "--gcloud=--service-account=a@p.iam")[0] == OK
    assert {f"--version={runtime}", f"--accelerator-type={type_}", "--spot"} <= set(cloud.calls[0])
    assert {"--version=mine", "--service-account=a@p.iam"} <= set(cloud.calls[1])
    assert "--spot" not in cloud.calls[1]


def test_create_of_an_unknown_generation_needs_the_runtime_version(cloud, tpu):
    code, _, errors = tpu("create", "--accelerator-type=v5e-16")
    assert (code, cloud.calls) == (USAGE, [])
    assert "v5litepod-16 (v5e)" in last(errors)
    assert tpu("create", "--accelerator-type=v9-16", "--runtime-version=v9")[0] == OK


@pytest.mark.parametrize(("backend", "extra"), [("torchtpu", "torchtpu"), ("xla", "tpu")])
def test_setup_installs_one_back_end_on_every_worker_and_removes_the_other(
    cloud, tpu, tmp_path, backend, extra
):
    wheel = tmp_path / tpu_cli.WHEEL
    wheel.touch()
    for _ in range(2):  # again is no error
        assert tpu("setup", f"--wheel={wheel}", f"--backend={backend}")[0] == OK
    for home in cloud.homes:
        words = (home / "installed").read_text().split()
        assert words[-1] == f"{home / wheel.name}[trainer,{extra}]"
        assert "--exact" in words


def test_setup_builds_the_wheel_of_this_source_first(tpu):
    build, copy, _ = tpu("setup", "--dry-run")[1].splitlines()
    assert "-m pip wheel" in build
    assert f"build/tpu/{tpu_cli.WHEEL} my-tpu:" in copy


# --- train ------------------------------------------------------------------------------------


def test_train_hands_the_flags_of_the_trainer_to_every_worker_and_prints_what_it_says(cloud, tpu):
    cloud.ends(0, 0)
    for home in cloud.homes:
        (home / "shardset-tpu/train.log").write_text("of the last training\n")
    flags = [
        "--recipe=cifar10_resnet18",
        "--manifest=gs://bucket/it's $HOME `x`; rm \"ä",
        "--run-dir=gs://bucket/run",
        "--epochs=3",
    ]
    code, output, _ = tpu("train", *flags, "--env", "A=b c")
    assert (code, output) == (OK, "step 0\n" * 2)
    assert cloud.ran() == [f"PJRT_DEVICE=TPU A=b c -m trainer train {' '.join(flags)}"] * 2
    assert tpu("train", *RUN, "--backend=torchtpu")[0] == OK
    assert all(" -m trainer.tpu.processes --" in line.splitlines()[-1] for line in cloud.ran())


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ((3, 3), PREEMPTED, "the same command resumes"),
        ((0, 1), FAILED, "ended with code 1"),
    ],
)
def test_train_ends_with_the_code_of_the_trainer(cloud, tpu, codes, expected, message):
    cloud.ends(*codes)
    code, _, errors = tpu("train", *RUN)
    assert code == expected
    assert message in last(errors)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_training_outlives_the_connection_until_it_is_stopped(cloud, tpu, number):
    words = [sys.executable, "-m", "trainer", "tpu", "train", *PLACE, *RUN]
    path = os.pathsep.join(
        filter(None, (str(Path(command.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    process = subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    logs = [home / "shardset-tpu/train.log" for home in cloud.homes]
    while not all(log.exists() and log.read_text() for log in logs) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.2)
    os.killpg(process.pid, number)  # as a terminal does
    output = finish(process)[1]
    if number == signal.SIGINT:
        assert "training on the TPU continues" in last(output)
    code, _, errors = tpu("train", *RUN)
    assert code == FAILED
    assert errors.count("a training runs here already") == 2
    assert [log.read_text() for log in logs] == ["step 0\n"] * 2
    assert tpu("ssh", "--command=pkill -TERM -F ~/shardset-tpu/train.pid")[0] == OK
    while any("saved" not in log.read_text() for log in logs):
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fake-data"], "--run-dir run: expected an address"),
        ([*RUN, "--set=epoch=1"], "did you mean 'epochs'"),
        ([*RUN, "--env=A"], "NAME=VALUE"),
    ],
)
def test_wrong_usage_is_found_before_gcloud_is_called(cloud, tpu, words, message):
    code, _, errors = tpu("train", *words)
    assert code == USAGE
    assert message in last(errors)
    assert cloud.calls == []


# --- ssh, logs and delete -------------------------------------------------------------------------


def test_ssh_runs_a_command_on_all_workers_or_opens_a_shell_on_one(cloud, tpu):
    # The workers answer in any order.
    assert sorted(tpu("ssh", "--command=echo $HOME")[1].split()) == [
        str(home) for home in cloud.homes
    ]
    assert tpu("ssh", "--command=echo $HOME", "--worker=1")[1].split() == [str(cloud.homes[1])]
    shell = tpu("ssh", "--dry-run")[1].split()
    assert "--worker=0" in shell
    assert not any(word.startswith("--command") for word in shell)


def test_logs_are_the_last_lines_of_each_worker_with_its_name(cloud, tpu):
    for worker, home in enumerate(cloud.homes):
        (home / "shardset-tpu/train.log").write_text(f"{worker} a\n{worker} b\n")
    lines = tpu("logs")[1].splitlines()
    assert sorted(line.partition(": ")[2] for line in lines) == ["0 a", "0 b", "1 a", "1 b"]
    assert all(line.partition(": ")[0] for line in lines)
    assert len(tpu("logs", "--worker=1")[1].splitlines()) == 2


def test_delete_lists_what_remains(cloud, tpu):
    code, output, _ = tpu("delete")
    assert code == OK
    assert cloud.calls[0][:5] == ["compute", "tpus", "tpu-vm", "delete", "my-tpu"]
    assert output.splitlines() == [
        "what compute tpus tpu-vm list shows", "what compute disks list shows",
    ]  # fmt: skip


def test_a_verb_ends_where_one_command_fails(cloud, tpu):
    (cloud.folder / "fails").write_text("delete")
    code, output, errors = tpu("delete")
    assert (code, output) == (FAILED, "")
    assert "tpu-vm delete" in last(errors)


def test_a_missing_gcloud_is_one_clear_line(tpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code, _, errors = tpu("train", *RUN)
    assert code == FAILED
    assert last(errors).startswith("CloudError: gcloud is not installed")


# --- the documentation ----------------------------------------------------------------------------

START = "shardset tpu "


@pytest.mark.parametrize("line", shown(START))
def test_a_command_of_the_documentation_makes_commands_that_gcloud_knows(line, capsys):
    words = [word for word in shlex.split(line)[1:] if word != "--dry-run"]
    assert command.main([*words, "--dry-run"]) == OK, capsys.readouterr().err
    printed = [shlex.split(text) for text in capsys.readouterr().out.splitlines()]
    of_gcloud = [parsed(words[1:]) for words in printed if words[0] == "gcloud"]
    assert of_gcloud


def test_the_page_shows_every_verb():
    lines = [line for line in commands_of("docs/how-to/tpu.md") if line.startswith(START)]
    verbs = {line.removeprefix(START).split()[0] for line in lines}
    assert verbs == {"create", "setup", "train", "ssh", "logs", "delete"}
