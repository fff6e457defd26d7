"""A Flink cluster on this machine: `python -m scripts.flink fetch|up|down`.

One job manager and two task managers, each with a pool of Python workers beside it, as on machines
of their own: in each task manager `localhost` is another address (127.0.0.2, 127.0.0.3), and
its pool listens there. So one `--environment_config=localhost:50000` names the pool beside each of
them, here as on a cluster. Linux only; needs Java 11 or 17, and Maven for `fetch`.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts import job_server
from scripts.job_server import REPOSITORY, RUNNER_VERSION

FOLDER = REPOSITORY / ".tools" / "flink"
FLINK_VERSION = "1.19"
JOB_SERVER = f"job-server-{FLINK_VERSION}-{RUNNER_VERSION}.jar"

_JOB_MANAGER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
_JOB_SERVER = "org.apache.beam.runners.flink.FlinkJobServerDriver"
_ARTIFACTS = [
    f"org.apache.beam:beam-runners-flink-{FLINK_VERSION}:{RUNNER_VERSION}",
    "org.slf4j:slf4j-simple:1.7.30",
]
# Flink reaches into these by reflection; its own start scripts open them too.
_OPENED = (
    "java.lang",
    "java.util",
    "java.util.concurrent",
    "java.nio",
    "java.net",
    "java.io",
    "java.text",
    "java.time",
)
_CONFIG = """\
jobmanager.rpc.address: 127.0.0.1
jobmanager.rpc.port: {rpc}
jobmanager.bind-host: 127.0.0.1
jobmanager.memory.process.size: 1g
rest.address: 127.0.0.1
rest.bind-address: 127.0.0.1
rest.port: {rest}
io.tmp.dirs: {temporary}
taskmanager.host: 127.0.0.1
taskmanager.bind-host: 127.0.0.1
taskmanager.numberOfTaskSlots: 1
taskmanager.cpu.cores: 1.0
taskmanager.memory.framework.heap.size: 128m
taskmanager.memory.framework.off-heap.size: 128m
taskmanager.memory.task.heap.size: 256m
taskmanager.memory.task.off-heap.size: 0
taskmanager.memory.managed.size: 128m
taskmanager.memory.network.min: 256m
taskmanager.memory.network.max: 256m
taskmanager.memory.jvm-metaspace.size: 192m
taskmanager.memory.jvm-overhead.min: 128m
taskmanager.memory.jvm-overhead.max: 128m
heartbeat.interval: 2000
heartbeat.timeout: 10000
"""


class FlinkError(Exception):
    """The cluster can't be started or stopped; says what to do."""


def fetch(folder: Path = FOLDER) -> Path:
    """Flink and Beam's runner for it from Maven Central (152 MB, once), as one job server jar;
    returns that jar.
    """
    return job_server.fetch(folder / JOB_SERVER, _JOB_SERVER, _ARTIFACTS)


