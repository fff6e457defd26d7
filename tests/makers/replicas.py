"""Several torch_xla replicas in one CPU process, which deadlock as torch_xla stands: a barrier and
a lock around sync.

Run as a script: `python -m tests.makers.replicas REPLICAS CONFIG_JSON` trains with strategy
replica.
"""

import json
import os
import sys
import threading
from typing import Any

_patching = threading.Lock()


def main(replicas: int, config_json: str) -> None:
    """Trains one run with that many replicas."""
    os.environ.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES=str(replicas),
        XLA_THREAD_POOL_SIZE=str(replicas),
        XLA_ENABLE_PARAM_ALIASING="0",
    )
    import torch_xla

    from trainer.runtime.launch import watched_launcher

    with watched_launcher(["127.0.0.1"], 0):
        torch_xla.launch(_replica, args=(replicas, config_json))


def _replica(index: int, replicas: int, config_json: str) -> None:
    """One replica: a thread of a process that torch_xla has started."""
    import torch_xla

    from trainer import config as configs
    from trainer import loop
    from trainer.runtime.launch import run_replica

    with _patching:
        if torch_xla.sync.__name__ != "serialised_sync":
            torch_xla.sync = _serialised(torch_xla.sync, replicas)
    run_replica(index, loop.train, configs.from_dict(json.loads(config_json)))


def _serialised(original: Any, replicas: int) -> Any:
    barrier, lock = threading.Barrier(replicas), threading.Lock()

    def serialised_sync(*args: Any, **options: Any) -> None:
        barrier.wait(timeout=600)
        with lock:
            original(*args, **options)

    return serialised_sync


if __name__ == "__main__":
    from tests.makers import replicas as itself

    itself.main(int(sys.argv[1]), sys.argv[2])
