"""Counts of attention paths, in the files that processes leave."""

import os

import pytest

from mla_backend import InvalidInputError, counters


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "_cells", None)
    monkeypatch.setenv(counters.ENVIRONMENT_VARIABLE, str(tmp_path))


def test_a_forked_process_counts_in_a_file_of_its_own(tmp_path):
    counters.add("sparse", 3)
    child = os.fork()
    if child == 0:
        counters.add("sparse", 5)
        os._exit(counters.snapshot()["sparse"].calls)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert counters.snapshot()["sparse"] == counters.Count(1, 3)
    assert counters.read_folder(tmp_path)["sparse"] == counters.Count(2, 8)
    assert {int(file.stem) for file in tmp_path.iterdir()} == {os.getpid(), child}


def test_a_file_that_its_process_is_making_counts_nothing(tmp_path):
    counters.add("sparse", 3)
    (tmp_path / "1.counts").touch()
    assert counters.read_folder(tmp_path)["sparse"] == counters.Count(1, 3)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(counters.ENVIRONMENT_VARIABLE, str(tmp_path / "file"))
    for count in (counters.open_file, lambda: counters.add("sparse", 3)):
        with pytest.raises(InvalidInputError, match="MLA_BACKEND_COUNTERS=.*name a writable folder"):
            count()
