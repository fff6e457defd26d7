"""`python -m trainer doctor`: checks this machine, its network and the data for a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardset.errors import NotFound, ShardsetError, StorageError, TransientError
from shardset.format.manifest import Manifest
from shardset.program import count
from shardset.storage.open import bucket_of, holds, is_known
from trainer.config import TrainConfig
from trainer.errors import TrainingError
from trainer.runtime import machine
from trainer.supervise import heartbeat
from trainer.tools import probes
from trainer.tools.probes import Devices, PortState

PORTS = (8471, 8476, 8477, 8478, 8479, heartbeat.PORT)
"""TCP ports between the workers of a slice: 8471 of libtpu, those from 8476 on of libtpu with one
process a chip, and the one for heartbeats.
"""

OLDEST, NEWEST = (2, 9), (2, 15)
"""Versions of torch that the trainer is tested with."""

SMALL_DEVICE_BATCH = 8
"""A TPU pads the batch of a device to a multiple of 8."""

MIB = 1 << 20
RESERVE = 1.2


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
        return f"{self.status}  {self.check}: {self.found}" + (
            f"\n      {self.advice}" if self.advice else ""
        )


def run_checks(config: TrainConfig, wanted_rate: float | None) -> Iterator[CheckResult]:
    """Yields the result of each check of this machine for this run as soon as it is known.

    `wanted_rate` is in images a second, of all hosts.
    """
    num_chips = machine.num_chips()
    yield check_versions(probes.versions(), probes.pins(), num_chips)
    devices = probes.devices(config.strategy)
    yield check_devices(devices, num_chips)
    num_hosts = 1
    if isinstance(devices, Devices):
        num_hosts = devices.num_hosts
        yield check_batch(config.global_batch_size, config.accumulate, devices.num_devices)
    yield check_ports(probes.ports(probes.workers(), PORTS))
    urls = [url for url in (config.run_dir, config.manifest) if url]
    locations = {
        bucket: probes.bucket_location(bucket) for url in urls if (bucket := bucket_of(url))
    }
    for bucket, location in locations.items():
        yield check_bucket(bucket, location, probes.zone())

    def is_reachable(url: str) -> bool:
        return not isinstance(locations.get(bucket_of(url) or ""), NotFound | TransientError)

    if is_reachable(config.run_dir):
        yield check_run_dir(config.run_dir)
    if config.manifest is not None and is_reachable(config.manifest):
        yield from _check_data(config, config.manifest, wanted_rate, num_hosts)


def _check_data(
    config: TrainConfig, url: str, wanted_rate: float | None, num_hosts: int
) -> Iterator[CheckResult]:
    # Imported late: it imports torch, and the checks before it must run without.
    from trainer.data.splits import load_once, open_data

    # leaves no files behind, and measures the bucket
    config = replace(config, cache_dir=None, cache_bytes=None)
    check, advice = "manifest", "see `python -m pipelines verify`"
    try:
        loaded = load_once(url).without_view()
        manifest, storage = loaded.manifest, loaded.storage
        result = check_manifest(manifest, probes.stored_sizes(storage, expected_sizes(manifest)))
        yield result
        if result.status == "fail":
            return
        check, advice = "stream", "change the settings that the message names"
        open_data(config, 0, num_hosts)
        check, advice = "decode rate", "see `python -m pipelines verify`"
        yield check_rate(
            probes.decode_rate(config), wanted_rate, num_hosts, config.global_batch_size
        )
    except ShardsetError as error:
        yield CheckResult(check, "fail", str(error), advice)


# --- the software and the devices -----------------------------------------------------------------


def check_versions(
    installed: Mapping[str, str | None], pins: Mapping[str, str], num_chips: int
) -> CheckResult:
    """The versions of torch, torchvision and the back end for TPUs match.

    A mix fails to load, or is slow.
    """
    backends = [name for name in ("torch_xla", "torch_tpu") if installed[name]]
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    text += f"; back end for TPUs: {' and '.join(backends) or 'none'}"
    torch = _release(installed["torch"])
    others = [name for name, pin in pins.items() if _plain(installed.get(name)) not in (None, pin)]
    if torch < OLDEST:
        advice = f"torch {OLDEST[0]}.{OLDEST[1]} or newer is needed"
    elif len(backends) > 1:
        advice = (
            "torch_xla and torch_tpu need different versions of torch: keep one of them in an"
            " environment"
        )
    elif installed["torch_xla"] and _release(installed["torch_xla"]) != torch:
        advice = "torch_xla must be of the same version as torch"
    elif num_chips and not (backends and installed["libtpu"]):
        advice = "a TPU needs libtpu, and torch_xla or torch_tpu"
    elif others:
        advice = (
            f"{others[0]} {pins[others[0]]} belongs to the other libraries; another one can be slow"
            " or fail"
        )
    elif torch > NEWEST:
        advice = f"the newest torch that is tested is {NEWEST[0]}.{NEWEST[1]}"
        return CheckResult("versions", "warn", text, advice)
    else:
        return CheckResult("versions", "pass", text)
    extra = (
        "torchtpu"
        if backends == ["torch_tpu"]
        else "tpu"
        if num_chips
        else "xla"
        if backends
        else ""
    )
    extras = ",".join(filter(None, ["trainer", extra]))
    return CheckResult(
        "versions",
        "fail",
        text,
        f"{advice}; install them together: pip install 'shardset[{extras}]'",
    )


def _plain(version: str | None) -> str | None:
    """2.9.1 of 2.9.1+cpu."""
    return version and version.partition("+")[0]


def _release(version: str | None) -> tuple[int, ...]:
    """(2, 9) of 2.9.1+cpu; () of a library that is not there."""
    return tuple(int(number) for number in version.split(".")[:2]) if version else ()


def check_devices(devices: Devices | str, num_chips: int) -> CheckResult:
    """The devices that a run would train on; a text is the reason why they are unknown."""
    if isinstance(devices, str):
        advice = (
            "end other programs that use the devices; check a slice by `python -m trainer tpu"
            " doctor`"
        )
        return CheckResult("devices", "fail", devices, advice)
    platform = devices.platform or devices.kind.upper()
    per_host = count(devices.num_devices // max(1, devices.num_hosts), f"{platform} device")
    text = f"{count(devices.num_hosts, 'host')} x {per_host}, strategy {devices.strategy}"
    if platform == "CPU" and num_chips:
        advice = "unset PJRT_DEVICE, or set it to TPU, and leave --strategy at auto"
        return CheckResult(
            "devices", "fail", f"{text}, but this machine has {num_chips} TPU chips", advice
        )
    if platform == "CPU":
        return CheckResult(
            "devices", "warn", text, "there is no accelerator; good enough for a smoke test"
        )
    return CheckResult("devices", "pass", text)


def check_batch(global_batch_size: int, accumulate: int, num_devices: int) -> CheckResult:
    """Every device has samples in every pass, and as many as the others."""
    unit = num_devices * accumulate
    device_batch, rest = divmod(global_batch_size, unit)
    passes = f" in {accumulate} passes" if accumulate > 1 else ""
    text = f"{global_batch_size} samples over {count(num_devices, 'device')}{passes}"
    if not device_batch:
        advice = f"use --global-batch-size {unit}, or fewer devices"
        return CheckResult("global batch", "fail", f"{text}: some have none", advice)
    if rest:
        sizes = f"{device_batch * unit} or {(device_batch + 1) * unit}"
        text += f": {(device_batch + 1) * unit} rows, {unit - rest} of them of weight 0"
        advice = (
            f"good enough to resume on fewer devices; for a new run use --global-batch-size {sizes}"
        )
        return CheckResult("global batch", "warn", text, advice)
    text += f", {device_batch} each"
    if device_batch < SMALL_DEVICE_BATCH and num_devices > 1:
        advice = f"less than {SMALL_DEVICE_BATCH} samples a device leave most of it idle"
        return CheckResult("global batch", "warn", text, advice)
    return CheckResult("global batch", "pass", text)


# --- the network and the storage ------------------------------------------------------------------


def check_ports(states: Mapping[str, PortState]) -> CheckResult:
    """The workers of a slice reach each other.

    Nothing listens before a run, so `closed` is good.
    """
    filtered = [address for address, state in states.items() if state == "filtered"]
    opened = [address for address, state in states.items() if state == "open"]
    if filtered:
        text = f"{len(filtered)} of {len(states)} give no answer, such as {filtered[0]}"
        advice = (
            "a firewall drops packets: allow all TCP between the workers, as the rule"
            " default-allow-internal does"
        )
        return CheckResult("ports", "fail", text, advice)
    if opened:
        advice = "a training is running already, or was left behind; stop it"
        return CheckResult("ports", "warn", f"a process listens on {opened[0]}", advice)
    return CheckResult(
        "ports", "pass", f"{len(states)} reachable and free" if states else "one host: none needed"
    )


def check_bucket(name: str, location: str | StorageError, zone: str | None) -> CheckResult:
    """The bucket answers, and is in the region of this machine.

    Others are slower, and every byte costs money.
    """
    check = f"bucket {name}"
    if isinstance(location, NotFound):
        return CheckResult(
            check,
            "fail",
            str(location),
            "check the name, and the project that you are logged in to",
        )
    if isinstance(location, TransientError):
        advice = "check the network: can this machine reach storage.googleapis.com?"
        return CheckResult(check, "fail", str(location), advice)
    if isinstance(location, StorageError):
        advice = (
            "its objects may still be readable; reading the location needs the permission"
            " storage.buckets.get"
        )
        return CheckResult(check, "warn", f"its location is unknown: {location}", advice)
    if zone is None:
        advice = (
            "this does not seem to be a Compute Engine machine; train in the region of the bucket"
        )
        return CheckResult(
            check, "warn", f"{location}; the region of this machine is unknown", advice
        )
    region, text = zone.rpartition("-")[0], f"{location}, this machine in {zone}"
    if holds(location, region):
        return CheckResult(check, "pass", text)
    if not is_known(location):
        return CheckResult(
            check, "warn", text, "check whether this location includes the region of this machine"
        )
    return CheckResult(
        check,
        "fail",
        text,
        f"every byte would cross regions: copy the data to a bucket in {region}",
    )


def check_run_dir(url: str) -> CheckResult:
    """The run folder takes checkpoints and logs."""
    try:
        probes.try_writing(url)
    except ShardsetError as error:
        return CheckResult(
            "run folder", "fail", str(error), f"can't save in {url}; choose another --run-dir"
        )
    return CheckResult("run folder", "pass", f"{url}: written, read back and deleted")


# --- the data -------------------------------------------------------------------------------------


def check_manifest(manifest: Manifest, sizes: Mapping[str, int]) -> CheckResult:
    """Every shard and index in the manifest exists and has the right size, by the sizes in a
    listing.
    """
    expected = expected_sizes(manifest)
    missing = [name for name in expected if name not in sizes]
    wrong = [name for name, size in expected.items() if sizes.get(name, size) != size]
    if missing or wrong:
        problems = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        problems += [f"{len(wrong)} of another size, such as {wrong[0]}"] if wrong else []
        advice = (
            "repair it: `python -m pipelines build` with the same options; details: `python -m"
            " pipelines verify`"
        )
        return CheckResult("manifest", "fail", "; ".join(problems), advice)
    splits = (
        f"{name} {split.num_samples} in {split.num_shards} shards"
        for name, split in manifest.splits.items()
    )
    files = f"all {len(expected)} files there, {sum(expected.values()) / MIB:,.0f} MiB"
    return CheckResult(
        "manifest", "pass", f"{', '.join(splits)}; {files}; digest {manifest.digest[:12]}"
    )


def expected_sizes(manifest: Manifest) -> dict[str, int]:
    """The size of every shard and index in the manifest, by name."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {file.path: file.num_bytes for shard in shards for file in (shard, shard.index)}