@dataclass
class Cluster:
    """Processes that look like a job manager and `num_machines` machines with a task manager and
    workers each.

    `folder` takes configuration and logs. A context manager: everything is stopped at the end of
    the block.
    """

    folder: Path
    jar: Path
    rest_port: int = 8081
    rpc_port: int = 6123
    pool_port: int = 50000
    num_machines: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def flags(self) -> list[str]:
        """What `shardset build` needs to run on this cluster."""
        return [
            "--runner=FlinkRunner",
            f"--flink_master=localhost:{self.rest_port}",
            f"--flink_version={FLINK_VERSION}",
            f"--flink_job_server_jar={self.jar}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{self.pool_port}",
            f"--parallelism={self.num_machines}",
        ]

    def start(self) -> None:
        """Starts everything and waits until all task managers have registered."""
        for name in ("conf", "log", "temporary"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        config = _CONFIG.format(
            rest=self.rest_port, rpc=self.rpc_port, temporary=self.folder / "temporary"
        )
        (self.folder / "conf" / "flink-conf.yaml").write_text(config)
        self._java("jobmanager", _JOB_MANAGER, 512, ["--executionMode", "cluster"])
        for machine in range(1, self.num_machines + 1):
            self._start_machine(machine)
        self._wait_until_whole()

    def restart_machine(self, machine: int) -> None:
        """Brings a killed machine back and waits for it."""
        self._start_machine(machine)
        self._wait_until_whole()

    def kill_machine(self, machine: int) -> None:
        """What a power cut does to the machine with this number, counted from 1: task manager and
        workers are gone.
        """
        for name in (f"taskmanager-{machine}", f"workers-{machine}"):
            _kill(self.pids.pop(name), signal.SIGKILL)

    def stop(self) -> None:
        """Stops every process, and removes what they kept: 450 MB of jars each."""
        while self.pids:
            _kill(self.pids.popitem()[1], signal.SIGKILL)
        shutil.rmtree(self.folder / "temporary", ignore_errors=True)

    def _start_machine(self, machine: int) -> None:
        address = f"127.0.0.{machine + 1}"
        hosts = self.folder / "conf" / f"hosts-{machine}"
        hosts.write_text(f"{address} localhost\n127.0.0.1 {socket.gethostname()}\n")
        self._start(
            f"workers-{machine}",
            [sys.executable, "-m", "scripts.flink_workers", f"{address}:{self.pool_port}"],
        )
        self._java(
            f"taskmanager-{machine}", _TASK_MANAGER, 384, [], [f"-Djdk.net.hosts.file={hosts}"]
        )

    def _java(
        self,
        name: str,
        main: str,
        heap_mib: int,
        words: Sequence[str],
        properties: Sequence[str] = (),
    ) -> None:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        memory = [
            f"-Xmx{heap_mib}m",
            "-XX:MaxDirectMemorySize=640m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
        ]
        classes = [
            "-cp",
            f"{self.jar.parent / 'jars'}/*",
            main,
            "--configDir",
            str(self.folder / "conf"),
        ]
        self._start(name, ["java", *opened, *memory, *properties, *classes, *words])

    def _start(self, name: str, command: Sequence[str]) -> None:
        # The pool starts its workers as `python`, which must be this one.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self.environment, "PATH": path}
        with (self.folder / "log" / name).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pids[name] = process.pid

    def _wait_until_whole(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self._num_machines_up() != self.num_machines:
            dead = [name for name, pid in self.pids.items() if not _lives(pid)]
            if dead or time.monotonic() > deadline:
                raise FlinkError(
                    f"{', '.join(dead) or 'the cluster'} did not come up; see {self.folder / 'log'}"
                )
            time.sleep(0.2)

    def _num_machines_up(self) -> int:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.rest_port}/overview", timeout=10
            ) as reply:
                return json.load(reply)["taskmanagers"]
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(pid: int, number: signal.Signals) -> None:
    """Sends the signal to a process that we started and to all that it started."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def up(rest_port: int, pool_port: int) -> None:
    """Starts a cluster that stays until `down`, and prints how to build on it."""
    if (FOLDER / "run" / "pids.json").exists():
        raise FlinkError("a cluster is up already; stop it with `make flink-down`")
    cluster = Cluster(FOLDER / "run", fetch(), rest_port=rest_port, pool_port=pool_port)
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    (FOLDER / "run" / "pids.json").write_text(json.dumps(cluster.pids))
    print(f"http://localhost:{rest_port} is up; build on it with\n  shardset build ... \\")
    print("      " + " ".join(cluster.flags()))


def down() -> None:
    """Stops the cluster that `up` started."""
    pids = FOLDER / "run" / "pids.json"
    if not pids.exists():
        raise FlinkError("no cluster is up; start one with `make flink-up`")
    for pid in json.loads(pids.read_text()).values():
        _kill(pid, signal.SIGTERM)
    pids.unlink()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.flink", description="A Flink cluster on this machine."
    )
    parser.add_argument("verb", choices=["fetch", "up", "down"])
    parser.add_argument("--rest-port", type=int, default=8081)
    parser.add_argument(
        "--pool-port",
        type=int,
        default=50000,
        help="of the Python workers beside each task manager",
    )
    args = parser.parse_args(argv)
    verbs: dict[str, Callable[[], object]] = {
        "fetch": fetch,
        "up": lambda: up(args.rest_port, args.pool_port),
        "down": down,
    }
    try:
        verbs[args.verb]()
    except (FlinkError, job_server.FetchError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
