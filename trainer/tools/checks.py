"""The checks of `doctor`: pure functions that turn what a probe measured into a result with advice."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardset.errors import NotFound, ShardsetError, StorageError, TransientError
from shardset.format.manifest import Manifest
from shardset.order.budget import PREFETCH
from shardset.storage.regions import holds, is_known
from trainer.config import TrainConfig
from trainer.runtime.machine import REFUSED
from trainer.settings import values_of
from trainer.tools.probes import DecodeRate, Devices, PortState, RecordedRun

Status = Literal["pass", "warn", "fail"]

RATE_SETTINGS = ("model.name", "model.stem", "model.norm", "image.size", "precision", "accumulate")
"""Settings that decide how many images a second a device takes. Runs are comparable if these are equal."""

MIN_BUSY = 0.1
"""Smallest busy share to divide a rate by. A run that mostly waited for data says little about its devices."""

PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest Python that both this project and torch_xla support."""

TORCH_XLA = "2.9"
MIB, GIB = 1 << 20, 1 << 30
LOW_DISK, NO_DISK = 10 * GIB, GIB
"""A checkpoint of ResNet-50 with momentum takes 0.2 GB. A run keeps the best one and `keep_checkpoints` more."""

MIN_OPEN_FILES = 512
"""256 shards, 64 files of the storage, 32 connections, and some reserve."""

MAX_SKEW_S, BAD_SKEW_S = 5.0, 60.0
RESERVE = 1.2
SMALL_DEVICE_BATCH = 8
"""A TPU pads the batch of a device to a multiple of 8."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What was checked, its status, what was found, and what to do unless it passed. `--json` prints these fields."""

    check: str
    status: Status
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.status}  {self.check}: {self.found}" + (f"\n      {self.advice}" if self.advice else "")


@dataclass(frozen=True, slots=True)
class TargetRate:
    """The rate that the whole run should read at, and where that number comes from."""

    images_per_second: float
    source: str


# --- the software ----------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, int]) -> CheckResult:
    """The version of Python."""
    low, high = PYTHONS
    text = f"{version[0]}.{version[1]}"
    if version < low:
        return CheckResult("python", "fail", text, f"use Python {low[0]}.{low[1]} or newer")
    if version > high:
        return CheckResult("python", "warn", text, f"torch_xla {TORCH_XLA} is built for up to {high[0]}.{high[1]}")
    return CheckResult("python", "pass", text)


def check_variables(environment: Mapping[str, str]) -> CheckResult:
    """Environment variables that torch_xla no longer reads."""
    old = sorted(name for name in environment if name in REFUSED or name.startswith("XRT_"))
    if old:
        reasons = {REFUSED.get(name, REFUSED["XRT_TPU_CONFIG"]) for name in old}
        return CheckResult("variables", "fail", f"{', '.join(old)} set", f"unset: {'; '.join(sorted(reasons))}")
    device = environment.get("PJRT_DEVICE")
    if device is not None and device not in ("TPU", "CPU", "CUDA"):
        return CheckResult(
            "variables", "warn", f"PJRT_DEVICE={device}", "known are TPU, CPU and CUDA; or leave it unset"
        )
    text = f"PJRT_DEVICE={device}" if device else "no old ones; PJRT_DEVICE is not set"
    return CheckResult("variables", "pass", text)


# --- the devices -----------------------------------------------------------------------------------------------------


def check_devices(devices: Devices | str, num_chips: int) -> CheckResult:
    """The devices that a run would train on; a text is the reason why they are unknown."""
    if isinstance(devices, str):
        advice = "end other programs that use the devices"
        if num_chips:
            advice += "; on a slice check all workers at the same time: `python -m trainer tpu doctor`"
        return CheckResult("devices", "fail", devices, advice)
    per_host = devices.num_devices // max(1, devices.num_hosts)
    platform = devices.platform or devices.kind.upper()
    text = (
        f"{_count(devices.num_hosts, 'host')} x {_count(per_host, platform + ' device')}, strategy {devices.strategy}"
    )
    if platform == "CPU" and num_chips:
        advice = "unset PJRT_DEVICE, or set it to TPU, and leave --strategy at auto"
        return CheckResult("devices", "fail", f"{text}, but this machine has {num_chips} TPU chips", advice)
    if platform == "CPU":
        return CheckResult("devices", "warn", text, "there is no accelerator; good enough for a smoke test")
    return CheckResult("devices", "pass", text)


