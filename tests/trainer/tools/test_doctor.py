"""Each check of the doctor with what makes it pass, warn and fail, and the doctor as a whole on a
tiny set.
"""

import json
from typing import Any

import pytest

from shardset.errors import NotFound, StorageError, TransientError
from shardset.format import manifest as manifests
from shardset.program import FAILED, OK, USAGE
from shardset.storage.open import open_storage
from tests.makers.training import shard_set
from tests.makers.web import WebServer
from trainer import cli as command
from trainer.runtime import xla
from trainer.tools import doctor, probes
from trainer.tools.doctor import CheckResult
from trainer.tools.probes import Devices

GOOD = {
    "torch": "2.9.1+cpu",
    "torchvision": "0.24.1",
    "torch_xla": "2.9.0",
    "torch_tpu": None,
    "libtpu": "0.0.21",
}
NEWEST = {"torch": "2.15.0", "torchvision": "0.24.1", "torch_xla": None}
TORCHTPU = NEWEST | {"torch_tpu": "0.2.0"}
PINS = {"libtpu": "0.0.21", "torchvision": "0.24.1", "jax": "0.7.1"}


def assert_result(result: CheckResult, status: str, *texts: str) -> None:
    assert result.status == status, result
    assert (result.advice != "") == (status != "pass"), (
        "what is wrong says what to do, what is right does not"
    )
    for text in texts:
        assert text in str(result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"))


# --- each check -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_chips", "status", "text"),
    [
        ({}, 4, "pass", "libtpu 0.0.21; back end for TPUs: torch_xla"),
        ({"libtpu": None}, 0, "pass", "libtpu missing"),
        ({"torch_xla": None}, 0, "pass", "back end for TPUs: none"),
        (TORCHTPU, 4, "pass", "back end for TPUs: torch_tpu"),
        (NEWEST | {"torch": "2.16.0"}, 0, "warn", "newest torch that is tested is 2.15"),
        ({"libtpu": "0.0.30"}, 4, "fail", "libtpu 0.0.21 belongs to"),
        ({"torchvision": "0.25.0"}, 0, "fail", "torchvision 0.24.1 belongs to"),
        (TORCHTPU | {"torch_xla": "2.9.0"}, 4, "fail", "keep one of them"),
        (TORCHTPU | {"libtpu": None}, 4, "fail", "pip install 'shardset[trainer,torchtpu]'"),
        ({"torch_xla": None}, 4, "fail", "pip install 'shardset[trainer,tpu]'"),
        ({"torch": "2.8.1"}, 0, "fail", "torch 2.9 or newer is needed"),
        ({"torch": "2.90.0"}, 0, "fail", "same version as torch"),
    ],
)
def test_versions(changes, num_chips, status, text):
    assert_result(doctor.check_versions(GOOD | changes, PINS, num_chips), status, text)


def devices(kind: str, platform: str | None, num_hosts: int = 1, num_devices: int = 1) -> Devices:
    return Devices(
        strategy="spmd", kind=kind, platform=platform, num_hosts=num_hosts, num_devices=num_devices
    )


@pytest.mark.parametrize(
    ("found", "num_chips", "status", "text"),
    [
        (devices("xla", "TPU", 4, 16), 4, "pass", "4 hosts x 4 TPU devices, strategy spmd"),
        (devices("cuda", None), 0, "pass", "1 host x 1 CUDA device"),
        (devices("xla", "CPU"), 0, "warn", "smoke test"),
        (devices("cpu", None), 0, "warn", "smoke test"),
        (devices("xla", "CPU"), 4, "fail", "4 TPU chips"),
        ("ConfigError: strategy ddp: RANK is not set", 0, "fail", "RANK"),
    ],
)
def test_devices(found, num_chips, status, text):
    assert_result(doctor.check_devices(found, num_chips), status, text)


@pytest.mark.parametrize(
    ("size", "accumulate", "num_devices", "status", "text"),
    [
        (4096, 1, 16, "pass", "16 devices, 256 each"),
        (4096, 2, 16, "pass", "16 devices in 2 passes, 128 each"),
        (64, 1, 16, "warn", "less than 8"),
        (100, 1, 16, "warn", "112 rows, 12 of them of weight 0"),
        (48, 2, 16, "warn", "32 or 64"),
        (8, 1, 16, "fail", "--global-batch-size 16"),
        (24, 2, 16, "fail", "--global-batch-size 32, or fewer devices"),
    ],
)
def test_global_batch(size, accumulate, num_devices, status, text):
    assert_result(doctor.check_batch(size, accumulate, num_devices), status, text)


