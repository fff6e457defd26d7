import sys

import pytest

from trainer.errors import CloudError
from trainer.tpu.gcloud import CommandResult, DryRunner, ShellRunner, explain_failure, require_success

WORDS = ("gcloud", "compute", "tpus", "tpu-vm", "create", "t")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ERROR: (gcloud.x) You do not currently have an active account selected.", "gcloud auth login"),
        ("ERROR: (gcloud.x) There was a problem refreshing your current auth tokens: invalid_grant", "auth login"),
        ("ERROR: (gcloud.x) The required property [project] is not currently set.", "--project"),
        (  # what describe of gcloud 528 says
            "ERROR: (gcloud.x) Error parsing [tpu].\nThe [tpu] resource is not properly specified.\n"
            "Failed to find attribute [project]. The attribute can be set in the following ways:",
            "gcloud config set project",
        ),
        (
            "ERROR: (gcloud.x) PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before or it is "
            "disabled. Enable it by visiting https://console... reason: SERVICE_DISABLED",
            "gcloud services enable tpu.googleapis.com",
        ),
        (
            "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'projects/p'",
            "roles/tpu.admin",
        ),
        ("ERROR: (gcloud.x) {'code': 8, 'message': 'There is no more capacity in the zone \"z\"'}", "without --direct"),
        (
            "ERROR: (gcloud.x) RESOURCE_EXHAUSTED: Quota limit 'TPUV4PodPerProjectPerZoneForTPUAPI' has been exceeded.",
            "quotas of their own",
        ),
        ('ERROR: (gcloud.x) SSH Key is not present in the SSH agent. Please run "ssh-add k"', "ssh-add ~/.ssh"),
        ('ERROR: (gcloud.x) This TPU has terminal state "PREEMPTED", so it cannot be used anymore.', "created again"),
        ("ssh: connect to host 10.0.0.1 port 22: Connection timed out", "TCP port 22"),
        ("ERROR: (gcloud.x) ALREADY_EXISTS: Resource 't' already exists", "choose another name"),
        ("ERROR: (gcloud.x) INVALID_ARGUMENT: unknown accelerator type", "accelerator-types list"),
    ],
)
def test_a_failure_says_what_it_means_and_what_to_do(said, advice):
    text = explain_failure(CommandResult(command=WORDS, code=1, errors=f"Waiting...\n{said}\nmore text\n"))
    assert advice in text
    assert said.splitlines()[-1][:60] in text
    assert text.startswith("gcloud compute tpus tpu-vm create: ")
    assert "\n" not in text


def test_a_failure_that_nobody_knows_is_told_as_it_is():
    text = explain_failure(CommandResult(command=WORDS, code=7, errors="boom\n"))
    assert "ended with code 7 (boom)" in text
    assert "--dry-run shows" in text
    assert "it printed no error" in explain_failure(CommandResult(command=WORDS, code=7))


def test_what_works_is_no_error():
    result = CommandResult(command=WORDS, code=0, errors="WARNING: quota")
    assert require_success(result) is result
    with pytest.raises(CloudError):
        require_success(CommandResult(command=WORDS, code=1))


def test_only_a_failed_command_can_have_found_nothing():
    assert CommandResult(command=WORDS, code=1, errors="ERROR: NOT_FOUND: Resource 't' was not found").is_absent
    assert not CommandResult(command=WORDS, code=0, errors="NOT_FOUND").is_absent
    assert not CommandResult(command=WORDS, code=1, errors="PERMISSION_DENIED").is_absent


def test_a_shell_gives_output_errors_and_code(capfd):
    command = (sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    captured = ShellRunner().capture(command)
    assert (captured.code, captured.output, captured.errors) == (3, "out\n", "err\n")
    assert capfd.readouterr() == ("", "")
    followed = ShellRunner().follow(command)
    assert (followed.code, followed.output, followed.errors) == (3, "", "err\n")
    assert capfd.readouterr() == ("out\n", "err\n")


def test_of_errors_without_end_the_last_lines_are_kept():
    command = (sys.executable, "-c", "import sys; [print(n, file=sys.stderr) for n in range(1000)]")
    assert ShellRunner().follow(command).errors.splitlines()[-1] == "999"
    assert len(ShellRunner().follow(command).errors.splitlines()) == 200


@pytest.mark.parametrize("way", ["capture", "follow"])
def test_a_missing_gcloud_is_said_to_be_missing(way, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CloudError, match="gcloud is not installed"):
        getattr(ShellRunner(), way)(("gcloud", "version"))
    with pytest.raises(CloudError, match="no such program"):
        getattr(ShellRunner(), way)(("no-such-program",))


def test_a_dry_run_runs_nothing(capsys, tmp_path):
    runner = DryRunner(exists=True)
    file = tmp_path / "made"
    runner.follow((sys.executable, "-c", f"open({str(file)!r}, 'w')"))
    runner.capture(("touch", str(file)))
    runner.log("it was made")
    assert not file.exists()
    assert "it was made" not in capsys.readouterr().out


def test_what_gcloud_says_counts_more_than_what_a_worker_printed():
    errors = "worker 2: disk quota exceeded\nERROR: (gcloud.x) PERMISSION_DENIED: no\n"
    assert "roles/tpu.admin" in explain_failure(CommandResult(command=WORDS, code=1, errors=errors))
