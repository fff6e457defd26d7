"""Stands in for gcloud: refuses what gcloud's reference does not document, and runs what is sent by
ssh in bash.

It is run as a program named gcloud on the PATH. The folder that $FAKE_GCLOUD names has
`calls.jsonl` (every call), `fails` (a regular expression: such calls end with code 1) and the home
folders of the workers, `0`, `1` ...
"""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

WIDE_VALUES = (
    "project format account billing-project configuration verbosity impersonate-service-account"
)


@dataclass(frozen=True)
class Command:
    """What the reference says of one command: flags with a value, flags without, required ones,
    positionals.
    """

    values: str = ""
    switches: str = ""
    required: str = ""
    positionals: tuple[int, int] = (1, 1)


_CREATE = (
    "accelerator-type data-disk description labels metadata metadata-from-file network queue-count"
    " range scopes service-account subnetwork tags topology type version zone"
)
_SSH = "ssh-key-expiration ssh-key-expire-after ssh-key-file strict-host-key-checking worker zone"
_SSH_SWITCHES = "dry-run force-key-file-overwrite internal-ip plain"
_LIST = "filter limit page-size sort-by"

# https://cloud.google.com/sdk/gcloud/reference, Google Cloud SDK 528.
REFERENCE = {
    "compute tpus tpu-vm create": Command(
        _CREATE,
        "async internal-ips reserved shielded-secure-boot spot preemptible",
        "zone version accelerator-type",
    ),
    "compute tpus tpu-vm delete": Command("zone", "async", "zone quiet"),
    "compute tpus tpu-vm list": Command(f"{_LIST} zone", "uri", "zone", (0, 0)),
    "compute tpus tpu-vm ssh": Command(
        f"{_SSH} command output-directory ssh-flag", _SSH_SWITCHES, "zone worker"
    ),
    "compute tpus tpu-vm scp": Command(
        f"{_SSH} scp-flag", f"{_SSH_SWITCHES} compress recurse", "zone", (2, 99)
    ),
    "compute disks list": Command(f"{_LIST} regexp regions zones", "uri", "zones", (0, 99)),
    "storage du": Command(
        "additional-headers", "all-versions readable-sizes summarize total", "", (1, 99)
    ),
}


class Refused(Exception):
    """gcloud ends with a code and says why."""


def main(words: list[str]) -> int:
    """One call; returns its exit code."""
    folder = Path(os.environ["FAKE_GCLOUD"])
    with (folder / "calls.jsonl").open("a") as log:
        log.write(json.dumps(words) + "\n")
    try:
        name, positionals, flags = parsed(words)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    if (folder / "fails").exists() and re.search((folder / "fails").read_text(), " ".join(words)):
        print("ERROR: (gcloud) as the test wants it", file=sys.stderr)
        return 1
    homes = sorted(folder.glob("[0-9]"))
    if name.endswith("ssh"):
        with ThreadPoolExecutor(len(homes)) as pool:
            chosen = [home for home in homes if flags["worker"] in ("all", home.name)]
            codes = list(pool.map(lambda home: run(home, flags["command"]), chosen))
        return next((code for code in codes if code), 0)
    if name.endswith("scp"):
        for home in homes:
            shutil.copy(positionals[0], home)
    elif name.endswith(("list", "du")):
        print(f"what {name} shows")
    return 0


def run(home: Path, command: str) -> int:
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=os.environ | {"HOME": str(home)}
    ).returncode


def parsed(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """The command, its positionals and flags; Refused unless all of it is documented."""
    name = next(
        (known for known in REFERENCE if words[: known.count(" ") + 1] == known.split()), None
    )
    if name is None:
        raise Refused(f"ERROR: (gcloud) Invalid choice: {words}")
    command, rest = REFERENCE[name], words[name.count(" ") + 1 :]
    positionals = [word for word in rest if not word.startswith("--")]
    flags = {}
    for word in rest:
        if not word.startswith("--"):
            continue
        flag, equals, value = word[2:].partition("=")
        takes = (
            command.values.split() + WIDE_VALUES.split()
            if equals
            else [*command.switches.split(), "quiet"]
        )
        if flag not in takes or (equals and not value):
            raise Refused(
                f"ERROR: (gcloud.{name.replace(' ', '.')}) unrecognized arguments: {word}"
            )
        flags[flag] = value
    missing = [flag for flag in command.required.split() if flag not in flags]
    low, high = command.positionals
    if missing or not low <= len(positionals) <= high:
        raise Refused(
            f"ERROR: (gcloud.{name.replace(' ', '.')}) argument missing: {missing or positionals}"
        )
    return name, positionals, flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
