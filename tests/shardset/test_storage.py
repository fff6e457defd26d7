"""What every storage promises, then what only one kind of it can break."""

from shardset.storage import ABSENT


def put(storage, name, data, **options):
    with storage.writer(name, **options) as writer:
        writer.write(data)


def test_what_is_written_is_read(storage):
    put(storage, "train/a.tar", b"hello world")
    assert storage.read("train/a.tar") == b"hello world"
    assert storage.read("train/a.tar", 3, 5) == b"lo"
    put(storage, "train/a.tar", b"hello world", if_generation=ABSENT)
    assert [s.name for s in storage.list()] == ["train/a.tar"]
    storage.delete("train/a.tar")
    assert [s.name for s in storage.list()] == []
