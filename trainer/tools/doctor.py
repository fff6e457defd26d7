"""`shardset doctor`: checks this machine, its network and the data for a run."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from shardset.errors import DOCS, ShardsetError, StorageError
from shardset.program import count
from shardset.storage.open import bucket_of, is_region
from trainer.config import TrainConfig
from trainer.errors import TrainingError
from trainer.runtime import heartbeat, machine
from trainer.tools import probes
from trainer.tools.probes import Devices, PortState

PORTS = (8471, 8476, 8477, 8478, 8479, heartbeat.PORT)
"""TCP ports between the workers of a slice: 8471 of libtpu, those from 8476 on of libtpu with one
process a chip, and the one for heartbeats.
"""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was checked, its status, what was found, and what to do unless it passed.

    `--json` prints these fields.
    """

    check: str
    status: Literal["pass", "warn", "fail"]
    found: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n      {self.advice}" if self.advice else ""
        return f"{self.status}  {self.check}: {self.found}{advice}"


def run_checks(config: TrainConfig, wanted_rate: float | None) -> Iterator[CheckResult]:
    """Yields the result of each check of this machine for this run as soon as it is known.

    `wanted_rate` is in images per second, of all hosts.
    """
    num_chips = machine.num_chips()
    yield check_versions(probes.versions(), num_chips)
    devices = probes.devices(config.strategy)
    yield check_devices(devices, num_chips)
    yield check_ports(probes.ports(machine.tpu_workers()[0], PORTS))
    buckets = [bucket_of(url) for url in (config.run_dir, config.manifest) if url]
    for bucket in dict.fromkeys(filter(None, buckets)):
        yield check_bucket(bucket, probes.bucket_location(bucket), probes.zone())
    yield check_run_dir(config.run_dir)
    if config.manifest is not None:
        num_hosts = devices.num_hosts if isinstance(devices, Devices) else 1
        yield from _check_data(config, config.manifest, wanted_rate, num_hosts)


def _check_data(
    config: TrainConfig, url: str, wanted_rate: float | None, num_hosts: int
) -> Iterator[CheckResult]:
    # Imported late: the checks before it must run where the reader can't be imported.
    from trainer.data.splits import load_once, open_data

    # leaves no files behind, and measures the bucket
    config = replace(config, cache_dir=None, cache_bytes=None)
    check = "manifest"
    try:
        manifest = load_once(url).manifest
        splits = (
            f"{name} {split.num_samples} in {split.num_shards} shards"
            for name, split in manifest.splits.items()
        )
        # whether all files are there is asked by `verify`
        yield CheckResult(check, "pass", f"{', '.join(splits)}; digest {manifest.digest[:12]}")
        check = "decode rate"
        open_data(config, 0, num_hosts)
        rate = probes.decode_rate(config)
        yield check_rate(rate, wanted_rate, num_hosts, config.global_batch_size)
    except ShardsetError as error:
        advice = "change what the message names; `shardset verify` checks all files"
        yield CheckResult(check, "fail", str(error), advice)


# --- the software and the devices -----------------------------------------------------------------


def check_versions(installed: Mapping[str, str | None], num_chips: int) -> CheckResult:
    """The versions of torch and the back end for TPUs match.

    A mix fails to load, or is slow.
    """
    plain = {name: (version or "").partition("+")[0] for name, version in installed.items()}
    torch, xla = (plain[name].split(".")[:2] for name in ("torch", "torch_xla"))
    problems = {
        "torch_xla must be of the same version as torch": xla not in ([""], torch),
        "a TPU needs libtpu, and torch_xla or torch_tpu": num_chips
        and not (plain["libtpu"] and (plain["torch_xla"] or plain["torch_tpu"])),
    }
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    for problem, is_there in problems.items():
        if is_there:
            advice = f"{problem}; install 'shardset[trainer]' with one of the extras xla, tpu and"
            return CheckResult("versions", "fail", text, f"{advice} torchtpu, in a new environment")
    return CheckResult("versions", "pass", text)


