"""Beam's pool of Python workers at one address: `python -m scripts.flink_workers 127.0.0.2:50000`.

`python -m apache_beam.runners.worker.worker_pool_main` is the same for a separate machine; it
takes the port on all addresses, so that two of them can't run beside each other.
"""

import sys

import grpc
from apache_beam.portability.api import beam_fn_api_pb2_grpc
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer
from apache_beam.utils import thread_pool_executor


def serve(address: str) -> grpc.Server:
    """Starts the pool; each worker that a task manager asks for is a separate process."""
    server = grpc.server(
        thread_pool_executor.shared_unbounded_instance(), options=[("grpc.so_reuseport", 0)]
    )
    pool = BeamFnExternalWorkerPoolServicer(use_process=True)
    beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(pool, server)
    server.add_insecure_port(address)
    server.start()
    return server


if __name__ == "__main__":
    serve(sys.argv[1]).wait_for_termination()
