"""Stands in for gcloud: refuses what gcloud's reference does not document, keeps a small state, plays failures.

It is run as a program named gcloud on the PATH. The folder that $FAKE_GCLOUD names holds `state.json` (TPU VMs and
queued requests), `failures.json` (what is to go wrong, in order), `calls.jsonl` (every call) and the home folders of
the workers, `NAME/0`, `NAME/1` ... where commands sent by ssh really run, in bash.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKERS = {"v4-8": 1, "v3-8": 1, "v4-32": 4, "v3-32": 4, "v5litepod-16": 4}
PROVISIONING = ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
WIDE_VALUES = "project format account billing-project configuration verbosity impersonate-service-account"


@dataclass(frozen=True)
class Command:
    """What the reference says of one command: flags with a value, flags without, required ones, positionals."""

    values: str = ""
    switches: str = ""
    required: str = ""
    positionals: tuple[int, int] = (1, 1)


_CREATE = (
    "accelerator-type data-disk description labels metadata metadata-from-file network range scopes service-account "
    "subnetwork tags topology type zone"
)
_CREATE_SWITCHES = "async internal-ips reserved shielded-secure-boot spot"
_SSH = "ssh-key-expiration ssh-key-expire-after ssh-key-file strict-host-key-checking worker zone"
_SSH_SWITCHES = "dry-run force-key-file-overwrite internal-ip plain"
_LIST = "filter limit page-size sort-by"
_RESERVATION = "reservation-host-folder reservation-host-organization reservation-host-project"
_VALID = "valid-after-duration valid-after-time valid-until-duration valid-until-time"

# https://cloud.google.com/sdk/gcloud/reference, Google Cloud SDK 528.
REFERENCE = {
    "compute tpus tpu-vm create": Command(
        f"{_CREATE} queue-count version", f"{_CREATE_SWITCHES} preemptible", "zone version accelerator-type"
    ),
    "compute tpus tpu-vm describe": Command("zone", required="zone"),
    "compute tpus tpu-vm delete": Command("zone", "async", "zone quiet"),
    "compute tpus tpu-vm list": Command(f"{_LIST} zone", "uri", "zone", (0, 0)),
    "compute tpus tpu-vm ssh": Command(f"{_SSH} command output-directory ssh-flag", _SSH_SWITCHES, "zone command"),
    "compute tpus tpu-vm scp": Command(f"{_SSH} scp-flag", f"{_SSH_SWITCHES} compress recurse", "zone", (2, 99)),
    "compute tpus queued-resources create": Command(
        f"{_CREATE} node-id node-count node-prefix runtime-version {_RESERVATION} {_VALID}",
        f"{_CREATE_SWITCHES} guaranteed",
        "zone runtime-version accelerator-type node-id",
    ),
    "compute tpus queued-resources describe": Command("zone", required="zone"),
    "compute tpus queued-resources delete": Command("zone", "async force", "zone quiet"),
    "compute tpus queued-resources list": Command(f"{_LIST} zone", "uri", "zone", (0, 0)),
    "compute disks list": Command(f"{_LIST} regexp regions zones", "uri", "zones", (0, 99)),
    "storage cp": Command("cache-control content-type storage-class", "no-clobber recursive", "", (2, 99)),
    "storage du": Command("additional-headers", "all-versions readable-sizes summarize total", "", (1, 99)),
}


class Refused(Exception):
    """gcloud ends with a code and says why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def main(words: list[str]) -> int:
    """One call; returns its exit code."""
    folder = Path(os.environ["FAKE_GCLOUD"])
    with (folder / "calls.jsonl").open("a") as log:
        log.write(json.dumps(words) + "\n")
    try:
        name, positionals, flags = parsed(words)
        fail_as_told(folder, " ".join(words))
        return act(folder, name, positionals, flags)
    except Refused as error:
        print(error, file=sys.stderr)
        return error.code


