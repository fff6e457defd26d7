"""Each check with what makes it pass, warn and fail."""

import dataclasses
import sys
from typing import Any

import pytest

from shardset.errors import ManifestError, NotFound, StorageError, TransientError
from shardset.format.manifest import Manifest, load
from tests.makers.training import shard_set, tiny_config
from trainer.recipes import RECIPES
from trainer.tools import checks, versions
from trainer.tools.checks import CheckResult, TargetRate
from trainer.tools.probes import DecodeRate, Devices, RecordedRun

GOOD = {"torch": "2.9.1+cpu", "torchvision": "0.24.1", "torch_xla": "2.9.0", "torch_tpu": None, "libtpu": "0.0.21"}
NEWEST = {"torch": "2.15.0", "torchvision": "0.29.2", "torch_xla": None}
TORCHTPU = NEWEST | {"torch_tpu": "0.2.0", "libtpu": "0.0.52"}
PINS = {"libtpu": "0.0.21", "jax": "0.7.1"}
GIB = 1 << 30


def stands(finding: CheckResult, status: str, *texts: str) -> None:
    assert finding.status == status, finding
    assert (finding.advice != "") == (status != "pass"), "what is wrong says what to do, what is right does not"
    for text in texts:
        assert text in str(finding)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="module")
def manifest(folder: str) -> Manifest:
    return load(folder)[0]


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "pass"), ((3, 13), "pass"), ((3, 14), "warn")]
)
def test_python(version, status):
    stands(checks.check_python(version), status)


@pytest.mark.parametrize(
    ("changes", "num_chips", "status", "text"),
    [
        ({}, 4, "pass", "libtpu 0.0.21"),
        ({"libtpu": None}, 0, "pass", "libtpu missing"),
        ({"torchvision": None}, 0, "pass", "torchvision missing"),
        ({"libtpu": "0.0.30"}, 4, "warn", "built for libtpu 0.0.21"),
        ({"libtpu": "0.0.30"}, 0, "pass", "libtpu 0.0.30"),
        ({"torch_xla": None}, 0, "pass", "back end for TPUs: none, so the strategies are ddp and single"),
        ({}, 0, "pass", "back end for TPUs: torch_xla"),
        (NEWEST, 0, "pass", "torch 2.15.0"),
        (NEWEST | {"torch": "2.16.0"}, 0, "warn", "newer than 2.15"),
        (NEWEST | {"torchvision": "0.24.1"}, 0, "fail", "torchvision 0.29 belongs to torch 2.15"),
        ({"torch": "2.12.0", "torchvision": "0.27.0", "torch_xla": None}, 0, "pass", "torchvision 0.27.0"),
        (TORCHTPU, 4, "pass", "back end for TPUs: torch_tpu"),
        (
            TORCHTPU | {"torch": "2.10.0"},
            4,
            "fail",
            "needs torch 2.11 to 2.15; install them together: pip install 'shardset[trainer,torchtpu]'",
        ),
        (TORCHTPU | {"torch_xla": "2.9.0"}, 4, "fail", "keep one of them"),
        ({"torch_xla": None}, 4, "fail", "a TPU needs"),
        ({"libtpu": None}, 4, "fail", "pip install 'shardset[trainer,tpu]'"),
        ({"torch": None}, 0, "fail", "torch 2.9 or newer is needed"),
        ({"torch": "2.8.1"}, 0, "fail", "torch 2.9 or newer is needed"),
        ({"torch": "2.13.0"}, 0, "fail", "torch 2.9 is needed"),
        ({"torch": "2.90.0"}, 0, "fail", "torch 2.9 is needed"),
        ({"torch_xla": "2.8.0"}, 0, "fail", "same version as torch"),
        ({"torchvision": "0.25.0"}, 0, "fail", "torchvision 0.24"),
    ],
)
def test_versions(changes, num_chips, status, text):
    stands(versions.check_versions(GOOD | changes, PINS, num_chips), status, text)