def check_rate(
    rate: float, wanted: float | None, num_hosts: int, global_batch_size: int
) -> CheckResult:
    """The images a second that all hosts decode, of `rate` on each, compared with the rate of the
    devices.
    """
    total = rate * num_hosts
    text = f"{rate:,.0f} images/s on this host"
    text += f", {total:,.0f} on {num_hosts}" if num_hosts > 1 else ""
    text += f", {total / global_batch_size:.2g} steps/s"
    if wanted is None:
        return CheckResult("decode rate", "pass", f"{text}; compare it by --want-images-per-second")
    text += f"; wanted {wanted:,.0f}"
    advice = "smaller stored images (`--resize`), more or larger hosts; see docs/decoding.md"
    if total < wanted:
        return CheckResult("decode rate", "fail", text, f"the devices will wait; {advice}")
    if total < RESERVE * wanted:
        return CheckResult("decode rate", "warn", text, f"there is no reserve; {advice}")
    return CheckResult("decode rate", "pass", text)


def report(results: Iterator[CheckResult], *, as_json: bool) -> None:
    """Prints each result when it comes, or all of them as JSON. Raises TrainingError if a check
    failed.
    """
    printed: list[CheckResult] = []
    for result in results:
        printed.append(result)
        if not as_json:
            print(result, flush=True)
    counts = {
        status: sum(each.status == status for each in printed)
        for status in ("pass", "warn", "fail")
    }
    if as_json:
        values: dict[str, Any] = {"findings": [asdict(each) for each in printed], "counts": counts}
        print(json.dumps(values, indent=1))
    else:
        print(", ".join(f"{number} {status}" for status, number in counts.items()))
    if counts["fail"]:
        raise TrainingError(
            f"{counts['fail']} of {len(printed)} checks failed; the advice is below each"
        )
