"""Each check of the doctor with what makes it pass, warn and fail, and the doctor as a whole on a
tiny set.
"""

import json
from typing import Any

import pytest

from shardset.errors import StorageError
from shardset.program import FAILED, OK
from tests.makers.training import shard_set, tiny_flags
from tests.makers.web import WebServer
from trainer import cli as command
from trainer.runtime import xla
from trainer.tools import doctor, probes
from trainer.tools.doctor import CheckResult
from trainer.tools.probes import Devices

INSTALLED = {
    "torch": "2.9.1+cpu",
    "torchvision": "0.24.1",
    "torch_xla": "2.9.0",
    "torch_tpu": None,
    "libtpu": "0.0.21",
}
TORCHTPU = {"torch": "2.15.0", "torch_xla": None, "torch_tpu": "0.2.0"}


def versions(num_chips, **changes: str | None):
    return doctor.check_versions(INSTALLED | changes, num_chips)


def devices(kind, num_hosts=1, num_devices=1):
    return Devices("spmd", kind, num_hosts, num_devices)


def bucket(location, zone):
    return doctor.check_bucket("b", location, zone)


@pytest.mark.parametrize(
    ("result", "status", "text"),
    [
        (versions(4), "pass", "libtpu 0.0.21"),
        (versions(0, libtpu=None), "pass", "libtpu missing"),
        (versions(0, torch_xla=None), "pass", "torch_xla missing"),
        (versions(4, **TORCHTPU), "pass", "torch_tpu 0.2.0"),
        (versions(4, **TORCHTPU | {"torch_xla": "2.9.0"}), "fail", "same version as torch"),
        (versions(4, torch_xla=None), "fail", "a TPU needs libtpu, and"),
        (versions(0, torch="2.90.0"), "fail", "same version as torch"),
        (
            doctor.check_devices(devices("TPU", 4, 16), 4),
            "pass",
            "4 hosts x 4 TPU devices, strategy spmd",
        ),
        (doctor.check_devices(devices("CUDA"), 0), "pass", "1 host x 1 CUDA device"),
        (doctor.check_devices(devices("CPU"), 0), "warn", "smoke test"),
        (doctor.check_devices(devices("CPU"), 4), "fail", "4 TPU chips"),
        (doctor.check_devices("ConfigError: RANK is not set", 0), "fail", "RANK"),
        (bucket("US-WEST1", "us-west1-a"), "pass", "us-west1-a"),
        (bucket("US-EAST1", "us-west1-a"), "fail", "cross regions"),
        (bucket("NAM4", "us-central1-a"), "warn", "cross regions"),
        (bucket("EUROPE-WEST4", None), "warn", "no zone"),
        (bucket(StorageError("gs://b: 403"), "us-central2-b"), "warn", "storage.buckets.get"),
        (doctor.check_ports({}), "pass", "one host"),
        (doctor.check_ports({"a:1": "closed", "b:1": "closed"}), "pass", "2 reachable"),
        (doctor.check_ports({"a:1": "closed", "b:1": "open"}), "warn", "b:1"),
        (doctor.check_ports({"a:1": "open", "b:1": "filtered"}), "fail", "b:1 gives no answer"),
        (doctor.check_rate(1000, None, 4, 500), "pass", "8 steps/s on 4 hosts"),
        (doctor.check_rate(1000, 4000, 4, 500), "pass", "wanted 4,000"),
        (doctor.check_rate(1000, 1001, 1, 500), "fail", "will wait"),
    ],
)
def test_a_check_says_what_it_found_and_unless_it_passed_what_to_do(result, status, text):
    assert result.status == status, result
    assert (result.advice != "") == (status != "pass")
    assert text in str(result)


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture
def examined(capsys, monkeypatch):
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
def known_devices(monkeypatch):
    """One device, which no process has to look for."""
    monkeypatch.setattr(probes, "devices", lambda _: devices("CPU"))


def test_a_set_on_disk_end_to_end(examined, manifest, tmp_path):
    cache = ["--set", f"cache_dir={tmp_path / 'cache'}", "--set", "cache_bytes=1000000"]
    words = [
        *tiny_flags(manifest, tmp_path / "not" / "yet" / "run"),
        *cache,
        "--want-images-per-second",
        "0.001",
    ]
    code, found, _ = examined(*words)
    assert code == OK, found
    assert list(found) == [
        "versions", "devices", "ports", "run folder", "manifest", "decode rate",
    ]  # fmt: skip
    assert "strategy single" in found["devices"]["found"]
    assert "train 52 in 4 shards" in found["manifest"]["found"]
    assert found["decode rate"]["status"] == "pass"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


@pytest.mark.usefixtures("known_devices")
def test_a_set_on_a_web_server_passes(examined, tmp_path):
    shard_set(tmp_path / "set")
    with WebServer(tmp_path) as server:
        code, found, _ = examined(*tiny_flags(f"{server.url}/set", tmp_path / "run"))
    assert code == OK, found
    assert found["manifest"]["status"] == found["decode rate"]["status"] == "pass"


@pytest.mark.usefixtures("known_devices")
def test_what_is_wrong_fails_with_code_1_and_says_how_much(examined, tmp_path):
    (tmp_path / "file").write_text("")
    code, found, errors = examined(*tiny_flags(tmp_path / "nothing", tmp_path / "file" / "run"))
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
    code, found, _ = examined(*tiny_flags(damaged, tmp_path / "run"))
    assert code == FAILED
    assert found["manifest"]["status"] == "pass"
    assert found["decode rate"]["status"] == "fail"


@pytest.mark.slow
def test_a_run_folder_tells_its_configuration(examined, manifest, tmp_path, capsys):
    run_dir = str(tmp_path / "run")
    assert command.main(["train", *tiny_flags(manifest, run_dir), "--epochs", "1"]) == OK
    capsys.readouterr()
    code, found, _ = examined("--run-dir", run_dir)
    assert code == OK
    assert "train 52" in found["manifest"]["found"]


def test_lines_for_people_end_with_a_count(capsys):
    made = [CheckResult("a", "pass", "fine"), CheckResult("b", "warn", "so so", "look")]
    doctor.report(iter(made), as_json=False)
    assert (
        capsys.readouterr().out
        == "pass  a: fine\nwarn  b: so so\n      look\n1 pass, 1 warn, 0 fail\n"
    )
