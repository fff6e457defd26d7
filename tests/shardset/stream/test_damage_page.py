"""docs/explanation/checked.md says what happens: both columns, for all damage on disk."""

from benchmarks.damage import LOCAL, local_rows
from tests.conftest import REPOSITORY
from tests.shardset.stream.test_damage import write


def beginning(cell):
    """`all`, `stops:` or how many samples came with nothing said."""
    return cell.split()[0]


def test_the_table_of_damage_on_disk_is_what_happens(tmp_path):
    write(str(tmp_path / "whole"))
    lines = (REPOSITORY / "docs/explanation/checked.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.count(" | ") == 2]
    rows = {damage: (stream, peer) for damage, stream, peer in cells}
    found = local_rows(tmp_path / "whole")
    assert [row.damage for row in found] == list(LOCAL)
    for row in found:
        stream, peer = rows[row.damage]
        assert (beginning(row.stream), beginning(row.webdataset)) == (
            beginning(stream),
            beginning(peer),
        ), row.damage
