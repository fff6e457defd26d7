"""Runs commands, or only shows them; says in our words why gcloud failed and what to do."""

import itertools
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import IO, Protocol

from trainer.errors import CloudError
from trainer.tpu.commands import Words, shown

_KEPT_LINES = 200

_ABSENT = re.compile(r"NOT_FOUND|was not found|could not be found")

# What gcloud writes, what that means, what to do. The first that fits counts.
_CAUSES: tuple[tuple[str, str, str], ...] = (
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
class Done:
    """A command that has ended; of `errors` the last lines only."""

    words: Words
    code: int
    output: str = ""
    errors: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether it failed because what it names is not there."""
        return self.code != 0 and _ABSENT.search(self.errors) is not None


class Failed(CloudError):
    """A command failed; `done` is what it left."""

    def __init__(self, done: Done) -> None:
        super().__init__(explained(done))
        self.done = done


class Runner(Protocol):
    """What runs commands; `say` tells the user what happened, `head` what the next commands are for."""

    def capture(self, words: Words) -> Done:
        """Runs a command for its output."""
        ...

    def follow(self, words: Words) -> Done:
        """Runs a command whose output is for the user."""
        ...

    def say(self, text: str) -> None: ...
    def head(self, text: str) -> None: ...


class Shell:
    """Runs them here."""

    def capture(self, words: Words) -> Done:
        """See Runner."""
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise _missing(words) from error
        return Done(words=words, code=done.returncode, output=done.stdout, errors=done.stderr)

    def follow(self, words: Words) -> Done:
        """See Runner. Questions of gcloud (for a passphrase, say) reach the user."""
        try:
            process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace")
        except FileNotFoundError as error:
            raise _missing(words) from error
        assert process.stderr is not None
        kept: deque[str] = deque(maxlen=_KEPT_LINES)
        reader = threading.Thread(target=_tee, args=(process.stderr, kept), daemon=True)
        reader.start()
        code = process.wait()
        reader.join()
        return Done(words=words, code=code, errors="".join(kept))

    def say(self, text: str) -> None:
        """See Runner."""
        print(text, flush=True)

    head = say


class DryRun:
    """Prints the commands instead, as a shell takes them; pretends that each one works.

    `is_there` is whether the TPU is there to begin with, so that the commands shown are those of the usual case.
    """

    def __init__(self, *, is_there: bool) -> None:
        self._is_there = is_there

    def capture(self, words: Words) -> Done:
        """See Runner."""
        print(shown(words), flush=True)
        if "describe" not in words:
            return Done(words=words, code=0)
        if not self._is_there:
            return Done(words=words, code=1, errors="NOT_FOUND")
        state = '{"state": "ACTIVE"}' if "queued-resources" in words else '"READY", "networkEndpoints": [{}]'
        return Done(words=words, code=0, output=f'{{"state": {state}}}')

    def follow(self, words: Words) -> Done:
        """See Runner."""
        print(shown(words), flush=True)
        self._is_there = self._is_there or "create" in words
        return Done(words=words, code=0)

    def say(self, text: str) -> None:
        """See Runner: nothing has happened."""

    def head(self, text: str) -> None:
        """See Runner: a comment of the shell."""
        print(f"# {text}", flush=True)


def checked(done: Done) -> Done:
    """The command itself; raises Failed if it failed."""
    if done.code == 0:
        return done
    raise Failed(done)


def explained(done: Done) -> str:
    """Where it failed, why, and what to do."""
    what = " ".join(word for word in done.words[:5] if not word.startswith("-"))
    # gcloud's own word first: what a worker printed is in the same stream.
    own = "".join(line for line in done.errors.splitlines(keepends=True) if line.startswith("ERROR:"))
    for text, (pattern, meaning, advice) in itertools.product((own, done.errors), _CAUSES):
        if found := re.search(pattern, text):
            return f"{what}: {meaning} ({_line(text, found.start())}); {advice}"
    return (
        f"{what}: ended with code {done.code} ({_said(done.errors)}); for all that it says run it yourself: --dry-run "
        "shows the commands"
    )


def _line(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0].strip()[:300]


def _said(errors: str) -> str:
    """The line that tells most: gcloud's own ERROR line, else the last one."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "it said nothing")
    return found[:300]


def _missing(words: Words) -> CloudError:
    if words[0] == "gcloud":
        return CloudError(
            "gcloud is not installed, or not on the PATH; get it from https://cloud.google.com/sdk/docs/install"
        )
    return CloudError(f"{words[0]}: there is no such program; install it, or change the PATH")


def _tee(stream: IO[str], kept: deque[str]) -> None:
    for line in stream:
        kept.append(line)
        sys.stderr.write(line)
        sys.stderr.flush()