@pytest.mark.parametrize(
    ("environment", "status", "text"),
    [
        ({}, "pass", "not set"),
        ({"PJRT_DEVICE": "TPU"}, "pass", "PJRT_DEVICE=TPU"),
        ({"PJRT_DEVICE": "tpu"}, "warn", "TPU, CPU and CUDA"),
        ({"XLA_USE_BF16": "1"}, "fail", "--precision bf16"),
        ({"XLA_DOWNCAST_BF16": "0", "PJRT_DEVICE": "TPU"}, "fail", "--precision bf16"),
        ({"XRT_TPU_CONFIG": "tpu_worker;0;10.0.0.1:8470"}, "fail", "XRT is gone"),
        ({"XRT_WORKERS": "x"}, "fail", "XRT_WORKERS"),
    ],
)
def test_variables(environment, status, text):
    stands(checks.check_variables(environment), status, text)


TPU = Devices(strategy="spmd", kind="xla", platform="TPU", num_hosts=4, num_devices=16)
CPU = Devices(strategy="spmd", kind="xla", platform="CPU", num_hosts=1, num_devices=1)


@pytest.mark.parametrize(
    ("found", "num_chips", "status", "text"),
    [
        (TPU, 4, "pass", "4 hosts x 4 TPU devices, strategy spmd"),
        (dataclasses.replace(CPU, kind="cuda", platform=None), 0, "pass", "1 host x 1 CUDA device"),
        (CPU, 0, "warn", "smoke test"),
        (dataclasses.replace(CPU, kind="cpu", platform=None), 0, "warn", "smoke test"),
        (CPU, 4, "fail", "4 TPU chips"),
        ("ConfigError: strategy ddp: RANK is not set", 0, "fail", "RANK"),
        ("the devices did not come up within 180 s", 4, "fail", "tpu doctor"),
    ],
)
def test_devices(found, num_chips, status, text):
    stands(checks.check_devices(found, num_chips), status, text)


@pytest.mark.parametrize(
    ("size", "accumulate", "num_devices", "status", "text"),
    [
        (4096, 1, 16, "pass", "16 devices x 256"),
        (4096, 2, 16, "pass", "16 devices x 128 in 2 passes"),
        (4, 1, 1, "pass", "1 device x 4"),
        (64, 1, 16, "warn", "less than 8"),
        (100, 1, 16, "warn", "112 rows, 12 of them of weight 0"),
        (100, 1, 16, "warn", "--global-batch-size 96 or 112"),
        (8, 1, 16, "fail", "--global-batch-size 16"),
        (48, 2, 16, "warn", "32 or 64"),
        (24, 2, 16, "fail", "--global-batch-size 32, or fewer devices"),
    ],
)
def test_global_batch(size, accumulate, num_devices, status, text):
    stands(checks.check_batch(size, accumulate, num_devices), status, text)


@pytest.mark.parametrize(
    ("num_lanes", "num_hosts", "status"), [(8, 4, "pass"), (1, 1, "pass"), (8, 3, "warn"), (2, 4, "warn")]
)
def test_lanes(num_lanes, num_hosts, status):
    stands(checks.check_lanes(num_lanes, num_hosts), status)


@pytest.mark.parametrize(
    ("place", "status", "text"),
    [
        ("EUROPE-WEST4", "pass", "reachable, in EUROPE-WEST4"),
        (StorageError("gs://b: 403"), "warn", "storage.buckets.get"),
        (NotFound("gs://b: no such bucket"), "fail", "check the name"),
        (TransientError("gs://b: timed out"), "fail", "check the network"),
    ],
)
def test_bucket(place, status, text):
    stands(checks.check_bucket("b", place), status, text)


