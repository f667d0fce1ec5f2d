"""Which built kernels are loaded: a cache is code, so owners and modes are checked before."""

import os
import stat
from types import SimpleNamespace

import pytest

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.jit import KernelVariant, builder, store
from mla_backend.jit.trust import why_not_trusted

VARIANT = KernelVariant("quick", "// nothing\n", "80")
ME, ROOT, OTHER, STRANGER = 1000, 0, 2000, 3000
FOLDER, FILE = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """`kernels(cache=(owner, mode), entry_=..., library=...)` makes a cache look like that; returns an entry.

    A user may not give files to others, so the answers of `stat` are replaced.
    """
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.geteuid", lambda: ME)
    entry = tmp_path / "cache/quick"
    entry.mkdir(parents=True)
    (entry / store.LIBRARY).touch()

    def make(cache=(ME, FOLDER), entry_=(ME, FOLDER), library=(ME, FILE), gid=ME):
        told = {entry.parent: cache, entry: entry_, entry / store.LIBRARY: library}
        real = type(entry).stat

        def stat_of(path, **options):
            if path not in told:
                return real(path, **options)
            return SimpleNamespace(st_uid=told[path][0], st_mode=told[path][1], st_gid=gid)

        monkeypatch.setattr(type(entry), "stat", stat_of)
        return entry

    return make


def test_own_kernels_and_roots_are_loaded(kernels):
    assert why_not_trusted(kernels()) is None
    assert why_not_trusted(kernels((ROOT, FOLDER), (ROOT, FOLDER), (ROOT, FILE))) is None


@pytest.mark.parametrize("of", ["cache", "entry_", "library"])
def test_what_everyone_can_write_is_not_loaded(kernels, of):
    mode = FILE if of == "library" else FOLDER
    reason = why_not_trusted(kernels(**{of: (ME, mode | 0o002)}))
    assert "every user can write to" in reason and "chmod o-w" in reason


def test_a_folder_like_tmp_may_be_the_cache(kernels):
    assert why_not_trusted(kernels(cache=(ROOT, FOLDER | 0o1022))) is None
    reason = why_not_trusted(kernels((ROOT, FOLDER | 0o1002), (STRANGER, FOLDER), (STRANGER, FILE)))
    assert f"belongs to user {STRANGER}" in reason


@pytest.mark.parametrize("of", ["entry_", "library"])
def test_what_a_stranger_owns_is_not_loaded(kernels, of):
    reason = why_not_trusted(kernels(**{of: (STRANGER, FOLDER if of == "entry_" else FILE)}))
    assert f"belongs to user {STRANGER}" in reason and "\n" not in reason


def test_the_owner_of_a_folder_is_trusted_only_if_the_user_names_it(kernels, monkeypatch):
    entry = kernels((OTHER, FOLDER), (OTHER, FOLDER), (OTHER, FILE))
    assert why_not_trusted(entry) is None
    monkeypatch.delenv("MLA_BACKEND_CACHE")
    assert f"belongs to user {OTHER}" in why_not_trusted(entry)
    monkeypatch.setattr("mla_backend.jit.trust.shipped_dirs", lambda: [entry.parent])  # as the code beside it
    assert why_not_trusted(entry) is None


def test_a_group_can_share_a_folder(kernels):
    of_others = ((OTHER, FOLDER), (OTHER, FILE))
    assert why_not_trusted(kernels((ME, FOLDER | 0o2020), *of_others)) is None
    assert "belongs to" in why_not_trusted(kernels((ME, FOLDER), *of_others))


def test_a_kernel_that_is_not_trusted_is_neither_loaded_nor_announced(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path))
    entry = tmp_path / "quick"
    entry.mkdir()
    (entry / store.LIBRARY).touch()
    entry.chmod(0o777)
    monkeypatch.setattr(builder, "find_entry", lambda variant: entry)
    with pytest.raises(KernelBuildError, match="kernel quick .* is not loaded: every user can write"):
        jit.load(VARIANT)
    assert "is not loaded: every user can write" in jit.why_unavailable([VARIANT])


def test_a_build_is_loadable_with_any_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder = store.open_store(jit.cache_dir())
        with store.scratch_folder(folder) as scratch:
            made = scratch / "quick"
            made.mkdir()
            (made / store.LIBRARY).touch()
            store.publish(made, folder / "quick")
    finally:
        os.umask(before)
    assert why_not_trusted(folder / "quick") is None
