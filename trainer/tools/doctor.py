"""`python -m trainer doctor`: is this machine ready for that run? Each check is a function of what a probe found."""

import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardset.errors import NotFound, ShardsetError, StorageError, TransientError
from shardset.format import manifest as manifests
from shardset.format.manifest import Manifest
from shardset.order.budget import PREFETCH
from shardset.storage.open import bucket_of, is_address
from shardset.storage.regions import holds, is_known
from trainer import config as configs
from trainer.config import TrainConfig
from trainer.errors import TrainingError
from trainer.supervise import heartbeat
from trainer.tools import probes
from trainer.tools.probes import Devices, PortState, Rate, Recorded
from trainer.tpu.commands import REFUSED

Status = Literal["pass", "warn", "fail"]

ALIKE = ("model.name", "model.stem", "model.norm", "image.size", "precision", "accumulate")
"""The settings on which the images a second of a device depend; those of a recorded run must be the same."""

MIN_BUSY = 0.1
"""Of a run that waits for data most of the time nobody knows what it would take: at most ten times what it took."""

PYTHONS = ((3, 11), (3, 13))
"""The oldest and the newest minor version of Python that this project and torch_xla have in common."""

TORCH = "2.9"
TORCHVISION = "0.24"
PORTS = (8471, 8476, 8477, 8478, 8479, heartbeat.PORT)
"""TCP between the workers of a slice: libtpu joins them by 8471, and with one process for each chip by 8476 onwards;
by the last one the processes of a run watch each other."""

MIB, GIB = 1 << 20, 1 << 30
LOW_DISK, NO_DISK = 10 * GIB, GIB
"""A checkpoint of ResNet-50 with momentum has 0.2 GB; `keep_checkpoints` and the best one are kept."""

MIN_OPEN_FILES = 512
"""256 shards, 64 files of the storage, 32 connections and their reserves."""