@pytest.mark.parametrize(
    ("location", "zone", "status", "text"),
    [
        ("US-CENTRAL2", "us-central2-b", "pass", "us-central2-b"),
        ("NAM4", "us-central1-a", "warn", "includes"),
        ("EUROPE-WEST4", None, "warn", "unknown"),
        ("EUROPE-WEST4", "us-central2-b", "fail", "a bucket in us-central2"),
        (StorageError("gs://b: 403"), "us-central2-b", "warn", "storage.buckets.get"),
        (NotFound("gs://b: no such bucket"), "us-central2-b", "fail", "check the name"),
        (TransientError("gs://b: timed out"), "us-central2-b", "fail", "check the network"),
    ],
)
def test_bucket(location, zone, status, text):
    assert_result(doctor.check_bucket("b", location, zone), status, text)


@pytest.mark.parametrize(
    ("states", "status", "texts"),
    [
        ({}, "pass", ["one host"]),
        ({"a:8471": "closed", "b:8471": "closed"}, "pass", ["2 reachable"]),
        ({"a:8471": "closed", "b:8476": "open"}, "warn", ["b:8476", "running already"]),
        ({"a:8476": "open", "b:8471": "filtered"}, "fail", ["1 of 2", "firewall"]),
    ],
)
def test_ports(states, status, texts):
    assert_result(doctor.check_ports(states), status, *texts)


def test_manifest(folder):
    manifest = manifests.load(folder)[0]
    sizes = doctor.expected_sizes(manifest)
    name, index = "train/train-000001.tar", manifest.split("val").shards[0].index.path
    others = sizes | {"manifest.json": 1, "train/train-000009.tar": 5}
    assert_result(
        doctor.check_manifest(manifest, others), "pass", "train 52 in 4 shards", "all 16 files"
    )
    without = {each: size for each, size in sizes.items() if each != name}
    assert_result(doctor.check_manifest(manifest, without), "fail", "1 missing", name)
    for wrong in (0, sizes[name] - 1, sizes[name] + 1):
        assert_result(
            doctor.check_manifest(manifest, sizes | {name: wrong}),
            "fail",
            "1 of another size",
            name,
        )
    assert_result(doctor.check_manifest(manifest, sizes | {index: 0}), "fail", index)
    assert_result(doctor.check_manifest(manifest, {}), "fail", "16 missing")


@pytest.mark.parametrize(
    ("wanted", "num_hosts", "status", "text"),
    [
        (None, 4, "pass", "4,000 on 4, 8 steps/s; compare it by --want-images-per-second"),
        (800.0, 1, "pass", "1,000 images/s on this host, 2 steps/s; wanted 800"),
        (3900.0, 4, "warn", "wanted 3,900"),
        (1000.0, 1, "warn", "no reserve"),
        (1001.0, 1, "fail", "will wait"),
    ],
)
def test_decode_rate(wanted, num_hosts, status, text):
    assert_result(doctor.check_rate(1000.0, wanted, num_hosts, global_batch_size=500), status, text)


# --- the whole ------------------------------------------------------------------------------------


def flags(manifest: str, run_dir: str) -> list[str]:
    settings = ("image.size=8", "image.train_crop=pad", "image.eval_resize=8")
    words = [
        "--manifest",
        manifest,
        "--run-dir",
        run_dir,
        "--strategy",
        "single",
        "--global-batch-size",
        "8",
    ]
    return [*words, *(f"--set={setting}" for setting in settings)]


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the doctor for JSON on a machine that is in no cloud; returns exit code, findings by
    check, errors.
    """
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if not xla.is_installed():
        # The environment of the newest torch lies on top of one with torch_xla, which the doctor
        # rightly objects to.
        installed = probes.versions()
        monkeypatch.setattr(probes, "versions", lambda: {**installed, "torch_xla": None})

    def run(*words: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        code = command.main(["doctor", *words, "--json"])
        output, errors = capsys.readouterr()
        return (
            code,
            {finding["check"]: finding for finding in json.loads(output)["findings"]},
            errors,
        )

    return run


@pytest.fixture
def known_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, which no process has to look for."""
    monkeypatch.setattr(probes, "devices", lambda _: devices("cpu", None))


def test_a_set_on_disk_end_to_end(examined, folder, tmp_path):
    cache = ["--set", f"cache_dir={tmp_path / 'cache'}", "--set", "cache_bytes=1000000"]
    words = [
        *flags(folder, str(tmp_path / "not" / "yet" / "run")),
        *cache,
        "--want-images-per-second",
        "0.001",
    ]
    code, found, _ = examined(*words)
    assert code == OK, found
    assert list(found) == [
        "versions",
        "devices",
        "global batch",
        "ports",
        "run folder",
        "manifest",
        "decode rate",
    ]
    assert "strategy single" in found["devices"]["found"]
    assert found["decode rate"]["status"] == "pass"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