@pytest.mark.parametrize(
    ("place", "zone", "status", "text"),
    [
        ("US-CENTRAL2", "us-central2-b", "pass", "us-central2-b"),
        ("US-EAST1+US-WEST1", "us-west1-a", "pass", "us-west1-a"),
        ("US", "us-central2-b", "pass", "part of it"),
        ("EU", "europe-west4-a", "pass", "part of it"),
        ("NAM4", "us-central1-a", "pass", "part of it"),
        ("NAM4", "us-west1-a", "fail", "cross regions"),
        ("NAM9", "us-central1-a", "warn", "includes"),
        ("EU", "europe-west2-a", "fail", "cross regions"),
        ("EUROPE-WEST4", None, "warn", "unknown"),
        ("EUROPE-WEST4", "us-central2-b", "fail", "a bucket in us-central2"),
        ("EU", "us-central2-b", "fail", "cross regions"),
        ("US-EAST1+US-WEST1", "us-central2-b", "fail", "cross regions"),
    ],
)
def test_region(place, zone, status, text):
    stands(checks.check_region("b", place, zone), status, text)


def test_manifest(manifest):
    stands(checks.check_manifest(manifest), "pass", "train 52 in 4 shards", "val 21", manifest.digest[:12])
    stands(checks.check_manifest(ManifestError("gs://b/manifest.json: no manifest there")), "fail", "no manifest")


def test_shards(manifest):
    sizes = checks.expected_sizes(manifest)
    name = "train/train-000001.tar"
    assert len(sizes) == 16
    stands(checks.check_shards(manifest, sizes | {"manifest.json": 1}), "pass", "all 16 files")
    stands(checks.check_shards(manifest, sizes | {"train/train-000009.tar": 5}), "warn", "1 more tars", "000009")
    stands(checks.check_shards(manifest, {k: v for k, v in sizes.items() if k != name}), "fail", "1 missing", name)
    for wrong in (0, sizes[name] - 1, sizes[name] + 1):
        stands(checks.check_shards(manifest, sizes | {name: wrong}), "fail", "1 of another size", name)
    stands(checks.check_shards(manifest, {}), "fail", "16 missing")
    index = manifest.split("val").shards[0].index.path
    stands(checks.check_shards(manifest, sizes | {index: 0}), "fail", index)


def test_run_folder():
    stands(checks.check_run_dir("gs://b/run", None), "pass", "gs://b/run")
    stands(checks.check_run_dir("gs://b/run", "403: may not create"), "fail", "403", "gs://b/run")


@pytest.mark.parametrize(
    ("skew_s", "status", "text"),
    [
        (0.4, "pass", "0.4 s ahead"),
        (-4.9, "pass", "4.9 s behind"),
        (None, "warn", "no date"),
        (-30.0, "warn", "30.0 s behind"),
        (3600.0, "fail", "tokens"),
    ],
)
def test_clock(skew_s, status, text):
    stands(checks.check_clock(skew_s), status, text)


@pytest.mark.parametrize(
    ("wanted", "num_hosts", "status", "text"),
    [
        (None, 1, "pass", "give --want-images-per-second, or the --run-dir of a run like this one"),
        (None, 4, "pass", "8 steps/s, 0.28 h for all epochs"),
        (800.0, 1, "pass", "1,000 images/s on this host"),
        (3900.0, 4, "warn", "4,000 on 4"),
        (1000.0, 1, "warn", "no reserve"),
        (1001.0, 1, "fail", "will wait"),
    ],
)
def test_decode_rate(wanted, num_hosts, status, text):
    found = checks.check_rate(
        DecodeRate(1000.0, 2000), None if wanted is None else TargetRate(wanted, "as given"),
        num_hosts=num_hosts, global_batch_size=500, num_images=4_000_000,
    )  # fmt: skip
    stands(found, status, text, *([] if wanted is None else [f"wanted {wanted:,.0f} (as given)"]))


def recorded(*epochs: tuple[float, float], final: float | None = None, **changes: Any) -> RecordedRun:
    """A run of epochs with a rate and a percentage of waiting each."""
    records: list[dict[str, Any]] = [{"kind": "step", "global_step": 0, "global_rate": 1e9}]
    records += [
        {"kind": "epoch", "epoch": number, "reduced_global_rate": rate, "input_wait_percent": waited}
        for number, (rate, waited) in enumerate(epochs)
    ]
    records += [] if final is None else [{"kind": "final", "reduced_global_rate": final}]
    return RecordedRun(config=tiny_config(None, "run", **changes), records=records)