MAX_SKEW_S, BAD_SKEW_S = 5.0, 60.0
RESERVE = 1.2
SMALL_PART = 8
"""A TPU pads the batch of a device to a multiple of eight."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line: what was checked, how it stands, what was found, and what to do if something is wrong."""

    check: str
    status: Status
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.status}  {self.check}: {self.found}" + (f"\n      {self.advice}" if self.advice else "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the whole run is to read, and who says so."""

    images_per_second: float
    source: str


# --- the software ----------------------------------------------------------------------------------------------------


def check_python(version: tuple[int, int]) -> CheckResult:
    """Python itself."""
    low, high = PYTHONS
    text = f"{version[0]}.{version[1]}"
    if version < low:
        return CheckResult("python", "fail", text, f"use Python {low[0]}.{low[1]} or newer")
    if version > high:
        return CheckResult("python", "warn", text, f"torch_xla {TORCH} is built for up to {high[0]}.{high[1]}")
    return CheckResult("python", "pass", text)


def check_versions(installed: Mapping[str, str | None], pins: Mapping[str, str], num_chips: int) -> CheckResult:
    """torch, torch_xla, torchvision and libtpu are made for each other: a mix fails to load, or is slow."""
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    again = "install them together: pip install 'shardset[trainer" + (",tpu]'" if num_chips else "]'")
    torch, xla, vision, libtpu = (installed.get(name) for name in probes.DISTRIBUTIONS)
    if torch is None or not _is_of(torch, TORCH):
        return CheckResult("versions", "fail", text, f"torch {TORCH} is needed; {again}")
    if xla is not None and not _is_of(xla, TORCH):
        return CheckResult("versions", "fail", text, f"torch_xla must be of the same version as torch; {again}")
    if num_chips and (xla is None or libtpu is None):
        return CheckResult("versions", "fail", text, f"a TPU needs torch_xla and libtpu; {again}")
    if vision is not None and not _is_of(vision, TORCHVISION):
        return CheckResult("versions", "fail", text, f"torchvision {TORCHVISION} belongs to torch {TORCH}; {again}")
    if num_chips and libtpu != pins.get("libtpu", libtpu):
        advice = f"torch_xla {xla} was built for libtpu {pins['libtpu']}; another one can be slow or fail; {again}"
        return CheckResult("versions", "warn", text, advice)
    if xla is None:
        return CheckResult("versions", "warn", text, "without torch_xla there are the strategies ddp and single only")
    return CheckResult("versions", "pass", text)


def check_variables(environment: Mapping[str, str]) -> CheckResult:
    """Variables of older tutorials."""
    old = sorted(name for name in environment if name in REFUSED or name.startswith("XRT_"))
    if old:
        reasons = {REFUSED.get(name, REFUSED["XRT_TPU_CONFIG"]) for name in old}
        return CheckResult("variables", "fail", f"{', '.join(old)} set", f"unset: {'; '.join(sorted(reasons))}")
    device = environment.get("PJRT_DEVICE")
    if device is not None and device not in ("TPU", "CPU", "CUDA"):
        return CheckResult(
            "variables", "warn", f"PJRT_DEVICE={device}", "known are TPU, CPU and CUDA; or leave it unset"
        )
    return CheckResult(
        "variables", "pass", f"PJRT_DEVICE={device}" if device else "no old ones; PJRT_DEVICE is not set"
    )


# --- the devices -----------------------------------------------------------------------------------------------------


def check_devices(found: Devices | str, num_chips: int) -> CheckResult:
    """What a run would train on."""
    if isinstance(found, str):
        advice = "end what else uses the devices"
        if num_chips:
            advice += "; on a slice all workers have to look at the same time: `python -m trainer tpu doctor`"
        return CheckResult("devices", "fail", found, advice)
    each = found.num_devices // max(1, found.num_hosts)
    what = found.platform or found.kind.upper()
    text = f"{_count(found.num_hosts, 'host')} x {_count(each, what + ' device')}, strategy {found.strategy}"
    if what == "CPU" and num_chips:
        advice = "unset PJRT_DEVICE, or set it to TPU, and leave --strategy at auto"
        return CheckResult("devices", "fail", f"{text}, but this machine has {num_chips} TPU chips", advice)
    if what == "CPU":
        return CheckResult("devices", "warn", text, "there is no accelerator here; good enough for a smoke test")
    return CheckResult("devices", "pass", text)


def check_batch(global_batch_size: int, accumulate: int, num_devices: int) -> CheckResult:
    """The same whole number of samples for every device in every pass."""
    each, rest = divmod(global_batch_size, num_devices * accumulate)
    passes = f" in {accumulate} passes" if accumulate > 1 else ""
    if rest:
        unit = num_devices * accumulate
        sizes = " or ".join(str(size) for size in (each * unit, (each + 1) * unit) if size)
        text = f"{global_batch_size} samples do not divide over {_count(num_devices, 'device')}{passes}"
        return CheckResult("global batch", "fail", text, f"use --global-batch-size {sizes}")
    text = f"{global_batch_size} samples = {_count(num_devices, 'device')} x {each}{passes}"
    if each < SMALL_PART and num_devices > 1:
        return CheckResult("global batch", "warn", text, f"less than {SMALL_PART} a device leaves most of it idle")
    return CheckResult("global batch", "pass", text)


def check_lanes(num_lanes: int, num_hosts: int) -> CheckResult:
    """Lanes over hosts: each lane should have one reader."""
    text = f"{_count(num_lanes, 'lane')} over {_count(num_hosts, 'host')}"
    if num_lanes < num_hosts:
        advice = "several hosts read the same lanes, and each byte more than once; use a larger global batch"
        return CheckResult("lanes", "warn", text, advice)
    if num_lanes % num_hosts:
        return CheckResult("lanes", "warn", text, "they do not divide: lanes at the borders are read by two hosts")
    return CheckResult("lanes", "pass", text)


# --- storage ---------------------------------------------------------------------------------------------------------


def check_bucket(name: str, place: str | StorageError) -> CheckResult:
    """Whether a bucket answers at all."""
    check = f"bucket {name}"
    if isinstance(place, NotFound):
        return CheckResult(check, "fail", str(place), "check the name, and the project that you are logged in to")
    if isinstance(place, TransientError):
        return CheckResult(check, "fail", str(place), "check the network: is there a way to storage.googleapis.com?")
    if isinstance(place, StorageError):
        advice = "its objects may still be readable; to see its location takes the permission storage.buckets.get"
        return CheckResult(check, "warn", f"its location is unknown: {place}", advice)
    return CheckResult(check, "pass", f"reachable, in {place}")


def check_region(bucket: str, place: str, zone: str | None) -> CheckResult:
    """A bucket in another region is slower and costs money for each byte."""
    check = f"region of {bucket}"
    if zone is None:
        advice = "this is no machine of Compute Engine, as far as can be seen; train where the bucket is"
        return CheckResult(check, "warn", f"{place}; the region of this machine is unknown", advice)
    region = zone.rpartition("-")[0]
    text = f"{place}, this machine in {zone}"
    if holds(place, region):
        itself = region in place.lower().split("+")
        return CheckResult(check, "pass", text if itself else f"{text}, which is part of it")
    if not is_known(place):
        return CheckResult(check, "warn", text, "see whether this location includes this machine's region")
    return CheckResult(check, "fail", text, f"every byte would cross regions: copy the data to a bucket in {region}")


def check_manifest(manifest: Manifest | ShardsetError) -> CheckResult:
    """The manifest is there and whole."""
    if isinstance(manifest, ShardsetError):
        return CheckResult("manifest", "fail", str(manifest), "see `python -m pipelines verify`")
    parts = (f"{name} {split.num_samples} in {split.num_shards} shards" for name, split in manifest.splits.items())
    return CheckResult("manifest", "pass", f"{', '.join(parts)}; digest {manifest.digest[:12]}")


def check_shards(manifest: Manifest, sizes: Mapping[str, int]) -> CheckResult:
    """Every shard and index that the manifest lists is there in its size."""
    wanted = wanted_sizes(manifest)
    missing = [name for name in wanted if name not in sizes]
    wrong = [name for name, size in wanted.items() if name in sizes and sizes[name] != size]
    if missing or wrong:
        parts = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(wrong)} of another size, such as {wrong[0]}"] if wrong else []
        advice = "`python -m pipelines build` with the same options mends it, `python -m pipelines verify` says more"
        return CheckResult("shards", "fail", "; ".join(parts), advice)
    others = [name for name in sizes if name.endswith(".tar") and name not in wanted]
    text = f"all {len(wanted)} files there, {sum(wanted.values()) / MIB:,.0f} MiB"
    if others:
        advice = "they are not part of the set and are not read; are they left from another build?"
        return CheckResult("shards", "warn", f"{text}; {len(others)} more tars, such as {others[0]}", advice)
    return CheckResult("shards", "pass", text)


def wanted_sizes(manifest: Manifest) -> dict[str, int]:
    """By name, the size of every file of a shard set."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {file.path: file.num_bytes for shard in shards for file in (shard, shard.index)}


