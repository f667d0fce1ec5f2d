"""What results files record of the software that made them."""

import shutil
import subprocess

import pytest

from mla_backend_bench import environment


def git(folder, *arguments):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def commit_of(monkeypatch):
    """The function that says which commit is recorded if the package is installed in a folder."""

    def function(folder):
        monkeypatch.setattr(environment, "__file__", str(folder / "mla_backend_bench/environment.py"))
        return environment.commit()

    return function


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    module = tmp_path / "mla_backend_bench" / "environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=first")
    return tmp_path


def test_the_commit_of_a_checkout_is_recorded(repository, commit_of):
    head = git(repository, "rev-parse", "HEAD")
    assert commit_of(repository) == head
    (repository / "mla_backend_bench" / "environment.py").write_text("changed = True\n")
    assert commit_of(repository) == f"{head}-dirty"


def test_an_unrelated_repository_around_site_packages_is_not(repository, commit_of):
    site_packages = repository / ".venv" / "lib" / "site-packages"
    shutil.copytree(repository / "mla_backend_bench", site_packages / "mla_backend_bench")
    assert commit_of(site_packages) is None
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=site-packages too")
    assert commit_of(site_packages) is None


def test_no_repository_has_no_commit(tmp_path, commit_of):
    folder = tmp_path / "mla_backend_bench"
    folder.mkdir(parents=True)
    assert commit_of(tmp_path) is None
