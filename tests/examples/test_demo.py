"""The demo is a command like the others: given again it goes on, and Ctrl-C lets it end."""

import os
import signal
import subprocess
import sys

from examples.demo import write_digits
from tests.makers.documented import REPOSITORY


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
    demo = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert demo.stdout is not None
    assert demo.stdout.readline() == "started\n"
    os.killpg(demo.pid, signal.SIGINT)
    assert demo.communicate(timeout=600) == ("saved\n", "")
    assert demo.returncode == 130
