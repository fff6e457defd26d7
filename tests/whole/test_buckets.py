"""Sets in S3 and on a web server, from the first command to the last."""

import pytest

import shardset
from pipelines.check.inspect import inspect
from pipelines.check.verify import verify
from tests.makers.documented import commands_of, run, words_of, write_inputs
from tests.makers.shardset import png_samples, write_shard_set
from tests.makers.web import WebServer

SMALL = ["--global-batch-size", "16", "--epochs", "2"]


@pytest.mark.nightly
def test_the_commands_of_the_page_build_train_and_resume_on_s3(s3_root, tmp_path):
    commands = [command for command in commands_of("docs/how-to/storage.md") if "s3://" in command]
    build, verify, train = (words_of(command, {"s3://my-bucket": s3_root}) for command in commands)
    place = write_inputs(tmp_path)
    assert "wrote 2 shards, 80 samples" in run(build, place)
    assert "80 images decoded: no problem" in run(verify, place)
    assert "done after 3 steps" in run([*train, *SMALL, "--max-steps", "3"], place)
    assert "resumed at step 3" in run([*train, *SMALL, "--max-steps", "6"], place)


def test_a_set_on_a_web_server_is_streamed_verified_and_inspected(tmp_path):
    local = shardset.open_storage(str(tmp_path / "set"))
    write_shard_set(local, {"train": png_samples("train", 60, size=8)}, num_shards=2)
    with WebServer(tmp_path) as server:
        url = f"{server.url}/set"
        ids = [
            [
                batch["id"].tolist()
                for batch in shardset.Stream(where, "train", batch_size=8, image_size=8)
            ]
            for where in (local.url, url)
        ]
        assert ids[0] == ids[1]
        assert {id for batch in ids[1] for id in batch} == set(range(60))
        report = verify(url, deep=True)
        assert (report.ok, report.num_samples) == (True, 60)
        assert verify(url, deep=False).ok
        assert inspect(url)
        (tmp_path / "set/train/train-000001.tar").write_bytes(b"x")
        assert not verify(url, deep=False).ok
