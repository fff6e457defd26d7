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
from pathlib import Path

_SSH = (
    "zone worker command output-directory ssh-flag scp-flag ssh-key-expiration ssh-key-expire-after"
    " ssh-key-file strict-host-key-checking force-key-file-overwrite internal-ip plain recurse"
)
_LIST = "zone filter limit page-size sort-by uri"
WIDE = "project format account billing-project configuration verbosity quiet"

# https://cloud.google.com/sdk/gcloud/reference, Google Cloud SDK 528: the flags of each command.
REFERENCE = {
    "compute tpus tpu-vm create": (
        "accelerator-type data-disk description labels metadata metadata-from-file network"
        " queue-count range scopes service-account subnetwork tags topology type version zone async"
        " internal-ips reserved shielded-secure-boot spot preemptible"
    ),
    "compute tpus tpu-vm delete": "zone async",
    "compute tpus tpu-vm list": _LIST,
    "compute tpus tpu-vm ssh": _SSH,
    "compute tpus tpu-vm scp": _SSH,
    "compute disks list": f"{_LIST} regexp regions zones",
}


class Refused(Exception):
    """gcloud ends with a code and says why."""


def main(words):
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
    elif name.endswith("list"):
        print(f"what {name} shows")
    return 0


def run(home, command):
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=os.environ | {"HOME": str(home)}
    ).returncode


def parsed(words):
    """The command, its positionals and flags; Refused unless all of it is documented."""
    name = next(
        (known for known in REFERENCE if words[: known.count(" ") + 1] == known.split()), None
    )
    if name is None:
        raise Refused(f"ERROR: (gcloud) Invalid choice: {words}")
    rest = words[name.count(" ") + 1 :]
    parts = [word[2:].partition("=") for word in rest if word.startswith("--")]
    flags = {flag: value for flag, _, value in parts}
    unknown = flags.keys() - {*REFERENCE[name].split(), *WIDE.split()}
    if unknown or not {"zone", "zones"} & flags.keys():
        raise Refused(f"ERROR: (gcloud) unrecognized arguments, or no zone: {unknown}")
    return name, [word for word in rest if not word.startswith("--")], flags


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