def check_run_dir(url: str, refused: str | None) -> CheckResult:
    """Checkpoints and logs can be written."""
    if refused is not None:
        return CheckResult(
            "run folder", "fail", refused, f"checkpoints could not be saved in {url}; choose another one"
        )
    return CheckResult("run folder", "pass", f"{url}: written, read back and deleted")


def check_clock(skew_s: float | None) -> CheckResult:
    """Tokens and signatures carry the time."""
    if skew_s is None:
        return CheckResult(
            "clock", "warn", "Cloud Storage gave no date", "its clock could not be compared with this one"
        )
    text = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} Cloud Storage"
    advice = "set the clock: `sudo systemctl restart systemd-timesyncd` (or chrony)"
    if abs(skew_s) > BAD_SKEW_S:
        return CheckResult("clock", "fail", text, f"tokens will be refused; {advice}")
    if abs(skew_s) > MAX_SKEW_S:
        return CheckResult("clock", "warn", text, advice)
    return CheckResult("clock", "pass", text)


# --- capacity --------------------------------------------------------------------------------------------------------


def check_rate(
    rate: Rate, wanted: Wanted | None, *, num_hosts: int, global_batch_size: int, num_images: int
) -> CheckResult:
    """What all hosts together decode, against what the devices want; the whole run reads `num_images`."""
    total = rate.images_per_second * num_hosts
    steps = total / global_batch_size
    text = f"{rate.images_per_second:,.0f} images/s on this host ({rate.num_images} images)"
    if num_hosts > 1:
        text += f", {total:,.0f} on {num_hosts}"
    text += f", {steps:.2g} steps/s, {num_images / max(1e-9, total) / 3600:.2g} h for all epochs"
    if wanted is None:
        advice = "give --want-images-per-second, or the --run-dir of a run like this one"
        return CheckResult("decode rate", "pass", f"{text}; nothing to compare with: {advice}")
    text += f"; wanted {wanted.images_per_second:,.0f} ({wanted.source})"
    advice = "smaller stored images (`--resize`), more or larger hosts; see docs/decoding.md"
    if total < wanted.images_per_second:
        return CheckResult("decode rate", "fail", text, f"the devices will wait; {advice}")
    if total < RESERVE * wanted.images_per_second:
        return CheckResult("decode rate", "warn", text, f"there is no reserve; {advice}")
    return CheckResult("decode rate", "pass", text)