@pytest.mark.usefixtures("known_devices")
def test_a_set_on_a_web_server_is_compared_file_by_file(examined, tmp_path):
    shard_set(tmp_path / "set")
    with WebServer(tmp_path) as server:
        code, found, _ = examined(*flags(f"{server.url}/set", str(tmp_path / "run")))
        assert code == OK, found
        assert "all 16 files there" in found["manifest"]["found"]
        (tmp_path / "set/train/train-000002.tar").unlink()
        code, found, _ = examined(*flags(f"{server.url}/set", str(tmp_path / "run")))
    assert code == FAILED
    assert found["manifest"]["found"] == "1 missing, such as train/train-000002.tar"


@pytest.mark.slow
@pytest.mark.gcs
def test_a_set_in_a_bucket_end_to_end(examined, folder, gcs_root):
    source, target = open_storage(folder), open_storage(f"{gcs_root}/set")
    for stat in source.list():
        with target.writer(stat.name) as writer:
            writer.write(source.read(stat.name))
    code, found, _ = examined(*flags(f"{gcs_root}/set", f"{gcs_root}/run"))
    assert code == OK, found
    assert "unknown" in found["bucket bucket"]["found"]
    assert found["manifest"]["status"] == "pass"
    assert list(open_storage(f"{gcs_root}/run").list()) == []
    target.delete("train/train-000002.tar")
    code, found, errors = examined(*flags(f"{gcs_root}/set", f"{gcs_root}/run"))
    assert code == FAILED
    assert "1 missing, such as train/train-000002.tar" in found["manifest"]["found"]
    assert "1 of " in errors
    assert "decode rate" not in found


@pytest.mark.gcs
@pytest.mark.usefixtures("known_devices")
def test_a_bucket_that_does_not_exist_is_one_failure_and_no_more(examined, gcs_root):
    code, found, _ = examined(*flags("gs://no-such-bucket/set", "gs://no-such-bucket/run"))
    assert code == FAILED
    assert [check for check, finding in found.items() if finding["status"] == "fail"] == [
        "bucket no-such-bucket"
    ]
    assert "run folder" not in found


@pytest.mark.usefixtures("known_devices")
def test_what_is_wrong_fails_with_code_1_and_says_how_much(examined, tmp_path):
    (tmp_path / "file").write_text("")
    code, found, errors = examined(
        *flags(str(tmp_path / "nothing"), str(tmp_path / "file" / "run"))
    )
    assert code == FAILED
    failed = {check for check, finding in found.items() if finding["status"] == "fail"}
    assert failed == {"run folder", "manifest"}
    assert (
        errors.strip()
        .splitlines()[-1]
        .startswith(f"TrainingError: 2 of {len(found)} checks failed")
    )


@pytest.mark.usefixtures("known_devices")
def test_damage_that_only_decoding_shows_is_a_failure(examined, tmp_path):
    damaged = shard_set(tmp_path / "set")
    for shard in (tmp_path / "set/train").glob("*.tar"):
        data = bytearray(shard.read_bytes())
        data[600:640] = bytes(40)
        shard.write_bytes(data)
    code, found, _ = examined(*flags(damaged, str(tmp_path / "run")))
    assert code == FAILED
    assert found["manifest"]["status"] == "pass"
    assert found["decode rate"]["status"] == "fail"


@pytest.mark.usefixtures("known_devices")
def test_settings_that_do_not_suit_the_data_are_a_failure(examined, folder, tmp_path):
    code, found, _ = examined(*flags(folder, str(tmp_path)), "--set", "eval_split=test")
    assert code == FAILED
    assert "eval_split is 'test'" in found["stream"]["found"]


@pytest.mark.slow
def test_a_run_folder_tells_its_configuration(examined, folder, tmp_path, capsys):
    run_dir, model = str(tmp_path / "run"), ["--model", "trainer.model:tiny_resnet"]
    assert command.main(["train", *flags(folder, run_dir), *model, "--epochs", "1"]) == OK
    capsys.readouterr()
    code, found, _ = examined("--run-dir", run_dir)
    assert code == OK
    assert "train 52" in found["manifest"]["found"]
    assert "8 samples over 1 device, 8 each" in found["global batch"]["found"]


def test_lines_for_people_end_with_a_count(capsys):
    made = [CheckResult("a", "pass", "fine"), CheckResult("b", "warn", "so so", "look")]
    doctor.report(iter(made), as_json=False)
    assert (
        capsys.readouterr().out
        == "pass  a: fine\nwarn  b: so so\n      look\n1 pass, 1 warn, 0 fail\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--want-images-per-second", "-1"], "is not a rate"),
        (["--set", "epoch=1"], "did you mean"),
        (["--run-dir", "damaged"], "damaged/config.json: not JSON"),
    ],
)
def test_wrong_usage_is_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    assert command.main(["doctor", *words]) == USAGE
    assert message in capsys.readouterr().err