def check_devices(devices: Devices | str, num_chips: int) -> CheckResult:
    """The devices that a run would train on; a text is the reason why they are unknown."""
    if isinstance(devices, str):
        return CheckResult("devices", "fail", devices, "end other programs that use the devices")
    per_host = count(devices.num_devices // max(1, devices.num_hosts), f"{devices.kind} device")
    text = f"{count(devices.num_hosts, 'host')} x {per_host}, strategy {devices.strategy}"
    if devices.kind != "CPU":
        return CheckResult("devices", "pass", text)
    if num_chips:
        text += f", but this machine has {num_chips} TPU chips"
        advice = "unset PJRT_DEVICE, or set it to TPU, and leave --strategy at auto"
        return CheckResult("devices", "fail", text, advice)
    return CheckResult("devices", "warn", text, "good enough for a smoke test: no accelerator")


# --- the network and the storage ------------------------------------------------------------------


def check_ports(states: Mapping[str, PortState]) -> CheckResult:
    """The workers of a slice reach each other.

    Nothing listens before a run, so `closed` is good.
    """
    for address, state in states.items():
        if state == "filtered":
            advice = "a firewall drops packets: allow all TCP between the workers"
            return CheckResult("ports", "fail", f"{address} gives no answer", advice)
    for address, state in states.items():
        if state == "open":
            advice = "a training is running already, or was left behind; stop it"
            return CheckResult("ports", "warn", f"a process listens on {address}", advice)
    text = f"{len(states)} reachable and free" if states else "one host: none needed"
    return CheckResult("ports", "pass", text)


def check_bucket(name: str, location: str | StorageError, zone: str | None) -> CheckResult:
    """The bucket is in the region of this machine: others are slow, and every byte costs money."""
    check = f"bucket {name}"
    if isinstance(location, StorageError):
        advice = "check name and network; this needs the permission storage.buckets.get"
        return CheckResult(check, "warn", f"its location is unknown: {location}", advice)
    text = f"{location}, this machine in {zone or 'no zone of Compute Engine'}"
    if zone and location.lower() == zone.rpartition("-")[0]:
        return CheckResult(check, "pass", text)
    return CheckResult(
        check,
        "fail" if zone and is_region(location) else "warn",
        text,
        "bytes that cross regions are slow and cost money: train in the region of the bucket",
    )


def check_run_dir(url: str) -> CheckResult:
    """The run folder takes checkpoints and logs."""
    try:
        probes.try_writing(url)
    except ShardsetError as error:
        return CheckResult("run folder", "fail", str(error), "choose another --run-dir")
    return CheckResult("run folder", "pass", f"{url}: written, read back and deleted")


# --- the data -------------------------------------------------------------------------------------


def check_rate(
    rate: float, wanted: float | None, num_hosts: int, global_batch_size: int
) -> CheckResult:
    """The images per second that all hosts decode, of `rate` on each, compared with the rate of the
    devices.
    """
    total = rate * num_hosts
    text = f"{rate:,.0f} images/s on this host, {total / global_batch_size:.2g} steps/s on"
    text += f" {count(num_hosts, 'host')}; wanted {wanted or 0:,.0f} images/s"
    if total >= (wanted or 0):
        return CheckResult("decode rate", "pass", text)
    advice = (
        "the devices will wait; smaller stored images (`--resize-shorter`), more or larger hosts"
    )
    return CheckResult("decode rate", "fail", text, f"{advice}; see {DOCS}/reference/images.md")


def report(results: Iterator[CheckResult], *, as_json: bool) -> None:
    """Prints each result when it comes, or all of them as JSON. Raises TrainingError if a check
    failed.
    """
    printed: list[CheckResult] = []
    for result in results:
        printed.append(result)
        if not as_json:
            print(result, flush=True)
    counts = Counter({"pass": 0, "warn": 0, "fail": 0})
    counts.update(result.status for result in printed)
    if as_json:
        print(json.dumps({"findings": [asdict(result) for result in printed], "counts": counts}))
    else:
        print(", ".join(f"{number} {status}" for status, number in counts.items()))
    if counts["fail"]:
        raise TrainingError(
            f"{counts['fail']} of {len(printed)} checks failed; the advice is below each"
        )
