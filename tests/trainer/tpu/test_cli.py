"""The verbs against the stand-in for gcloud: what they call, what they say, and what they do when things go wrong."""

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
from tests.makers.cloud import Cloud, wheel
from trainer import cli as command
from trainer.tpu.cli import merged_lines

PLACE = ["my-tpu", "--zone=us-central2-b", "--poll-seconds=0"]
RUN = ["--fake-data", "--run-dir=gs://bucket/run"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    (tmp_path / "cloud").mkdir()
    made = Cloud(tmp_path / "cloud")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def tpu(cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb on `my-tpu`; returns its exit code, output and errors."""

    def run(verb: str, *words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        return command.main(["tpu", verb, *PLACE, *words]), *capfd.readouterr()

    return run


def last(errors: str) -> str:
    return errors.strip().splitlines()[-1]


# --- create ----------------------------------------------------------------------------------------------------------


def test_create_asks_once_and_waits_until_it_is_ready(cloud, tpu):
    code, output, _ = tpu("create", "--accelerator-type=v4-32", "--spot", "--valid-for=6h")
    assert code == OK
    assert "my-tpu is READY, 4 workers" in output
    assert "WAITING_FOR_RESOURCES" in output
    assert "PROVISIONING" in output
    (call,) = [call for call in cloud.calls if "create" in call]
    assert call[:3] == ["compute", "tpus", "queued-resources"]
    assert {"--spot", "--valid-until-duration=6h", "--node-id=my-tpu"} <= set(call)


def test_create_directly_makes_a_tpu_vm_and_no_request(cloud, tpu):
    assert tpu("create", "--accelerator-type=v4-8", "--direct")[0] == OK
    assert cloud.asked("tpu-vm create") == 1
    assert cloud.asked("queued-resources create") == 0


@pytest.mark.parametrize("request_", ["ACTIVE", None])
def test_create_of_a_ready_one_does_nothing_and_says_so(cloud, tpu, request_):
    cloud.has("my-tpu", "v4-32", request=request_)
    code, output, _ = tpu("create", "--accelerator-type=v4-32")
    assert code == OK
    assert "READY already: nothing to do" in output
    assert cloud.asked(" create ") == 0


def test_create_goes_on_waiting_for_what_was_asked_for_before(cloud, tpu):
    cloud.has("my-tpu", "v4-32", node=None, request="WAITING_FOR_RESOURCES")
    state = json.loads((cloud.folder / "state.json").read_text())
    del state["requests"]["my-tpu"]["state"]
    state["requests"]["my-tpu"]["looks"] = 0
    (cloud.folder / "state.json").write_text(json.dumps(state))
    assert tpu("create", "--accelerator-type=v4-32")[0] == OK
    assert cloud.asked(" create ") == 0


@pytest.mark.parametrize(
    ("node", "request_", "advice"),
    [
        ("PREEMPTED", "SUSPENDED", "tpu delete"),
        (None, "FAILED", "the request expired"),
        ("STOPPED", None, "tpu-vm start my-tpu --zone=us-central2-b"),
    ],
)
def test_create_of_one_that_can_not_be_used_says_what_to_do(cloud, tpu, node, request_, advice):
    cloud.has("my-tpu", "v4-32", node=node, request=request_)
    code, _, errors = tpu("create", "--accelerator-type=v4-32")
    assert code == FAILED
    assert advice in errors
    assert cloud.asked(" create ") == 0


def test_create_refuses_another_type_under_a_name_that_is_taken(cloud, tpu):
    cloud.has("my-tpu", "v4-8")
    code, _, errors = tpu("create", "--accelerator-type=v4-32")
    assert code == USAGE
    assert "is there as v4-8" in errors


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        ("ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota limit 'TPUV4' has been exceeded", "iam-admin/quotas"),
        ("ERROR: (gcloud.x) There is no more capacity in the zone", "another zone"),
        ("ERROR: (gcloud.x) PERMISSION_DENIED: Cloud TPU API has not been used in project 1", "gcloud services enable"),
        ("ERROR: (gcloud.x) You do not currently have an active account selected.", "gcloud auth login"),
    ],
)
def test_a_creation_that_is_refused_is_one_line_with_what_to_do(cloud, tpu, says, advice):
    cloud.fail({"on": " create ", "says": says})
    code, _, errors = tpu("create", "--accelerator-type=v4-32")
    assert code == FAILED
    assert advice in last(errors)


def test_not_being_logged_in_is_found_before_anything_is_asked_for(cloud, tpu):
    cloud.fail({"on": "describe", "says": "ERROR: (gcloud.x) You do not currently have an active account selected."})
    code, _, errors = tpu("create", "--accelerator-type=v4-32")
    assert code == FAILED
    assert "gcloud auth login" in last(errors)
    assert cloud.asked(" create ") == 0


@pytest.mark.parametrize("verb", ["setup", "stop", "delete", "logs", "train", "create"])
def test_a_missing_gcloud_is_one_clear_line(cloud, tpu, verb, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    more = {"train": RUN, "create": ["--accelerator-type=v4-8"], "setup": [f"--wheel={wheel(tmp_path)}"]}
    code, _, errors = tpu(verb, *more.get(verb, []))
    assert code == FAILED
    assert last(errors).startswith("CloudError: gcloud is not installed")


# --- setup and doctor ------------------------------------------------------------------------------------------------


def test_setup_copies_and_installs_the_wheel_on_every_worker(cloud, tpu, tmp_path):
    cloud.has("my-tpu", "v4-32")
    homes = [cloud.home("my-tpu", worker) for worker in range(4)]
    for _ in range(2):  # again is no error
        assert tpu("setup", f"--wheel={wheel(tmp_path)}")[0] == OK
    for home in homes:
        assert (home / "installed").read_text().strip().endswith(".whl[trainer,tpu]")
        assert (home / "shardset-tpu/env/bin/python").exists()


@pytest.mark.parametrize(("backend", "extras"), [("torchtpu", "[trainer,torchtpu]"), ("xla", "[trainer,tpu]")])
def test_setup_installs_the_back_end_that_is_asked_for_and_removes_the_other(cloud, tpu, tmp_path, backend, extras):
    cloud.has("my-tpu", "v4-8")
    home = cloud.home("my-tpu", 0)
    assert tpu("setup", f"--wheel={wheel(tmp_path)}", f"--backend={backend}")[0] == OK
    assert (home / "installed").read_text().strip().endswith(f".whl{extras}")
    assert cloud.asked("--exact") == 1


def test_setup_fails_where_one_worker_fails(cloud, tpu, tmp_path):
    cloud.has("my-tpu", "v4-32")
    homes = [cloud.home("my-tpu", worker) for worker in range(4)]
    (homes[2] / ".local/bin/uv").write_text("#!/bin/sh\necho 'no network' >&2\nexit 9\n")
    code, _, errors = tpu("setup", f"--wheel={wheel(tmp_path)}")
    assert code == FAILED
    assert "worker 2 failed with exit status 9" in errors
    assert "ended with code 9" in last(errors)


@pytest.mark.parametrize("node", [None, "PREEMPTED"])
def test_setup_needs_a_tpu_that_is_ready(cloud, tpu, tmp_path, node):
    if node:
        cloud.has("my-tpu", "v4-32", node=node, request="SUSPENDED")
    code, _, errors = tpu("setup", f"--wheel={wheel(tmp_path)}")
    assert code == FAILED
    assert "tpu create" in errors or "tpu delete" in errors
    assert cloud.asked("scp") == 0


@pytest.mark.parametrize("path", ["nothing.whl", "setup.py"])
def test_something_else_than_a_wheel_is_refused(cloud, tpu, path):
    Path("setup.py").write_text("")
    assert tpu("setup", f"--wheel={path}")[0] == USAGE
    assert cloud.calls == []


def test_doctor_runs_on_all_workers_with_the_flags_of_a_training(cloud, tpu):
    homes = cloud.ready("my-tpu", "v4-32", 4)
    words = ["--recipe=imagenet_resnet50", "--set", "seed=3", "--want-images-per-second", "9000"]
    assert tpu("doctor", *words)[0] == OK
    for home in homes:
        expected = "PJRT_DEVICE=TPU -m trainer doctor --recipe=imagenet_resnet50 --set=seed=3 "
        expected += "--want-images-per-second=9000"
        assert (home / "ran").read_text().strip() == expected


def test_doctor_fails_where_a_check_failed_on_a_worker(cloud, tpu):
    homes = cloud.ready("my-tpu", "v4-32", 4)
    (homes[3] / "code").write_text("1")
    code, _, errors = tpu("doctor")
    assert code == FAILED
    assert "a worker failed a check" in last(errors)


# --- train -----------------------------------------------------------------------------------------------------------


def test_train_hands_the_flags_of_the_trainer_to_every_worker(cloud, tpu):
    homes = cloud.ready("my-tpu", "v4-32", 4)
    flags = ["--recipe=cifar10_resnet18", "--manifest=gs://bucket/it's", "--run-dir=gs://bucket/run", "--epochs=3"]
    assert tpu("train", *flags, "--env", "A=b c")[0] == OK
    expected = f"PJRT_DEVICE=TPU -m trainer.tpu.worker train {' '.join(flags)}"
    assert [(home / "ran").read_text().strip() for home in homes] == [expected] * 4
    assert cloud.asked(" create ") == 0


def test_train_again_after_a_preemption_in_the_middle(cloud, tpu, tmp_path):
    cloud.ready("my-tpu", "v4-32", 4)
    cloud.fail({"on": "worker train", "preempt": True, "code": 255, "says": "Connection to 10.0.0.1 closed"})
    flags = ["--accelerator-type=v4-32", "--spot", f"--wheel={wheel(tmp_path)}", "--max-restarts=1"]
    code, output, _ = tpu("train", *RUN, *flags)
    assert code == OK
    assert "interrupted (255, TPU VM PREEMPTED, queued request SUSPENDED); 1 restarts left" in output
    verbs = [call[3] for call in cloud.calls if call[3] not in ("describe",)]
    assert verbs == ["ssh", "delete", "create", "scp", "ssh", "ssh"]


def test_a_preemption_during_the_setup_counts_as_one_too(cloud, tpu, tmp_path):
    cloud.fail({"on": "scp", "preempt": True, "code": 255, "says": "Connection closed"})
    cloud.home("my-tpu", 0)
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=1"]
    assert tpu("train", *RUN, *flags)[0] == OK
    assert cloud.asked(" create ") == 2


def test_a_preemption_while_it_is_waited_for_counts_as_one_too(cloud, tpu, tmp_path):
    look = {"on": "queued-resources describe", "goes_on": True}
    cloud.fail(look, look, look, {**look, "preempt": True})
    cloud.home("my-tpu", 0)
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=1"]
    code, output, errors = tpu("train", *RUN, *flags)
    assert code == OK, errors
    assert "queued request SUSPENDED); 1 restarts left" in output
    assert cloud.asked(" create ") == 2


def test_a_request_that_expires_is_not_asked_for_again_and_again(cloud, tpu, tmp_path):
    look = {"on": "queued-resources describe", "goes_on": True}
    cloud.fail(look, look, {**look, "expire": True})
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=5"]
    code, _, errors = tpu("train", *RUN, *flags)
    assert code == FAILED
    assert "the request expired" in last(errors)
    assert cloud.asked(" create ") == 1


def test_exit_code_3_of_a_tpu_that_stays_trains_again_on_it(cloud, tpu, tmp_path):
    cloud.ready("my-tpu", "v4-8", 1)
    cloud.fail({"on": "worker train", "code": 3, "says": ""})
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=1"]
    assert tpu("train", *RUN, *flags)[0] == OK
    assert cloud.asked(" create ") == 0
    assert cloud.asked("worker train") == 2


def test_restarts_are_bounded(cloud, tpu, tmp_path):
    cloud.ready("my-tpu", "v4-8", 1)
    cloud.fail(*[{"on": "worker train", "preempt": True, "code": 255}] * 9)
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=2"]
    code, _, errors = tpu("train", *RUN, *flags)
    assert code == FAILED
    assert "no restarts are left" in last(errors)
    assert cloud.asked("worker train") == 3


def test_a_training_that_saved_and_may_not_restart_ends_with_code_3(cloud, tpu):
    (home,) = cloud.ready("my-tpu", "v4-8", 1)
    (home / "code").write_text("3")
    code, _, errors = tpu("train", *RUN)
    assert code == PREEMPTED
    assert "the same command goes on" in last(errors)


def test_a_training_that_tpu_stop_ended_is_not_started_again(cloud, tpu, tmp_path):
    (home,) = cloud.ready("my-tpu", "v4-8", 1)
    (home / "code").write_text("4")
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=5"]
    assert tpu("train", *RUN, *flags)[0] == PREEMPTED
    assert cloud.asked("worker train") == 1


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ({"code": 1, "says": "ConfigError: no such thing"}, "ended with code 1"),
        ({"code": 255, "says": "ssh: connect to host 10.0.0.2 port 22: Connection timed out"}, "TCP port 22"),
        ({"code": 127, "says": "bash: python: No such file"}, "tpu setup"),
        ({"code": 1, "says": 'ERROR: (gcloud.x) SSH Key is not present in the SSH agent. Run "ssh-add"'}, "ssh-add"),
    ],
)
def test_a_training_that_failed_is_not_tried_again(cloud, tpu, tmp_path, failure, advice):
    cloud.ready("my-tpu", "v4-32", 4)
    cloud.fail({"on": "worker train", **failure})
    flags = ["--accelerator-type=v4-32", f"--wheel={wheel(tmp_path)}", "--max-restarts=5"]
    code, _, errors = tpu("train", *RUN, *flags)
    assert code == FAILED
    assert advice in last(errors)
    assert cloud.asked("worker train") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*RUN, "--max-restarts=1"], "--accelerator-type"),
        (["--fake-data"], "--run-dir run: expected gs://"),
        (["--run-dir=gs://bucket/run", "--manifest=/data"], "--manifest /data: expected gs://"),
        ([*RUN, "--resume=runs/old"], "--resume runs/old: expected gs://"),
        ([*RUN, "--recipe=imagenet"], "did you mean"),
        ([*RUN, "--set=epoch=1"], "did you mean 'epochs'"),
        ([*RUN, "--env=XLA_USE_BF16=1"], "--precision bf16"),
        ([*RUN, "--zone=us-central2"], "that is a region"),
    ],
)
def test_wrong_usage_is_found_before_gcloud_is_called(cloud, tpu, words, message):
    code, _, errors = tpu("train", *words)
    assert code == USAGE
    assert message in last(errors)
    assert cloud.calls == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", *PLACE, *RUN, "--max-restarts=-1"],
        ["train", *PLACE, *RUN, "--max-restart=1"],
        ["create", "my-tpu", "--accelerator-type=v4-8"],
        ["create", *PLACE],
        ["create", *PLACE, "--accelerator-type=v4-8", "--poll-seconds=-1"],
        ["create", *PLACE, "--accelerator-type=v4-8", "--poll-seconds=nan"],
        ["destroy", *PLACE],
        [],
    ],
)
def test_unknown_flags_and_missing_ones_are_usage_errors(cloud, words):
    with pytest.raises(SystemExit) as exit_code:
        command.main(["tpu", *words])
    assert exit_code.value.code == USAGE
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("verb", "words", "left"),
    [
        ("create", ["--accelerator-type=v4-8", "--poll-seconds=60"], "`tpu delete` withdraws it"),
        ("train", RUN, "the same command joins it, `tpu stop` ends it"),
    ],
)
def test_ctrl_c_says_what_is_left_behind(cloud, verb, words, left):
    if verb == "train":
        (home,) = cloud.ready("my-tpu", "v4-8", 1)
        (home / "shardset-tpu/env/bin/python").write_text('#!/bin/sh\ntouch "$HOME/ran"; exec sleep 600\n')
    program = subprocess.Popen(
        [sys.executable, "-m", "trainer", "tpu", verb, *PLACE, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while program.poll() is None:
        if list(cloud.folder.glob("my-tpu/0/ran")) or cloud.asked("describe") == 4:
            break
        time.sleep(0.02)
    time.sleep(0.2)
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, errors = program.communicate(timeout=600)
    assert program.returncode == FAILED, errors
    assert last(errors).startswith("CloudError: interrupted; ")
    assert left in last(errors)


# --- logs, stop, delete ----------------------------------------------------------------------------------------------


def test_logs_of_all_workers_are_merged_by_time_and_copied_to_the_bucket(cloud, tpu):
    homes = cloud.ready("my-tpu", "v4-32", 4)
    for worker, home in enumerate(homes):
        stamps = (f"2026-11-21T10:00:0{second}+00:00" for second in (worker, worker + 5))
        (home / "shardset-tpu/train.log").write_text("".join(f"{stamp} step\n  more\n" for stamp in stamps))
    assert tpu("logs", "--run-dir=gs://bucket/run/")[0] == OK
    merged = Path("tpu-logs/merged.log").read_text().splitlines()
    assert [line.split()[1] for line in merged] == [f"worker-{n}" for n in (0, 0, 1, 1, 2, 2, 3, 3) * 2]
    assert merged[1] == "2026-11-21T10:00:00+00:00 worker-0   more"
    (copy,) = [call for call in cloud.calls if call[:2] == ["storage", "cp"]]
    assert copy[-1] == "gs://bucket/run/tpu-logs/"
    assert len(copy) == 2 + 5 + 1


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("gs://bucket/logs", "--to gs://bucket/logs: expected a local folder"),
        ("~/logs", "~ is not your home folder here"),
    ],
)
def test_logs_are_not_fetched_to_an_address(cloud, tpu, to, message):
    code, _, errors = tpu("logs", f"--to={to}")
    assert code == USAGE
    assert message in last(errors)
    assert not cloud.calls


def test_a_colon_in_the_folder_of_logs_is_no_machine_for_scp(cloud, tpu):
    cloud.ready("my-tpu", "v4-8", 1)
    tpu("logs", "--to=at-12:30")
    (copy,) = [call for call in cloud.calls if "scp" in call]
    assert copy[copy.index("scp") + 2] == f"{Path.cwd()}/at-12:30/0.log"


def test_logs_of_a_worker_that_never_trained_are_an_error(cloud, tpu):
    cloud.ready("my-tpu", "v4-8", 1)
    code, _, errors = tpu("logs")
    assert code == FAILED
    assert "No such file" in last(errors)


def test_lines_before_the_first_time_stay_first(tmp_path):
    (tmp_path / "0.log").write_text("Traceback\n2026-11-21T10:00:00+00:00 a\n")
    (tmp_path / "1.log").write_text("")
    assert list(merged_lines([tmp_path / "0.log", tmp_path / "1.log"])) == [
        " worker-0 Traceback",
        "2026-11-21T10:00:00+00:00 worker-0 a",
    ]


def test_stop_asks_every_worker_and_says_that_the_tpu_stays(cloud, tpu):
    homes = cloud.ready("my-tpu", "v4-32", 4)
    code, output, _ = tpu("stop")
    assert code == OK
    assert "costs money" in output
    assert all((home / "ran").read_text().strip().endswith("trainer.tpu.worker stop") for home in homes)


@pytest.mark.parametrize(("request_", "verb"), [("ACTIVE", "queued-resources delete"), (None, "tpu-vm delete")])
def test_delete_leaves_nothing_of_that_name_and_lists_the_rest(cloud, tpu, request_, verb):
    cloud.has("my-tpu", "v4-32", request=request_)
    state = json.loads((cloud.folder / "state.json").read_text())
    state["nodes"]["other"] = {"state": "READY", "type": "v4-8"}
    (cloud.folder / "state.json").write_text(json.dumps(state))
    code, output, _ = tpu("delete", "--run-dir=gs://bucket/run")
    assert code == OK
    assert cloud.asked(verb) == 1
    assert "other  us-central2-b  v4-8" in output
    assert "1234567  gs://bucket/run" in output
    assert "disks in this zone:\nnone" in output
    assert json.loads((cloud.folder / "state.json").read_text()) == {
        "nodes": {"other": {"state": "READY", "type": "v4-8"}},
        "requests": {},
    }


def test_delete_of_nothing_says_so_and_still_lists_what_remains(cloud, tpu):
    code, output, _ = tpu("delete")
    assert code == OK
    assert "not there: nothing to delete" in output
    assert cloud.asked("delete") == 0
    assert cloud.asked("disks list") == 1


def test_delete_of_one_that_went_by_itself_meanwhile_is_no_error(cloud, tpu):
    cloud.has("my-tpu", "v4-8")
    cloud.fail({"on": "queued-resources delete", "says": "ERROR: (gcloud.x) NOT_FOUND: it was not found"})
    assert tpu("delete")[0] == OK


def test_a_list_that_can_not_be_had_is_said_to_be_unknown_and_the_others_are_shown(cloud, tpu):
    cloud.has("my-tpu", "v4-8")
    cloud.fail({"on": "disks list", "says": "ERROR: (gcloud.x) PERMISSION_DENIED: compute API ... it is disabled"})
    code, output, errors = tpu("delete", "--run-dir=gs://bucket/run")
    assert code == FAILED
    assert "disks in this zone:\nunknown: gcloud compute disks list" in output
    assert "1234567  gs://bucket/run" in output
    assert "not known what remains of: disks" in last(errors)


def test_delete_that_is_refused_says_so(cloud, tpu):
    cloud.has("my-tpu", "v4-8")
    cloud.fail({"on": "queued-resources delete", "says": "ERROR: (gcloud.x) PERMISSION_DENIED: no"})
    code, _, errors = tpu("delete")
    assert code == FAILED
    assert "roles/tpu.admin" in last(errors)


# --- dry runs --------------------------------------------------------------------------------------------------------


def commands_in(output: str) -> list[list[str]]:
    lines = [shlex.split(line) for line in output.splitlines() if not line.startswith("#")]
    return [line[1:] for line in lines if line[0] == "gcloud"]


@pytest.mark.parametrize(
    ("verb", "words", "is_there"),
    [
        ("create", ["--accelerator-type=v4-8", "--direct"], False),
        ("setup", ["--wheel=WHEEL"], True),
        ("doctor", [], True),
        ("train", RUN, True),
        ("stop", [], True),
        ("delete", ["--run-dir=gs://bucket/run"], True),
        ("logs", ["--run-dir=gs://bucket/run"], True),
    ],
)
def test_a_dry_run_shows_the_commands_that_a_run_calls_and_calls_none(cloud, tpu, tmp_path, verb, words, is_there):
    words = [word.replace("WHEEL", str(wheel(tmp_path))) for word in words]
    if is_there:
        (home,) = cloud.ready("my-tpu", "v4-8", 1)
        (home / "shardset-tpu/train.log").write_text("")
    code, output, _ = tpu(verb, *words, "--dry-run")
    assert code == OK
    assert cloud.calls == []
    assert tpu(verb, *words)[0] == OK
    real = [call for call in cloud.calls if call[3] != "describe"]
    assert [call for call in commands_in(output) if call[3] != "describe"] == real


def test_a_dry_run_of_a_training_that_may_restart_shows_how_it_restarts(cloud, tpu, tmp_path):
    flags = ["--accelerator-type=v4-8", f"--wheel={wheel(tmp_path)}", "--max-restarts=3", "--dry-run"]
    code, output, _ = tpu("train", *RUN, *flags)
    assert code == OK
    assert "# if my-tpu is absent, or preempted and deleted (at most 3 times):" in output
    assert [call[3] for call in commands_in(output) if call[3] != "describe"] == [
        "delete", "create", "scp", "ssh", "ssh",
    ]  # fmt: skip
    assert cloud.calls == []


def test_a_dry_run_needs_no_gcloud(cloud, tpu, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "gcloud" not in os.listdir(tmp_path)
    assert tpu("create", "--accelerator-type=v4-8", "--dry-run")[0] == OK
