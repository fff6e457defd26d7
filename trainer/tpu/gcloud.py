"""Runs or prints commands, and explains why gcloud failed and what to do."""

import itertools
import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO, Protocol

from trainer.errors import CloudError
from trainer.tpu.commands import Command

_TAIL_LINES = 200

_ABSENT = re.compile(r"NOT_FOUND|was not found|could not be found")

# A pattern in the output of gcloud, its meaning, and what to do. The first match counts.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"currently have an active account|problem refreshing|[Rr]eauthentication|invalid_grant",
        "you are not logged in",
        "run `gcloud auth login`",
    ),
    (
        r"The required property \[project\]|project.*is not set|Failed to find attribute \[project\]",
        "no project is chosen",
        "give --project, or run `gcloud config set project PROJECT`",
    ),
    (
        r"SERVICE_DISABLED|has not been used in project|it is disabled",
        "an API is not enabled in this project",
        "run `gcloud services enable tpu.googleapis.com compute.googleapis.com`, wait a minute, then try again",
    ),
    (
        r"PERMISSION_DENIED|does not have permission|[Pp]ermission '",
        "you may not do this in this project",
        "ask its owner for the role roles/tpu.admin, and roles/iam.serviceAccountUser on the TPU's service account",
    ),
    (
        r"[Nn]o more capacity|not enough resources|resources? (is|are) not available|stockout|currently unavailable",
        "the zone has no free TPUs of this type now",
        "create it without --direct, so that the request waits in the queue, or try another zone",
    ),
    (
        r"[Qq]uota",
        "the quota of this project does not suffice",
        "spot, on-demand and each TPU generation have quotas of their own: use the kind you have, or ask for more "
        "at https://console.cloud.google.com/iam-admin/quotas",
    ),
    (
        r"ssh-add|SSH agent|ssh-agent",
        "the SSH key is not in your SSH agent, which several workers need",
        'run `eval "$(ssh-agent)"` and `ssh-add ~/.ssh/google_compute_engine` (`gcloud compute config-ssh` makes the '
        "key), then try again",
    ),
    (
        r"terminal state|has state \"|maintenance event",
        "the TPU is not in a state to be used",
        "see `python -m trainer tpu create`, which says what state it is in; a preempted one has to be deleted and "
        "created again",
    ),
    (
        r"ssh: connect|[Cc]onnection (timed out|refused|closed|reset)|return code \[255\]|exit status 255|port 22",
        "a worker can't be reached by ssh",
        "see that the network allows TCP port 22 to it (with --internal-ip: from this machine), and whether it was "
        "preempted: `python -m trainer tpu create` says in which state it is",
    ),
    (
        r"ALREADY_EXISTS|already exists",
        "something of that name is there already",
        "choose another name, or delete it with `python -m trainer tpu delete`",
    ),
    (
        r"INVALID_ARGUMENT|[Ii]nvalid (value|choice|zone)|Unknown zone|unrecognized arguments",
        "gcloud takes no such value",
        "see what the zone offers: `gcloud compute tpus tpu-vm accelerator-types list --zone=ZONE` and "
        "`gcloud compute tpus tpu-vm versions list --zone=ZONE`; an old gcloud needs `gcloud components update`",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """A command that has ended. `errors` holds its last lines only."""

    command: Command
    code: int
    output: str = ""
    errors: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether it failed because the resource does not exist."""
        return self.code != 0 and _ABSENT.search(self.errors) is not None


class CommandFailed(CloudError):
    """A command failed. `result` holds its exit code and its last lines."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(explain_failure(result))
        self.result = result


class Runner(Protocol):
    """Runs commands. `log` tells the user what happened, `comment` the purpose of the next commands."""

    def capture(self, command: Command) -> CommandResult:
        """Runs a command and returns its output."""
        ...

    def follow(self, command: Command) -> CommandResult:
        """Runs a command and shows its output to the user."""
        ...

    def log(self, text: str) -> None: ...
    def comment(self, text: str) -> None: ...


class ShellRunner:
    """Runs commands on this machine."""

    def capture(self, command: Command) -> CommandResult:
        try:
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise _missing(command) from error
        return CommandResult(command=command, code=result.returncode, output=result.stdout, errors=result.stderr)

    def follow(self, command: Command) -> CommandResult:
        # Keeps the terminal as stdin: gcloud can ask the user questions, such as for a passphrase.
        try:
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        except FileNotFoundError as error:
            raise _missing(command) from error
        assert process.stderr is not None
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        reader = threading.Thread(target=_copy_lines, args=(process.stderr, tail), daemon=True)
        reader.start()
        code = process.wait()
        reader.join()
        return CommandResult(command=command, code=code, errors="".join(tail))

    def log(self, text: str) -> None:
        print(text, flush=True)

    comment = log


class DryRunner:
    """Prints commands in shell syntax instead of running them, and pretends that they succeed.

    `exists` says whether the TPU exists at first, so that the printed commands are those of the usual case.
    """

    def __init__(self, *, exists: bool) -> None:
        self._exists = exists

    def capture(self, command: Command) -> CommandResult:
        print(shlex.join(command), flush=True)
        if "describe" not in command:
            return CommandResult(command=command, code=0)
        if not self._exists:
            return CommandResult(command=command, code=1, errors="NOT_FOUND")
        state = '{"state": "ACTIVE"}' if "queued-resources" in command else '"READY", "networkEndpoints": [{}]'
        return CommandResult(command=command, code=0, output=f'{{"state": {state}}}')

    def follow(self, command: Command) -> CommandResult:
        print(shlex.join(command), flush=True)
        self._exists = self._exists or "create" in command
        return CommandResult(command=command, code=0)

    def log(self, text: str) -> None:
        """Prints nothing, because nothing happened."""

    def comment(self, text: str) -> None:
        print(f"# {text}", flush=True)


def require_success(result: CommandResult) -> CommandResult:
    """The result itself. Raises CommandFailed if the command failed."""
    if result.code == 0:
        return result
    raise CommandFailed(result)


def explain_failure(result: CommandResult) -> str:
    """Which command failed, why, and what to do."""
    name = " ".join(word for word in result.command[:5] if not word.startswith("-"))
    # gcloud's own error lines first: the same stream holds what the workers printed.
    own_errors = "".join(line for line in result.errors.splitlines(keepends=True) if line.startswith("ERROR:"))
    for text, (pattern, meaning, advice) in itertools.product((own_errors, result.errors), _FAILURES):
        if match := re.search(pattern, text):
            return f"{name}: {meaning} ({_line(text, match.start())}); {advice}"
    return (
        f"{name}: ended with code {result.code} ({_telling_line(result.errors)}); to see all its output, run it by "
        "hand: --dry-run shows the commands"
    )


def _line(text: str, position: int) -> str:
    return text[text.rfind("\n", 0, position) + 1 :].partition("\n")[0].strip()[:300]


def _telling_line(errors: str) -> str:
    """gcloud's own ERROR line, else the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else "it printed no error"
    return next((line for line in lines if line.startswith("ERROR:")), last)[:300]


def _missing(command: Command) -> CloudError:
    if command[0] == "gcloud":
        return CloudError(
            "gcloud is not installed, or not on the PATH; get it from https://cloud.google.com/sdk/docs/install"
        )
    return CloudError(f"{command[0]}: no such program; install it, or change the PATH")


def _copy_lines(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        tail.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()