def wanted_of(run: Recorded, config: TrainConfig) -> Wanted | str | None:
    """What the devices of a recorded run took without waiting for data, or why that says nothing about `config`.

    The best epoch counts; the first one only if there is no other, because it compiles. None of a run without epochs.
    """
    other = [key for key in ALIKE if configs.value(run.config, key) != configs.value(config, key)]
    if other:
        here, there = configs.value(config, other[0]), configs.value(run.config, other[0])
        return f"the run there had {other[0]}={there}, this one has {here}: its rate says nothing about this one"
    epochs = [record for record in run.records if record["kind"] == "epoch"]
    ended = [record["reduced_global_rate"] for record in run.records if record["kind"] == "final"]
    if run.config.fake_data and ended:
        return Wanted(ended[-1], "the recorded run with --fake-data")
    if not epochs:
        return None
    busy = {record["epoch"]: 1 - record["input_wait_percent"] / 100 for record in epochs}
    rates = [(record["reduced_global_rate"] / max(MIN_BUSY, busy[record["epoch"]]), record) for record in epochs]
    rate, best = max(rates[1:] or rates, key=lambda pair: pair[0])
    waited = f"{best['input_wait_percent']:.0f} % of waiting for data taken out"
    return Wanted(rate, f"the recorded run, epoch {best['epoch'] + 1}, {waited}")