def check_batch(global_batch_size: int, accumulate: int, num_devices: int) -> CheckResult:
    """Every device has samples in every pass, and as many as the others."""
    unit = num_devices * accumulate
    device_batch, rest = divmod(global_batch_size, unit)
    passes = f" in {accumulate} passes" if accumulate > 1 else ""
    text = f"{global_batch_size} samples over {_count(num_devices, 'device')}{passes}"
    if not device_batch:
        advice = f"use --global-batch-size {unit}, or fewer devices"
        return CheckResult("global batch", "fail", f"{text}: some have none", advice)
    if rest:
        sizes = f"{device_batch * unit} or {(device_batch + 1) * unit}"
        text += f": {(device_batch + 1) * unit} rows, {unit - rest} of them of weight 0"
        advice = f"good enough to go on with fewer devices; for a new run use --global-batch-size {sizes}"
        return CheckResult("global batch", "warn", text, advice)
    text = f"{global_batch_size} samples = {_count(num_devices, 'device')} x {device_batch}{passes}"
    if device_batch < SMALL_DEVICE_BATCH and num_devices > 1:
        advice = f"less than {SMALL_DEVICE_BATCH} samples a device leave most of it idle"
        return CheckResult("global batch", "warn", text, advice)
    return CheckResult("global batch", "pass", text)


def check_lanes(num_lanes: int, num_hosts: int) -> CheckResult:
    """Each lane should have one reader."""
    text = f"{_count(num_lanes, 'lane')} over {_count(num_hosts, 'host')}"
    if num_lanes < num_hosts:
        advice = "several hosts read the same lanes and fetch the same bytes; use a larger global batch"
        return CheckResult("lanes", "warn", text, advice)
    if num_lanes % num_hosts:
        advice = "they do not divide evenly: two hosts read the same lanes at the borders"
        return CheckResult("lanes", "warn", text, advice)
    return CheckResult("lanes", "pass", text)


# --- storage ---------------------------------------------------------------------------------------------------------


def check_bucket(name: str, location: str | StorageError) -> CheckResult:
    """Whether a bucket answers."""
    check = f"bucket {name}"
    if isinstance(location, NotFound):
        return CheckResult(check, "fail", str(location), "check the name, and the project that you are logged in to")
    if isinstance(location, TransientError):
        advice = "check the network: can this machine reach storage.googleapis.com?"
        return CheckResult(check, "fail", str(location), advice)
    if isinstance(location, StorageError):
        advice = "its objects may still be readable; reading the location needs the permission storage.buckets.get"
        return CheckResult(check, "warn", f"its location is unknown: {location}", advice)
    return CheckResult(check, "pass", f"reachable, in {location}")


def check_region(bucket: str, location: str, zone: str | None) -> CheckResult:
    """The bucket is in the region of this machine. Any other region is slower, and every byte costs money."""
    check = f"region of {bucket}"
    if zone is None:
        advice = "this does not seem to be a Compute Engine machine; train in the region of the bucket"
        return CheckResult(check, "warn", f"{location}; the region of this machine is unknown", advice)
    region = zone.rpartition("-")[0]
    text = f"{location}, this machine in {zone}"
    if holds(location, region):
        is_region = region in location.lower().split("+")
        return CheckResult(check, "pass", text if is_region else f"{text}, which is part of it")
    if not is_known(location):
        return CheckResult(check, "warn", text, "check whether this location includes the region of this machine")
    return CheckResult(check, "fail", text, f"every byte would cross regions: copy the data to a bucket in {region}")


def check_manifest(manifest: Manifest | ShardsetError) -> CheckResult:
    """The manifest exists and is valid."""
    if isinstance(manifest, ShardsetError):
        return CheckResult("manifest", "fail", str(manifest), "see `python -m pipelines verify`")
    splits = (f"{name} {split.num_samples} in {split.num_shards} shards" for name, split in manifest.splits.items())
    return CheckResult("manifest", "pass", f"{', '.join(splits)}; digest {manifest.digest[:12]}")


