import sys

import pytest

from trainer.errors import CloudError
from trainer.tpu.gcloud import Done, DryRun, Shell, checked, explained

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
    text = explained(Done(words=WORDS, code=1, errors=f"Waiting...\n{said}\nmore text\n"))
    assert advice in text
    assert said.splitlines()[-1][:60] in text
    assert text.startswith("gcloud compute tpus tpu-vm create: ")
    assert "\n" not in text


def test_a_failure_that_nobody_knows_is_told_as_it_is():
    text = explained(Done(words=WORDS, code=7, errors="boom\n"))
    assert "ended with code 7 (boom)" in text
    assert "--dry-run shows" in text
    assert "it said nothing" in explained(Done(words=WORDS, code=7))


def test_what_works_is_no_error():
    done = Done(words=WORDS, code=0, errors="WARNING: quota")
    assert checked(done) is done
    with pytest.raises(CloudError):
        checked(Done(words=WORDS, code=1))


def test_only_a_failed_command_can_have_found_nothing():
    assert Done(words=WORDS, code=1, errors="ERROR: NOT_FOUND: Resource 't' was not found").is_absent
    assert not Done(words=WORDS, code=0, errors="NOT_FOUND").is_absent
    assert not Done(words=WORDS, code=1, errors="PERMISSION_DENIED").is_absent


def test_a_shell_gives_output_errors_and_code(capfd):
    words = (sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    captured = Shell().capture(words)
    assert (captured.code, captured.output, captured.errors) == (3, "out\n", "err\n")
    assert capfd.readouterr() == ("", "")
    followed = Shell().follow(words)
    assert (followed.code, followed.output, followed.errors) == (3, "", "err\n")
    assert capfd.readouterr() == ("out\n", "err\n")


def test_of_errors_without_end_the_last_lines_are_kept():
    words = (sys.executable, "-c", "import sys; [print(n, file=sys.stderr) for n in range(1000)]")
    assert Shell().follow(words).errors.splitlines()[-1] == "999"
    assert len(Shell().follow(words).errors.splitlines()) == 200


@pytest.mark.parametrize("way", ["capture", "follow"])
def test_a_missing_gcloud_is_said_to_be_missing(way, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CloudError, match="gcloud is not installed"):
        getattr(Shell(), way)(("gcloud", "version"))
    with pytest.raises(CloudError, match="no such program"):
        getattr(Shell(), way)(("no-such-program",))


def test_a_dry_run_runs_nothing(capsys, tmp_path):
    runner = DryRun(is_there=True)
    file = tmp_path / "made"
    runner.follow((sys.executable, "-c", f"open({str(file)!r}, 'w')"))
    runner.capture(("touch", str(file)))
    runner.say("it was made")
    assert not file.exists()
    assert "it was made" not in capsys.readouterr().out


def test_what_gcloud_says_counts_more_than_what_a_worker_printed():
    errors = "worker 2: disk quota exceeded\nERROR: (gcloud.x) PERMISSION_DENIED: no\n"
    assert "roles/tpu.admin" in explained(Done(words=WORDS, code=1, errors=errors))
