"""The demo is a command like the others: given again it goes on, and Ctrl-C lets it end."""

import hashlib
import os
import signal
import subprocess
import sys

import pytest

from examples import demo
from examples.demo import write_digits
from shardset.errors import SourceError, TransientError
from tests.makers.documented import REPOSITORY
from tests.makers.web import WebServer


def test_digits_are_written_once_so_that_a_second_demo_finds_the_input_of_its_shards(tmp_path):
    def times():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}

    (tmp_path / "raw.part" / "digit-0").mkdir(parents=True)
    (tmp_path / "raw.part" / "digit-0" / "0000.png").write_bytes(b"half")
    folder = write_digits(tmp_path / "raw")
    before = times()
    assert len(before) == 1797
    assert min(path.stat().st_size for path in before) > 60
    assert write_digits(folder) == folder
    assert times() == before
    assert list(tmp_path.iterdir()) == [folder]


def test_an_archive_is_kept_only_if_it_is_the_published_one(tmp_path, monkeypatch):
    (tmp_path / "cifar").write_bytes(b"whole")
    monkeypatch.setattr(demo, "CIFAR10_MD5", hashlib.md5(b"whole").hexdigest())
    with WebServer(tmp_path) as web:
        monkeypatch.setattr(demo, "CIFAR10_URL", f"{web.url}/cifar")
        path = demo.fetch_cifar10(tmp_path / "kept")
        assert path.read_bytes() == b"whole"
        assert demo.fetch_cifar10(tmp_path / "kept") == path
        assert len(web.seen) == 1
        (tmp_path / "cifar").write_bytes(b"cut")
        with pytest.raises(SourceError, match=r"MD5 is .*; run it again"):
            demo.fetch_cifar10(tmp_path / "other")
        assert not (tmp_path / "other" / path.name).exists()
    with pytest.raises(TransientError, match=r"127\.0\.0\.1.*; run it again"):
        demo.fetch_cifar10(tmp_path / "other")


def test_ctrl_c_leaves_a_command_of_the_demo_the_time_that_it_takes_to_save():
    command = (
        "import sys, time\n"
        "try:\n    print('started', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    time.sleep(1); print('saved', flush=True); sys.exit(130)"
    )
    start = (
        "import sys; from examples.demo import follow; sys.exit(follow([sys.executable, '-c',"
        f" {command!r}]))"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "started\n"
    os.killpg(running.pid, signal.SIGINT)
    assert running.communicate(timeout=600) == ("saved\n", "")
    assert running.returncode == 130
