"""`python -m trainer doctor`: measures this machine for a run, and checks the results."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import Any

from shardset.errors import ShardsetError
from shardset.storage.open import bucket_of, is_address
from shardset.stream.stream import Stream
from trainer.config import TrainConfig
from trainer.data.loaded import load_once
from trainer.errors import TrainingError
from trainer.runtime import machine
from trainer.supervise import heartbeat
from trainer.tools import checks, probes, versions
from trainer.tools.checks import CheckResult, TargetRate
from trainer.tools.probes import Devices

PORTS = (8471, 8476, 8477, 8478, 8479, heartbeat.PORT)
"""TCP ports between the workers of a slice: 8471 of libtpu, those from 8476 on of libtpu with one process a chip, and
the one for heartbeats."""


def run_checks(config: TrainConfig, target: TargetRate | None) -> Iterator[CheckResult]:
    """Yields the result of each check of this machine for this run as soon as it is known.

    Without a target rate, takes that of the run in the run folder, if there is one.
    """
    num_chips = machine.num_chips()
    yield checks.check_python(sys.version_info[:2])
    yield versions.check_versions(probes.versions(), probes.pins(), num_chips)
    yield checks.check_variables(os.environ)
    devices = probes.devices(config.strategy)
    yield checks.check_devices(devices, num_chips)
    num_hosts = 1 if isinstance(devices, str) else devices.num_hosts
    if isinstance(devices, Devices):
        yield checks.check_batch(config.global_batch_size, config.accumulate, devices.num_devices)
    yield checks.check_ports(probes.ports(probes.workers(), PORTS))
    yield checks.check_open_files(probes.open_file_limit())
    temporary = tempfile.gettempdir()
    yield checks.check_disk("temporary files", temporary, probes.free_bytes(temporary))
    unreachable = yield from _check_buckets([config.manifest, config.run_dir])
    yield from _check_folders(config, unreachable)
    if config.manifest is None:
        yield checks.check_batches(config, num_hosts)
    elif bucket_of(config.manifest) not in unreachable:
        if target is None and bucket_of(config.run_dir) not in unreachable:
            target = yield from _recorded_target(config)
        yield from _check_data(config, target, num_hosts, devices)


def _check_buckets(urls: list[str | None]) -> Generator[CheckResult, None, set[str]]:
    """Yields results. Returns the unreachable buckets, which other checks then skip."""
    buckets = dict.fromkeys(bucket for url in urls if url and (bucket := bucket_of(url)))
    unreachable: set[str] = set()
    for bucket in buckets:
        location = probes.bucket_location(bucket)
        result = checks.check_bucket(bucket, location)
        yield result
        if result.status == "fail":
            unreachable.add(bucket)
        if isinstance(location, str):
            yield checks.check_region(bucket, location, probes.zone())
    if buckets:
        yield checks.check_clock(probes.clock_skew_s())
    return unreachable


def _check_folders(config: TrainConfig, unreachable: set[str]) -> Iterator[CheckResult]:
    if bucket_of(config.run_dir) not in unreachable:
        yield checks.check_run_dir(config.run_dir, probes.write_error(config.run_dir))
    if not is_address(config.run_dir):
        yield checks.check_disk("the run folder", config.run_dir, probes.free_bytes(config.run_dir))
    if config.cache_dir is not None and config.cache_bytes is not None:
        used, free = probes.used_bytes(config.cache_dir), probes.free_bytes(config.cache_dir)
        yield checks.check_cache(config.cache_dir, config.cache_bytes, used, free)


def _recorded_target(config: TrainConfig) -> Generator[CheckResult, None, TargetRate | None]:
    """Returns the target rate of the run in the run folder. Yields a warning if it has none that applies."""
    try:
        run = probes.recorded_run(config.run_dir)
    except ShardsetError as error:
        yield CheckResult("recorded run", "warn", str(error), "its rate is not compared with the one of this host")
        return None
    target = None if run is None else checks.target_of(run, config)
    if isinstance(target, str):
        yield CheckResult("recorded run", "warn", target, "give --want-images-per-second, or another --run-dir")
        return None
    return target


def _check_data(
    config: TrainConfig, target: TargetRate | None, num_hosts: int, devices: Devices | str
) -> Iterator[CheckResult]:
    assert config.manifest is not None
    try:
        manifest, storage = load_once(config.manifest)
    except ShardsetError as error:
        yield checks.check_manifest(error)
        return
    yield checks.check_manifest(manifest)
    shards = _attempt(
        "shards", lambda: checks.check_shards(manifest, {stat.name: stat.num_bytes for stat in storage.list()})
    )
    yield shards
    if shards.status != "fail":
        yield from _check_streams(config, target, num_hosts, devices)


def _check_streams(
    config: TrainConfig, target: TargetRate | None, num_hosts: int, devices: Devices | str
) -> Iterator[CheckResult]:
    # Imported late: it imports torch, and the checks before it must run without.
    from trainer.data.splits import open_data

    try:
        data = open_data(probes.uncached(config), 0, num_hosts)
    except ShardsetError as error:
        yield CheckResult("stream", "fail", str(error), "change the settings that the message names")
        return
    train, evaluation = data.train, data.evaluation
    assert isinstance(train, Stream)
    assert isinstance(evaluation, Stream)
    stream_bytes = train.memory.total + evaluation.memory.total
    yield checks.check_lanes(train.order.num_lanes, num_hosts)
    yield checks.check_memory(stream_bytes, machine.available_memory())
    yield _attempt(
        "decode rate",
        lambda: checks.check_rate(
            probes.decode_rate(config),
            target,
            num_hosts=num_hosts,
            global_batch_size=config.global_batch_size,
            num_images=config.epochs * data.augment_repeats * data.num_train_samples,
        ),
    )


def _attempt(name: str, check: Callable[[], CheckResult]) -> CheckResult:
    try:
        return check()
    except ShardsetError as error:
        return CheckResult(name, "fail", str(error), "see `python -m pipelines verify`")


def report(results: Iterator[CheckResult], *, as_json: bool) -> None:
    """Prints each result when it comes, or all of them as JSON. Raises TrainingError if a check failed."""
    printed: list[CheckResult] = []
    for result in results:
        printed.append(result)
        if not as_json:
            print(result, flush=True)
    counts = {status: sum(each.status == status for each in printed) for status in ("pass", "warn", "fail")}
    if as_json:
        values: dict[str, Any] = {"findings": [asdict(each) for each in printed], "counts": counts}
        print(json.dumps(values, indent=1))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["fail"]:
        raise TrainingError(f"{counts['fail']} of {len(printed)} checks failed; the advice is below each")
