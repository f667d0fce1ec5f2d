"""Counts of attention paths, in the files that processes leave."""

import errno
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
    assert {int(file.stem.split("-")[-2]) for file in tmp_path.iterdir()} == {os.getpid(), child}


def test_processes_of_the_same_number_count_in_files_of_their_own(tmp_path, monkeypatch):
    """In containers, or after a restart."""
    for tokens in (3, 5):
        monkeypatch.setattr(counters, "_cells", None)
        counters.add("sparse", tokens)
    assert counters.read_folder(tmp_path)["sparse"] == counters.Count(2, 8)


def test_a_full_file_system_is_known_before_anything_is_counted(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidInputError, match="No space left on device.*name a writable folder"):
        counters.open_file()


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
