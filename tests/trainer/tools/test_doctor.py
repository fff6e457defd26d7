"""The doctor as a whole on a tiny set, on disk and in the emulator."""

import json
import os
import subprocess
import sys

import pytest

from shardset.errors import ConfigError
from shardset.format import manifest as manifests
from shardset.program import FAILED, OK, USAGE
from shardset.storage.open import open_storage
from tests.makers.training import shard_set, tiny_config
from trainer import cli as command
from trainer.runtime import xla
from trainer.tools import doctor, probes
from trainer.tools.checks import CheckResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return shard_set(tmp_path_factory.mktemp("set"))


def flags(manifest: str, run_dir: str) -> list[str]:
    settings = ("image.size=8", "image.train_crop=pad", "image.eval_resize=8")
    words = ["--manifest", manifest, "--run-dir", run_dir, "--strategy", "single", "--global-batch-size", "8"]
    return [*words, *(f"--set={setting}" for setting in settings)]


def by_check(output: str) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in json.loads(output)["findings"]}


@pytest.fixture
def doctored(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the doctor for JSON on a machine that is in no cloud; returns exit code, findings by check, errors."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if not xla.is_installed():
        # The environment of the newest torch lies on top of one with torch_xla, which the doctor rightly objects to.
        installed = probes.versions()
        monkeypatch.setattr(probes, "versions", lambda: {**installed, "torch_xla": None})

    def run(*words: str) -> tuple[int, dict[str, dict[str, str]], str]:
        code = command.main(["doctor", *words, "--json"])
        output, errors = capsys.readouterr()
        return code, by_check(output), errors

    return run


def test_a_set_on_disk_end_to_end(doctored, folder, tmp_path):
    run_dir = tmp_path / "not" / "yet" / "run"
    code, found, _ = doctored(*flags(folder, str(run_dir)), "--want-images-per-second", "0.001")
    assert code == OK, found
    assert list(found) == [
        "python", "versions", "variables", "devices", "global batch", "ports", "open files",
        "disk for temporary files", "run folder", "disk for the run folder", "manifest", "shards", "lanes", "memory",
        "decode rate",
    ]  # fmt: skip
    assert "strategy single" in found["devices"]["found"]
    assert found["decode rate"]["status"] == "pass"
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


def test_the_manifest_is_loaded_once(folder, tmp_path, monkeypatch):
    loads, load = [], manifests.load
    monkeypatch.setattr(manifests, "load", lambda url: loads.append(url) or load(url))
    url = f"{folder}/manifest.json"  # no other test has loaded it by this name
    for finding in doctor.run_checks(tiny_config(url, tmp_path / "run"), None):
        if finding.check == "memory":
            break
    assert loads == [url]


@pytest.mark.slow
@pytest.mark.gcs
def test_a_set_in_a_bucket_end_to_end(doctored, folder, gcs_root):
    source, target = open_storage(folder), open_storage(f"{gcs_root}/set")
    for stat in source.list():
        with target.writer(stat.name) as writer:
            writer.write(source.read(stat.name))
    code, found, _ = doctored(*flags(f"{gcs_root}/set", f"{gcs_root}/run"))
    assert code == OK, found
    assert "reachable" in found["bucket bucket"]["found"]
    assert "unknown" in found["region of bucket"]["found"]
    assert found["clock"]["status"] == "pass"
    assert found["shards"]["status"] == "pass"
    assert list(open_storage(f"{gcs_root}/run").list()) == []
    target.delete("train/train-000002.tar")
    code, found, errors = doctored(*flags(f"{gcs_root}/set", f"{gcs_root}/run"))
    assert code == FAILED
    assert "1 missing, such as train/train-000002.tar" in found["shards"]["found"]
    assert "1 of " in errors
    assert "decode rate" not in found


@pytest.mark.gcs
def test_a_bucket_that_does_not_exist_is_one_failure_and_no_more(doctored, gcs_root):
    code, found, _ = doctored(*flags("gs://no-such-bucket/set", "gs://no-such-bucket/run"))
    assert code == FAILED
    assert [check for check, finding in found.items() if finding["status"] == "fail"] == ["bucket no-such-bucket"]
    assert "run folder" not in found


def test_a_cache_on_disk_is_measured_and_left_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "block").write_bytes(bytes(1 << 20))
    config = tiny_config(folder, tmp_path / "run", cache_dir=str(tmp_path / "cache"), cache_bytes=1 << 60)
    found = {finding.check: finding for finding in doctor.run_checks(config, None)}
    assert found["cache"].status == "fail"
    assert found["decode rate"].status == "pass"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["block", "cache"]