def parsed(words: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """The command, its positionals and flags; Refused unless all of it is documented."""
    name = next((known for known in REFERENCE if words[: known.count(" ") + 1] == known.split()), None)
    if name is None:
        raise Refused(2, f"ERROR: (gcloud) Invalid choice: {words}")
    command, rest = REFERENCE[name], words[name.count(" ") + 1 :]
    positionals = [word for word in rest if not word.startswith("--")]
    flags = {}
    for word in rest:
        if not word.startswith("--"):
            continue
        flag, equals, value = word[2:].partition("=")
        takes = command.values.split() + WIDE_VALUES.split() if equals else [*command.switches.split(), "quiet"]
        if flag not in takes or (equals and not value):
            raise Refused(2, f"ERROR: (gcloud.{name.replace(' ', '.')}) unrecognized arguments: {word}")
        flags[flag] = value
    missing = [flag for flag in command.required.split() if flag not in flags]
    low, high = command.positionals
    if missing or not low <= len(positionals) <= high:
        raise Refused(2, f"ERROR: (gcloud.{name.replace(' ', '.')}) argument missing: {missing or positionals}")
    return name, positionals, flags


def fail_as_told(folder: Path, text: str) -> None:
    """Plays the first of the wanted failures if it is meant for this call."""
    file = folder / "failures.json"
    failures = json.loads(file.read_text()) if file.exists() else []
    if not failures or not re.search(failures[0]["on"], text):
        return
    first = failures.pop(0)
    file.write_text(json.dumps(failures))
    with changed(folder) as state:
        if first.get("preempt"):
            preempt(state)
        if first.get("expire"):
            state["requests"]["my-tpu"]["state"] = "FAILED"
    if not first.get("goes_on"):
        raise Refused(first.get("code", 1), first.get("says", ""))


def act(folder: Path, name: str, positionals: list[str], flags: dict[str, str]) -> int:
    """Does what a correct call does."""
    if name.endswith("ssh"):
        return ssh(folder, positionals[0], flags)
    if name.endswith("scp"):
        return scp(folder, positionals, flags)
    with changed(folder) as state:
        kind = "requests" if "queued-resources" in name else "nodes"
        verb = name.rpartition(" ")[2]
        if name.startswith("compute tpus"):
            print(VERBS[verb](state, kind, positionals, flags), end="")
        elif name == "storage du":
            print(f"1234567  {positionals[0]}")
    return 0


def create(state: dict[str, Any], kind: str, positionals: list[str], flags: dict[str, str]) -> str:
    name, type_ = positionals[0], flags["accelerator-type"]
    if name in state[kind]:
        raise Refused(1, f"ERROR: (gcloud.compute.tpus.create) ALREADY_EXISTS: Resource '{name}' already exists")
    if kind == "requests":
        state[kind][name] = {"looks": 0, "type": type_, "node": flags["node-id"]}
    else:
        state[kind][name] = {"state": "READY", "type": type_}
    return ""


def describe(state: dict[str, Any], kind: str, positionals: list[str], flags: dict[str, str]) -> str:
    name = positionals[0]
    if name not in state[kind]:
        raise Refused(1, f"ERROR: (gcloud.compute.tpus.describe) NOT_FOUND: Resource '{name}' was not found")
    found = state[kind][name]
    type_ = f"projects/p/locations/z/acceleratorTypes/{found['type']}"
    if kind == "nodes":
        endpoints = [{"ipAddress": f"10.0.0.{worker}"} for worker in range(WORKERS[found["type"]])]
        return json.dumps({"state": found["state"], "acceleratorType": found["type"], "networkEndpoints": endpoints})
    now = found.get("state")
    if now is None:
        now = PROVISIONING[min(found["looks"], len(PROVISIONING) - 1)]
        found["looks"] += 1
    if now == "ACTIVE" and "state" not in found:
        found["state"] = now
        state["nodes"][found["node"]] = {"state": "READY", "type": found["type"]}
    told: dict[str, Any] = {"state": now}
    if told["state"] == "FAILED":
        told["failedData"] = {"error": {"message": "the request expired"}}
    return json.dumps({"state": told, "tpu": {"nodeSpec": [{"node": {"acceleratorType": type_}}]}})


def delete(state: dict[str, Any], kind: str, positionals: list[str], flags: dict[str, str]) -> str:
    name = positionals[0]
    if name not in state[kind]:
        raise Refused(1, f"ERROR: (gcloud.compute.tpus.delete) NOT_FOUND: Resource '{name}' was not found")
    if kind == "requests":
        if "force" not in flags and state["nodes"].get(state[kind][name]["node"]):
            raise Refused(1, "ERROR: (gcloud.compute.tpus.queued-resources.delete) FAILED_PRECONDITION: it has nodes")
        state["nodes"].pop(state[kind][name]["node"], None)
    del state[kind][name]
    return ""


def listed(state: dict[str, Any], kind: str, positionals: list[str], flags: dict[str, str]) -> str:
    return "".join(f"{name}  {flags['zone']}  {found['type']}\n" for name, found in state[kind].items())


VERBS = {"create": create, "describe": describe, "delete": delete, "list": listed}


def ssh(folder: Path, name: str, flags: dict[str, str]) -> int:
    """Runs the command on the chosen workers at the same time; the first code that is not 0, in their order."""
    homes = workers(folder, name, flags.get("worker", "0"))
    with ThreadPoolExecutor(len(homes)) as pool:
        codes = list(pool.map(lambda home: run(home, flags["command"]), homes))
    for worker, code in enumerate(codes):
        if code and len(codes) > 1:
            print(f"##### Command execution on worker {worker} failed with exit status {code}.", file=sys.stderr)
    return next((code for code in codes if code), 0)


def run(home: Path, command: str) -> int:
    return subprocess.run(["bash", "-c", command], cwd=home, env=os.environ | {"HOME": str(home)}).returncode


def scp(folder: Path, positionals: list[str], flags: dict[str, str]) -> int:
    *sources, target = positionals
    (name,) = {word.partition(":")[0] for word in positionals if ":" in word}
    for home in workers(folder, name, flags.get("worker", "0")):
        for source in sources:
            there, here = (home / word.partition(":")[2] if ":" in word else Path(word) for word in (source, target))
            if not there.exists():
                print(f"scp: {source}: No such file or directory", file=sys.stderr)
                return 1
            shutil.copy(there, here)
    return 0


def workers(folder: Path, name: str, chosen: str) -> list[Path]:
    with changed(folder) as state:
        node = state["nodes"].get(name)
    if node is None:
        raise Refused(1, f"ERROR: (gcloud.compute.tpus.tpu-vm.ssh) NOT_FOUND: Resource '{name}' was not found")
    if node["state"] != "READY":
        raise Refused(1, f'ERROR: (gcloud.compute.tpus.tpu-vm.ssh) This TPU has terminal state "{node["state"]}"')
    homes = [folder / name / str(worker) for worker in range(WORKERS[node["type"]])]
    for home in homes:
        home.mkdir(parents=True, exist_ok=True)
    return homes if chosen == "all" else [homes[int(chosen)]]


def preempt(state: dict[str, Any]) -> None:
    """Takes every TPU away, as happens to spot ones."""
    for node in state["nodes"].values():
        node["state"] = "PREEMPTED"
    for request in state["requests"].values():
        request["state"] = "SUSPENDED"


@contextmanager
def changed(folder: Path) -> Iterator[dict[str, Any]]:
    """The state, written back when the block ends."""
    file = folder / "state.json"
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(file.read_text()) if file.exists() else {"nodes": {}, "requests": {}}
        try:
            yield state
        finally:
            file.write_text(json.dumps(state))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