@pytest.mark.parametrize(
    ("run", "rate", "source"),
    [
        (recorded((100.0, 0.0), (300.0, 50.0), (400.0, 0.0)), 600.0, "epoch 2, 50 % of waiting for data taken out"),
        (recorded((100.0, 20.0)), 125.0, "epoch 1, 20 %"),
        (recorded((900.0, 0.0), (100.0, 0.0)), 100.0, "epoch 2"),
        (recorded((10.0, 100.0)), 100.0, "epoch 1, 100 %"),
        (recorded((100.0, 20.0), final=777.0, fake_data=True), 777.0, "the recorded run with --fake-data"),
    ],
)
def test_what_a_recorded_run_took_without_waiting_is_wanted(run, rate, source):
    found = checks.target_of(run, tiny_config("set", "run"))
    assert isinstance(found, TargetRate)
    assert found.images_per_second == pytest.approx(rate)
    assert source in found.source


def test_a_run_without_an_epoch_or_with_another_model_wants_nothing():
    config = tiny_config("set", "run")
    assert checks.target_of(recorded(), config) is None
    assert checks.target_of(recorded(final=5.0), config) is None
    other = dataclasses.replace(config, precision="bf16")
    assert "had precision=fp32, this one has bf16" in checks.target_of(recorded((1.0, 0.0)), other)
    smaller = dataclasses.replace(config, image=dataclasses.replace(config.image, size=6))
    assert "image.size=8, this one has 6" in checks.target_of(recorded((1.0, 0.0)), smaller)


@pytest.mark.parametrize(("num_hosts", "status"), [(1, "fail"), (8, "pass")])
def test_the_batches_of_a_recipe_are_weighed_without_a_shard_set(num_hosts, status):
    # 4 batches of 4,096 images of 224 x 224 x 3 bytes
    config = dataclasses.replace(RECIPES["imagenet_resnet50"](), budget_bytes=2 << 30)
    stands(checks.check_batches(config, num_hosts), status, f"{2352 // num_hosts:,} MiB of")


def test_ports():
    states: dict[str, Any] = {"10.0.0.1:8471": "closed", "10.0.0.2:8471": "closed"}
    stands(checks.check_ports({}), "pass", "one host")
    stands(checks.check_ports(states), "pass", "2 reachable")
    stands(checks.check_ports(states | {"10.0.0.2:8476": "open"}), "warn", "10.0.0.2:8476", "tpu stop")
    stands(
        checks.check_ports(states | {"10.0.0.2:8476": "open", "10.0.0.3:8471": "filtered"}),
        "fail",
        "1 of 4",
        "firewall",
    )


@pytest.mark.parametrize(("free", "status"), [(20 * GIB, "pass"), (5 * GIB, "warn"), (GIB // 2, "fail"), (0, "fail")])
def test_disk(free, status):
    stands(checks.check_disk("the run folder", "/run", free), status, "/run")


@pytest.mark.parametrize(
    ("held", "free", "status"),
    [
        (0, 21 * GIB, "pass"),
        (20 * GIB, 2 * GIB, "pass"),
        (0, 20 * GIB, "warn"),
        (20 * GIB, 0, "warn"),
        (0, GIB, "fail"),
    ],
)
def test_cache(held, free, status):
    stands(checks.check_cache("/cache", 20 * GIB, held, free), status, "20.0 GiB wanted", "/cache")


@pytest.mark.parametrize(("available", "status"), [(5 * GIB, "pass"), (3 * GIB, "warn"), (GIB, "fail")])
def test_memory(available, status):
    stands(checks.check_memory(2 * GIB, available), status, "2,048 MiB")


@pytest.mark.parametrize(
    ("limit", "status", "text"),
    [(sys.maxsize, "pass", "no limit"), (4096, "pass", "4096"), (600, "warn", "ulimit"), (256, "fail", "ulimit")],
)
def test_open_files(limit, status, text):
    stands(checks.check_open_files(limit), status, text)