def test_what_is_wrong_fails_with_code_1_and_says_how_much(doctored, tmp_path, monkeypatch):
    monkeypatch.setenv("XRT_TPU_CONFIG", "x")
    (tmp_path / "file").write_text("")
    code, found, errors = doctored(*flags(str(tmp_path / "nothing"), str(tmp_path / "file" / "run")))
    assert code == FAILED
    failed = {check for check, finding in found.items() if finding["status"] == "fail"}
    assert {"variables", "run folder", "manifest"} <= failed
    assert errors.strip().splitlines()[-1].startswith(f"TrainingError: {len(failed)} of {len(found)} checks failed")


def test_damage_that_only_decoding_shows_is_a_failure(doctored, tmp_path):
    damaged = shard_set(tmp_path / "set")
    for shard in (tmp_path / "set/train").glob("*.tar"):
        data = bytearray(shard.read_bytes())
        data[600:640] = bytes(40)
        shard.write_bytes(data)
    code, found, _ = doctored(*flags(damaged, str(tmp_path / "run")))
    assert code == FAILED
    assert found["shards"]["status"] == "pass"
    assert found["decode rate"]["status"] == "fail"


def test_a_stream_that_can_not_be_is_a_failure(doctored, folder, tmp_path):
    code, found, _ = doctored(*flags(folder, str(tmp_path)), "--set", "eval_split=test")
    assert code == FAILED
    assert "eval_split is 'test'" in found["stream"]["found"]


@pytest.mark.slow
def test_a_run_folder_tells_its_configuration_and_what_its_devices_wanted(doctored, folder, tmp_path, capsys):
    run_dir, model = str(tmp_path / "run"), ["--model", "trainer.model:tiny_resnet"]
    assert command.main(["train", *flags(folder, run_dir), *model, "--epochs", "2"]) == OK
    capsys.readouterr()
    code, found, _ = doctored("--run-dir", run_dir)
    assert code in (OK, FAILED), "a busy machine may decode slower than so small a model wants"
    assert "train 52" in found["manifest"]["found"]
    assert "8 samples = 1 device x 8" in found["global batch"]["found"]
    assert "(the recorded run, epoch 2, " in found["decode rate"]["found"]
    code, found, _ = doctored(*flags(folder, run_dir), "--precision", "bf16", *model)
    assert code == OK
    assert "had precision=fp32, this one has bf16" in found["recorded run"]["found"]
    assert "nothing to compare with" in found["decode rate"]["found"]


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ('{"epochs": "many"}', "changed by hand")])
def test_a_damaged_record_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        probes.recorded_run(str(tmp_path))


@pytest.mark.slow
def test_a_recipe_alone_is_checked_as_far_as_it_goes(doctored, tmp_path):
    (tmp_path / "config.json").write_text("{")
    words = ["--recipe", "imagenet_resnet50", "--strategy", "single", "--set", "budget_bytes=1000000000"]
    code, found, _ = doctored(*words, "--run-dir", str(tmp_path))
    assert code == FAILED
    assert "4096 samples" in found["global batch"]["found"]
    assert found["memory"]["status"] == "fail"
    assert "manifest" not in found


def test_lines_for_people_end_with_a_count(capsys, monkeypatch):
    made = [
        CheckResult("a", "pass", "fine"),
        CheckResult("b", "warn", "so so", "look"),
        CheckResult("c", "pass", "fine"),
    ]
    doctor.report(iter(made), as_json=False)
    assert (
        capsys.readouterr().out == "pass  a: fine\nwarn  b: so so\n      look\npass  c: fine\n2 pass, 1 warn, 0 fail\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--want-images-per-second", "-1"], "is not a rate"),
        (["--want-images-per-second", "nan"], "is not a rate"),
        (["--recipe", "imagenet"], "did you mean"),
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


@pytest.mark.parametrize("words", [["--want-images-per-second", "many"], ["--manifset", "x"]])
def test_unknown_flags_are_usage_errors(words):
    with pytest.raises(SystemExit) as exit_code:
        command.main(["doctor", *words])
    assert exit_code.value.code == USAGE


@pytest.mark.slow
def test_the_program_itself_prints_and_ends_with_its_code(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "doctor", "--run-dir", str(tmp_path), "--strategy", "ddp"],
        capture_output=True, text=True, env=os.environ | {"GCE_METADATA_HOST": "127.0.0.1:9"},
    )  # fmt: skip
    assert done.returncode == FAILED
    assert "fail  devices: " in done.stdout
    assert "torchrun" in done.stdout
