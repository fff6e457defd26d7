"""docs/explanation/checked.md says what happens: both columns, for all damage on disk."""

from benchmarks.damage import LOCAL, local_table
from tests.conftest import REPOSITORY
from tests.shardset.stream.test_stream_damage import write


def beginnings(text):
    """`all`, `stops:` or how many samples came with nothing said: of the stream and of its peer,
    by damage.
    """
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.count(" | ") == 2)
    return {damage: (stream.split()[0], peer.split()[0]) for damage, stream, peer in rows}


def test_the_table_of_damage_on_disk_is_what_happens(tmp_path):
    write(str(tmp_path / "whole"))
    found = beginnings(local_table(tmp_path / "whole"))
    assert [*found] == ["damage", *LOCAL]
    page = beginnings((REPOSITORY / "docs/explanation/checked.md").read_text())
    assert found == {damage: page[damage] for damage in found}
