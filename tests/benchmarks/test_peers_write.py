"""The lists of samples that contestants read: those of one input say the same."""

from benchmarks import inputs, peers_write


def test_a_tar_of_tars_is_listed_alike_by_tarfile_and_by_sizes(tmp_path) -> None:
    inputs.make("imagenet", tmp_path, 30)
    lists = (peers_write.in_tar_of_tars(str(tmp_path)), peers_write.in_tar_of_tars_by_sizes(str(tmp_path)))
    by_tarfile, by_sizes = ([(one.label, one.offset, one.num_bytes) for one in found] for found in lists)
    assert len(by_tarfile) == 30
    assert by_sizes == by_tarfile