def check_shards(manifest: Manifest, sizes: Mapping[str, int]) -> CheckResult:
    """Every shard and index in the manifest exists and has the right size."""
    expected = expected_sizes(manifest)
    missing = [name for name in expected if name not in sizes]
    wrong = [name for name, size in expected.items() if name in sizes and sizes[name] != size]
    if missing or wrong:
        problems = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        problems += [f"{len(wrong)} of another size, such as {wrong[0]}"] if wrong else []
        advice = "repair it: `python -m pipelines build` with the same options; details: `python -m pipelines verify`"
        return CheckResult("shards", "fail", "; ".join(problems), advice)
    others = [name for name in sizes if name.endswith(".tar") and name not in expected]
    text = f"all {len(expected)} files there, {sum(expected.values()) / MIB:,.0f} MiB"
    if others:
        advice = "they are not in the manifest and are not read; are they left over from another build?"
        return CheckResult("shards", "warn", f"{text}; {len(others)} more tars, such as {others[0]}", advice)
    return CheckResult("shards", "pass", text)


def expected_sizes(manifest: Manifest) -> dict[str, int]:
    """The size of every shard and index in the manifest, by name."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {file.path: file.num_bytes for shard in shards for file in (shard, shard.index)}


def check_run_dir(url: str, error: str | None) -> CheckResult:
    """The run folder takes checkpoints and logs."""
    if error is not None:
        advice = f"checkpoints can't be saved in {url}; choose another --run-dir"
        return CheckResult("run folder", "fail", error, advice)
    return CheckResult("run folder", "pass", f"{url}: written, read back and deleted")


def check_clock(skew_s: float | None) -> CheckResult:
    """The clock is right, because tokens and signatures carry the time."""
    if skew_s is None:
        return CheckResult("clock", "warn", "Cloud Storage gave no date", "this clock could not be compared with it")
    text = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} Cloud Storage"
    advice = "set the clock: `sudo systemctl restart systemd-timesyncd` (or chrony)"
    if abs(skew_s) > BAD_SKEW_S:
        return CheckResult("clock", "fail", text, f"tokens will be refused; {advice}")
    if abs(skew_s) > MAX_SKEW_S:
        return CheckResult("clock", "warn", text, advice)
    return CheckResult("clock", "pass", text)


# --- capacity --------------------------------------------------------------------------------------------------------


def check_rate(
    rate: DecodeRate, target: TargetRate | None, *, num_hosts: int, global_batch_size: int, num_images: int
) -> CheckResult:
    """The decode rate of all hosts, compared with the target rate. The whole run reads `num_images`."""
    total = rate.images_per_second * num_hosts
    steps = total / global_batch_size
    text = f"{rate.images_per_second:,.0f} images/s on this host ({rate.num_images} images)"
    if num_hosts > 1:
        text += f", {total:,.0f} on {num_hosts}"
    text += f", {steps:.2g} steps/s, {num_images / max(1e-9, total) / 3600:.2g} h for all epochs"
    if target is None:
        advice = "give --want-images-per-second, or the --run-dir of a run like this one"
        return CheckResult("decode rate", "pass", f"{text}; nothing to compare with: {advice}")
    text += f"; wanted {target.images_per_second:,.0f} ({target.source})"
    advice = "smaller stored images (`--resize`), more or larger hosts; see docs/decoding.md"
    if total < target.images_per_second:
        return CheckResult("decode rate", "fail", text, f"the devices will wait; {advice}")
    if total < RESERVE * target.images_per_second:
        return CheckResult("decode rate", "warn", text, f"there is no reserve; {advice}")
    return CheckResult("decode rate", "pass", text)


def target_of(run: RecordedRun, config: TrainConfig) -> TargetRate | str | None:
    """The rate that the devices of a recorded run take without waiting for data, or why it does not apply here.

    The best epoch counts. The first one, which compiles, counts only if it is the only one. None without any epochs.
    """
    here, there = values_of(config), values_of(run.config)
    other = next((key for key in RATE_SETTINGS if here[key] != there[key]), None)
    if other is not None:
        return f"the run there had {other}={there[other]}, this one has {here[other]}: its rate does not apply here"
    epochs = [record for record in run.records if record["kind"] == "epoch"]
    final_rates = [record["reduced_global_rate"] for record in run.records if record["kind"] == "final"]
    if run.config.fake_data and final_rates:
        return TargetRate(final_rates[-1], "the recorded run with --fake-data")
    if not epochs:
        return None
    busy = {record["epoch"]: 1 - record["input_wait_percent"] / 100 for record in epochs}
    rates = [(record["reduced_global_rate"] / max(MIN_BUSY, busy[record["epoch"]]), record) for record in epochs]
    rate, best = max(rates[1:] or rates, key=lambda pair: pair[0])
    waited = f"{best['input_wait_percent']:.0f} % of waiting for data taken out"
    return TargetRate(rate, f"the recorded run, epoch {best['epoch'] + 1}, {waited}")


def check_batches(config: TrainConfig, num_hosts: int) -> CheckResult:
    """The memory of decoded batches fits the budget of a stream: all that is known without a shard set."""
    needed = (PREFETCH + 2) * -(-config.global_batch_size // num_hosts) * 3 * config.image.size**2
    text = f"decoded batches take {needed / MIB:,.0f} MiB of a budget of {config.budget_bytes / MIB:,.0f} MiB a stream"
    if needed > config.budget_bytes:
        return CheckResult("memory", "fail", text, "raise --set budget_bytes, use more hosts or a smaller global batch")
    return CheckResult("memory", "pass", f"{text}; the rest depends on the data: name it with --manifest")


def check_ports(states: Mapping[str, PortState]) -> CheckResult:
    """The workers of a slice reach each other. Nothing listens before a run, so `closed` is good."""
    filtered = [address for address, state in states.items() if state == "filtered"]
    opened = [address for address, state in states.items() if state == "open"]
    if filtered:
        text = f"{len(filtered)} of {len(states)} give no answer, such as {filtered[0]}"
        advice = "a firewall drops packets: allow all TCP between the workers, as the rule default-allow-internal does"
        return CheckResult("ports", "fail", text, advice)
    if opened:
        advice = "a training runs already, or was left behind; stop it with `python -m trainer tpu stop`"
        return CheckResult("ports", "warn", f"a process listens on {opened[0]}", advice)
    return CheckResult("ports", "pass", f"{len(states)} reachable and free" if states else "one host: none needed")


def check_disk(name: str, path: str, free: int) -> CheckResult:
    """Space for checkpoints and logs."""
    check, text = f"disk for {name}", f"{free / GIB:.1f} GiB free in {path}"
    if free < NO_DISK:
        return CheckResult(
            check, "fail", text, "free some space: checkpoints, logs and pending uploads need at least 1 GiB"
        )
    if free < LOW_DISK:
        return CheckResult(check, "warn", text, "keep at least 10 GiB for checkpoints, logs and pending uploads")
    return CheckResult(check, "pass", text)


def check_cache(path: str, limit: int, used: int, free: int) -> CheckResult:
    """Space for the disk cache, which holds `used` bytes already and grows to `limit`."""
    text = f"{limit / GIB:.1f} GiB wanted, {used / GIB:.1f} GiB there, {free / GIB:.1f} GiB free in {path}"
    if free < limit - used:
        return CheckResult("cache", "fail", text, "free some space, or lower --set cache_bytes")
    if free - (limit - used) < NO_DISK:
        return CheckResult("cache", "warn", text, "the full cache leaves hardly any space for anything else")
    return CheckResult("cache", "pass", text)


def check_memory(needed: int, available: int) -> CheckResult:
    """The memory of this machine is enough for its streams."""
    text = f"the streams take up to {needed / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available"
    if needed > available:
        advice = "end other programs, or use a smaller global batch or a larger machine"
        return CheckResult("memory", "fail", text, advice)
    if 2 * needed > available:
        return CheckResult("memory", "warn", text, "model, optimizer and compiler need memory too")
    return CheckResult("memory", "pass", text)


def check_open_files(limit: int) -> CheckResult:
    """Enough open files for shards, connections and logs at the same time."""
    text = "no limit" if limit == sys.maxsize else f"at most {limit}"
    if limit < MIN_OPEN_FILES:
        return CheckResult("open files", "fail", text, f"raise it: `ulimit -n {8 * MIN_OPEN_FILES}`")
    if limit < 2 * MIN_OPEN_FILES:
        return CheckResult("open files", "warn", text, f"hardly enough: `ulimit -n {8 * MIN_OPEN_FILES}`")
    return CheckResult("open files", "pass", text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
