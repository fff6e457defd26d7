"""One host of two, each of which trains alone, while they watch each other as the hosts of a TPU
slice do.

Run as a script: `python -m tests.makers.hosts PORT WORKER CONFIG_JSON`, with strategy spmd or
replica. XLA:CPU can't join processes to one world, so what is real here is all but the collectives:
the addresses from the environment of a TPU VM, the launcher, the heartbeat server, its clients, and
how everything ends.
"""

import functools
import json
import os
import sys

from shardset.program import FAILED
from trainer import config as configs
from trainer import loop
from trainer.config import TrainConfig
from trainer.errors import PeerLost
from trainer.runtime import launch, xla
from trainer.runtime.base import Runtime
from trainer.runtime.heartbeat import HeartbeatClient, HeartbeatTiming

NUM_HOSTS = 2
PATIENT = HeartbeatTiming(join_s=600.0)
"""The devices of a slice come up together; these processes come when they can."""


def main(port: int, worker: int, config: TrainConfig) -> None:
    """Trains, and watches the other one."""
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="1",
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="127.0.0.1,127.0.0.1",
        TPU_WORKER_ID=str(worker),
    )
    train = functools.partial(train_beside, worker, port)
    if config.strategy == "spmd":
        launch.launch(config, train)
        return
    with launch.watched_launcher(*xla.tpu_workers(), port=port, timing=PATIENT):
        xla.spawn_replicas(_replica, train, config)


def _replica(index: int, train: launch.Worker, config: TrainConfig) -> None:
    with launch.running("replica", config.precision) as alone:
        train(alone, config)


def train_beside(worker: int, port: int, alone: Runtime, config: TrainConfig) -> None:
    """A run by itself that says of itself that it is one of two."""
    alone.host, alone.num_hosts = worker, NUM_HOSTS
    alone.heartbeat = HeartbeatClient(PATIENT)
    if isinstance(alone, xla.Spmd):
        alone.heartbeat_port = port
    with launch.watched(alone):
        alone.host, alone.num_hosts = 0, 1
        loop.train(alone, config)


if __name__ == "__main__":
    from tests.makers import hosts as itself

    try:
        itself.main(int(sys.argv[1]), int(sys.argv[2]), configs.from_dict(json.loads(sys.argv[3])))
    except PeerLost as error:
        print(f"PeerLost: {error}", file=sys.stderr)
        sys.exit(FAILED)
