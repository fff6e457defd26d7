"""From nothing to a trained model and back, with the real wheel, trainer and bucket; only the cloud is a stand-in."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from shardset.program import OK, PREEMPTED
from shardset.storage.open import open_storage
from tests.makers.cloud import Cloud
from tests.makers.training import shard_set
from trainer.record.log_files import METRICS, records
from trainer.tpu import commands

REPOSITORY = Path(__file__).parents[3]
PLACE = ["my-tpu", "--zone=us-central2-b", "--poll-seconds=0"]


def tpu(cloud: Cloud, verb: str, *words: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PJRT_", "XLA_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "tpu", verb, *PLACE, *words],
        cwd=cloud.folder,
        env=environment | {"OMP_NUM_THREADS": "1"} | cloud.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=900)
    return process.returncode, output


@pytest.mark.slow
def test_the_wheel_of_this_source_has_what_a_worker_runs(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("shardset", "pipelines", "trainer"):
        shutil.copytree(REPOSITORY / name, source / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    subprocess.run(commands.build_wheel(source, tmp_path / "out"), check=True)
    with zipfile.ZipFile(tmp_path / "out" / commands.WHEEL) as archive:
        assert {"trainer/tpu/worker.py", "trainer/tools/doctor.py", "shardset/storage/gcs.py"} <= set(
            archive.namelist()
        )
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        extras = archive.read(metadata).decode()
    assert "Provides-Extra: trainer" in extras
    assert "Provides-Extra: tpu" in extras


@pytest.mark.slow
@pytest.mark.gcs
def test_a_run_that_is_stopped_goes_on_and_its_logs_reach_the_bucket(tmp_path, gcs_root):
    source, target = open_storage(shard_set(tmp_path / "set")), open_storage(f"{gcs_root}/set")
    for stat in source.list():
        with target.writer(stat.name) as writer:
            writer.write(source.read(stat.name))
    (tmp_path / "cloud").mkdir()
    cloud = Cloud(tmp_path / "cloud", real=True)
    (home,) = cloud.ready("my-tpu", "v4-8", 1)
    run_dir = f"{gcs_root}/run"
    settings = ("image.size=8", "image.train_crop=pad", "image.eval_resize=8", "log_every_steps=1")
    flags = [f"--manifest={gcs_root}/set", f"--run-dir={run_dir}", "--strategy=single", "--global-batch-size=8"]
    flags += ["--model=trainer.model:tiny_resnet", *(f"--set={setting}" for setting in settings)]
    flags += ["--env=PJRT_DEVICE=CPU"]

    log = home / commands.FOLDER / commands.LOG
    first = tpu(cloud, "train", *flags, "--epochs=1000")
    while "epoch 3/" not in (log.read_text() if log.exists() else "") and first.poll() is None:
        time.sleep(0.05)
    assert ended(tpu(cloud, "stop"))[0] == OK
    code, output = ended(first)
    assert code == PREEMPTED, output
    assert "stopped by `tpu stop`" in output

    stopped = records(open_storage(run_dir).read(METRICS))[-1]["global_step"]
    second = tpu(cloud, "train", *flags, "--epochs=1000", f"--max-steps={stopped + 5}")
    code, output = ended(second)
    assert code == OK, output
    steps = [one["global_step"] for one in records(open_storage(run_dir).read(METRICS)) if one["kind"] == "step"]
    assert sorted(steps) == list(range(stopped + 5))

    assert ended(tpu(cloud, "logs"))[0] == OK
    assert "worker-0" in (cloud.folder / "tpu-logs/merged.log").read_text()
    code, output = ended(tpu(cloud, "delete", f"--run-dir={run_dir}"))
    assert code == OK
    assert "TPU VMs in this zone:\nnone" in output
