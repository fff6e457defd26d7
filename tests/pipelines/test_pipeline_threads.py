"""Many threads of one worker process, as Dataflow starts them: they plan one group of shards after
the other, in the memory of one.
"""

import pickle
import threading
import time
import uuid
from dataclasses import replace
from itertools import groupby

import pytest

from pipelines.begin import prepare
from pipelines.config import BuildConfig
from pipelines.pipeline import WriteReferences
from pipelines.plan import paths
from pipelines.plan.files import PlanFiles
from pipelines.plan.plan_records import PlanFile
from pipelines.runners import beam_options, on_beam
from shardset.storage.open import open_storage
from tests.makers.doors import told
from tests.makers.folders import write_class_folders

NUM_THREADS = 12


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A build whose plan is made, and of which no shard is written."""
    folder = write_class_folders(
        tmp_path_factory.mktemp("threads") / "raw", ["cat", "dog"], 8, splits=["train"]
    )
    output = open_storage(f"memory://{uuid.uuid4().hex}")
    config = BuildConfig(source="folder", input=str(folder), output=output.url, num_shards={"": 2})
    prepared = prepare(config, output)
    on_beam.run(
        prepared,
        beam_options.beam_options(["--direct_running_mode=in_memory"], output),
        dry_run=True,
    )
    return prepared.build


def test_the_threads_of_a_process_plan_one_group_at_a_time(planned):
    readers = []

    def note(verb, path):
        readers.append(threading.get_ident())
        time.sleep(0.001)

    door = told(planned.files.output, uuid.uuid4().hex, note)
    sent = pickle.dumps(
        WriteReferences(replace(planned, files=PlanFiles(door, planned.files.build)))
    )
    plan = planned.files.read_record(paths.PLAN, PlanFile)
    begin, written = threading.Barrier(NUM_THREADS), []

    def work():
        step = pickle.loads(sent)
        step.setup()
        begin.wait()
        written.append([*step.process(("train", 0), plan)])

    threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert written == [written[0]] * NUM_THREADS
    assert len(list(groupby(readers))) == NUM_THREADS