def check_batches(config: TrainConfig, num_hosts: int) -> CheckResult:
    """Without a shard set: what its decoded batches alone take of a stream's budget."""
    needed = (PREFETCH + 2) * (config.global_batch_size // num_hosts) * 3 * config.image.size**2
    text = f"decoded batches take {needed / MIB:,.0f} MiB of a budget of {config.budget_bytes / MIB:,.0f} MiB a stream"
    if needed > config.budget_bytes:
        return CheckResult("memory", "fail", text, "raise --set budget_bytes, use more hosts or a smaller global batch")
    return CheckResult("memory", "pass", f"{text}; the rest depends on the data: name it with --manifest")


def check_ports(states: Mapping[str, PortState]) -> CheckResult:
    """Workers of a slice reach each other; before a run nobody listens yet, so `closed` is what is hoped for."""
    filtered = [place for place, state in states.items() if state == "filtered"]
    opened = [place for place, state in states.items() if state == "open"]
    if filtered:
        text = f"{len(filtered)} of {len(states)} give no answer, such as {filtered[0]}"
        advice = "a firewall swallows it: allow all TCP between the workers (the rule default-allow-internal does)"
        return CheckResult("ports", "fail", text, advice)
    if opened:
        advice = "a training runs already, or one was left behind: `python -m trainer tpu stop`"
        return CheckResult("ports", "warn", f"somebody listens on {opened[0]}", advice)
    return CheckResult("ports", "pass", f"{len(states)} reachable and free" if states else "one host: none needed")


def check_disk(name: str, path: str, free: int) -> CheckResult:
    """Room for checkpoints and logs."""
    check, text = f"disk for {name}", f"{free / GIB:.1f} GiB free in {path}"
    if free < NO_DISK:
        return CheckResult(check, "fail", text, "free some space: a checkpoint would not fit")
    if free < LOW_DISK:
        return CheckResult(
            check, "warn", text, "keep at least 10 GiB for checkpoints, logs and what waits for its upload"
        )
    return CheckResult(check, "pass", text)


def check_cache(path: str, wanted: int, held: int, free: int) -> CheckResult:
    """Room for the blocks that are kept on a local disk, besides those that are there already."""
    text = f"{wanted / GIB:.1f} GiB wanted, {held / GIB:.1f} GiB there, {free / GIB:.1f} GiB free in {path}"
    if free < wanted - held:
        return CheckResult("cache", "fail", text, "free some space, or lower --set cache_bytes")
    if free - (wanted - held) < NO_DISK:
        return CheckResult("cache", "warn", text, "once it is full, there is hardly room for anything else")
    return CheckResult("cache", "pass", text)


def check_memory(wanted: int, available: int) -> CheckResult:
    """What the streams of this host hold at most."""
    text = f"the streams hold up to {wanted / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available"
    if wanted > available:
        return CheckResult(
            "memory", "fail", text, "end other programs, use a smaller global batch, or a larger machine"
        )
    if 2 * wanted > available:
        return CheckResult("memory", "warn", text, "model, optimizer and compiler need theirs too")
    return CheckResult("memory", "pass", text)


def check_open_files(limit: int) -> CheckResult:
    """Shards, connections and logs are open at the same time."""
    text = "no limit" if limit == sys.maxsize else f"at most {limit}"
    if limit < MIN_OPEN_FILES:
        return CheckResult("open files", "fail", text, f"raise it: `ulimit -n {8 * MIN_OPEN_FILES}`")
    if limit < 2 * MIN_OPEN_FILES:
        return CheckResult("open files", "warn", text, f"hardly enough: `ulimit -n {8 * MIN_OPEN_FILES}`")
    return CheckResult("open files", "pass", text)


# --- all of it -------------------------------------------------------------------------------------------------------


def findings(config: TrainConfig, wanted: Wanted | None) -> Iterator[CheckResult]:
    """Every check of this machine for this run, one after the other as they are made.

    Without `wanted` it is what a run in the run folder took, if there is one.
    """
    num_chips = probes.num_chips()
    yield check_python(sys.version_info[:2])
    yield check_versions(probes.versions(), probes.pins(), num_chips)
    yield check_variables(probes.environment())
    devices = probes.devices(config.strategy)
    yield check_devices(devices, num_chips)
    num_hosts = 1 if isinstance(devices, str) else devices.num_hosts
    if isinstance(devices, Devices):
        yield check_batch(config.global_batch_size, config.accumulate, devices.num_devices)
    yield check_ports(probes.ports(probes.workers(), PORTS))
    yield check_open_files(probes.open_file_limit())
    yield check_disk("temporary files", probes.temporary_folder(), probes.free_bytes(probes.temporary_folder()))
    unreachable = yield from _check_buckets([config.manifest, config.run_dir])
    yield from _check_folders(config, unreachable)
    if config.manifest is None:
        yield check_batches(config, num_hosts)
    elif bucket_of(config.manifest) not in unreachable:
        if wanted is None and bucket_of(config.run_dir) not in unreachable:
            wanted = yield from _wanted(config)
        yield from _check_data(config, wanted, num_hosts)


def _check_buckets(urls: list[str | None]) -> Generator[CheckResult, None, set[str]]:
    """Yields findings; returns the buckets that can't be reached, of which more need not be asked."""
    buckets = dict.fromkeys(bucket for url in urls if url and (bucket := bucket_of(url)))
    unreachable: set[str] = set()
    for bucket in buckets:
        place = probes.bucket_place(bucket)
        finding = check_bucket(bucket, place)
        yield finding
        if finding.status == "fail":
            unreachable.add(bucket)
        if isinstance(place, str):
            yield check_region(bucket, place, probes.zone())
    if buckets:
        yield check_clock(probes.clock_skew_s())
    return unreachable


def _check_folders(config: TrainConfig, unreachable: set[str]) -> Iterator[CheckResult]:
    if bucket_of(config.run_dir) not in unreachable:
        yield check_run_dir(config.run_dir, probes.write_refused(config.run_dir))
    if not is_address(config.run_dir):
        yield check_disk("the run folder", config.run_dir, probes.free_bytes(config.run_dir))
    if config.cache_dir is not None and config.cache_bytes is not None:
        held, free = probes.held_bytes(config.cache_dir), probes.free_bytes(config.cache_dir)
        yield check_cache(config.cache_dir, config.cache_bytes, held, free)


def _wanted(config: TrainConfig) -> Generator[CheckResult, None, Wanted | None]:
    """What the run in the run folder took; yields a finding where there is one that says nothing."""
    try:
        run = probes.recorded(config.run_dir)
    except ShardsetError as error:
        yield CheckResult("recorded run", "warn", str(error), "its rate is not compared with this host's")
        return None
    found = None if run is None else wanted_of(run, config)
    if isinstance(found, str):
        yield CheckResult("recorded run", "warn", found, "give --want-images-per-second, or another --run-dir")
        return None
    return found


def _check_data(config: TrainConfig, wanted: Wanted | None, num_hosts: int) -> Iterator[CheckResult]:
    assert config.manifest is not None
    try:
        manifest, storage = manifests.load(config.manifest)
    except ShardsetError as error:
        yield check_manifest(error)
        return
    yield check_manifest(manifest)
    shards = _tried("shards", lambda: check_shards(manifest, probes.sizes(storage)))
    yield shards
    if shards.status != "fail":
        yield from _check_streams(config, wanted, num_hosts)


def _check_streams(config: TrainConfig, wanted: Wanted | None, num_hosts: int) -> Iterator[CheckResult]:
    try:
        data = probes.sharded(config, num_hosts)
    except ShardsetError as error:
        yield CheckResult("stream", "fail", str(error), "change the settings that it names")
        return
    yield check_lanes(data.train.order.num_lanes, num_hosts)
    yield check_memory(data.train.memory.total + data.evaluation.memory.total, probes.available_memory())
    yield _tried(
        "decode rate",
        lambda: check_rate(
            probes.decode_rate(config),
            wanted,
            num_hosts=num_hosts,
            global_batch_size=config.global_batch_size,
            num_images=config.epochs * data.plan.samples,
        ),
    )


def _tried(check: str, look: Callable[[], CheckResult]) -> CheckResult:
    try:
        return look()
    except ShardsetError as error:
        return CheckResult(check, "fail", str(error), "see `python -m pipelines verify`")


def report(found: Iterator[CheckResult], *, as_json: bool) -> None:
    """Prints every finding as it comes, or all as JSON; raises TrainingError if one failed."""
    made: list[CheckResult] = []
    for finding in found:
        made.append(finding)
        if not as_json:
            print(finding, flush=True)
    counts = {status: sum(each.status == status for each in made) for status in ("pass", "warn", "fail")}
    if as_json:
        values: dict[str, Any] = {"findings": [asdict(each) for each in made], "counts": counts}
        print(json.dumps(values, indent=1))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["fail"]:
        raise TrainingError(f"{counts['fail']} of {len(made)} checks failed; what to do stands below each")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _is_of(version: str, series: str) -> bool:
    return version.split("+")[0].split(".")[:2] == series.split(".")
