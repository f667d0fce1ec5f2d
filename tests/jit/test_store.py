"""The folders of built kernels: unusable ones, what builders leave there, who may build. nvcc is a script."""

import ctypes
import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.jit import KernelVariant, builder, cache_dir, find_entry, prepare, toolchain, why_unavailable
from mla_backend.jit.store import locked

VARIANT = KernelVariant("quick", "// nothing\n", "80")
WRITE = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo binary > "$2"; shift; done'


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch):
    """`compiler(version, script)` installs an nvcc that runs a script of sh, at first one that succeeds."""
    for name in ("MLA_BACKEND_JIT", "XDG_CACHE_HOME", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NVCC_CCBIN", "sh")  # no other host compiler is needed
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)

    def install(version="13.0.88", script=WRITE):
        nvcc = tmp_path / "nvcc"
        nvcc.write_text(f'#!/bin/sh\ncase "$1" in --*) exec echo "V{version}";; esac\n{script}\n')
        nvcc.chmod(0o755)
        monkeypatch.setenv("MLA_BACKEND_NVCC", str(nvcc))
        toolchain._ask_version.cache_clear()

    install()
    yield install
    toolchain._ask_version.cache_clear()


def no_home(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MLA_BACKEND_CACHE")
    monkeypatch.setattr(Path, "home", home)


@pytest.mark.parametrize(
    "make",
    [
        no_home,
        lambda monkeypatch: monkeypatch.setenv("MLA_BACKEND_CACHE", "~nobody-of-this-name/cache"),
        lambda monkeypatch: monkeypatch.setenv("MLA_BACKEND_CACHE", "/" + 300 * "x"),
    ],
    ids=["no home", "no such user", "cannot be looked at"],
)
@pytest.mark.parametrize("has_compiler", [True, False])
def test_an_unusable_cache_has_no_entries_and_one_clear_error(make, has_compiler, monkeypatch):
    make(monkeypatch)
    if not has_compiler:
        monkeypatch.setattr(toolchain, "_candidates", lambda: iter(()))
    assert find_entry(VARIANT) is None
    with pytest.raises(KernelBuildError) as error:
        prepare([VARIANT])
    assert why_unavailable([VARIANT]) == str(error.value) and "\n" not in str(error.value)
    assert ("set MLA_BACKEND_CACHE to a writable folder" in str(error.value)) is has_compiler


def test_a_folder_is_known_to_be_writable_before_it_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert jit.is_writable(tmp_path) and jit.is_writable(tmp_path / "a/b")
    assert not jit.is_writable(tmp_path / "file") and not jit.is_writable(tmp_path / "file/b")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    assert not jit.is_writable(tmp_path / "a/b")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "nvcc"]


def test_an_unwritable_package_is_not_called_the_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for module in ("builder", "store"):
        monkeypatch.setattr(f"mla_backend.jit.{module}.prebuilt_dir", lambda: tmp_path / "file/prebuilt")
    (result,) = jit.build([VARIANT], prebuilt=True)
    assert "may write to the package" in str(result.error) and "CACHE" not in str(result.error)


def test_a_file_is_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    (result,) = jit.build([VARIANT])
    assert "it is not a folder; remedy: set MLA_BACKEND_CACHE" in str(result.error)


def test_a_lock_that_another_process_is_just_making_is_no_error(compiler, monkeypatch):
    access = os.access

    def make_lock_behind(path, mode):
        allowed = access(path, mode)
        if os.path.basename(path) == ".lock":
            open(path, "a").close()
        return allowed

    monkeypatch.setattr("os.access", make_lock_behind)
    (result,) = jit.build([VARIANT])
    assert not result.error


def test_an_unwritable_cache_is_known_before_a_build(monkeypatch):
    assert why_unavailable([VARIANT]) is None
    monkeypatch.setattr("os.access", lambda path, mode: path != cache_dir())
    assert "the folder is not writable; remedy: set MLA_BACKEND_CACHE" in why_unavailable([VARIANT])


def test_a_lock_of_another_user_is_one_clear_error(monkeypatch):
    prepare([VARIANT])
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != ".lock" and access(path, mode))
    reason = why_unavailable([KernelVariant("other", "// nothing\n", "80")])
    assert reason and f"chmod g+w {cache_dir()}/.lock" in reason


def test_a_full_disk_is_one_clear_error(monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with pytest.raises(KernelBuildError, match="No space left on device; remedy: set MLA_BACKEND_CACHE to"):
        prepare([VARIANT])


def test_each_kernel_has_one_result_if_the_build_ends_early(monkeypatch):
    other = KernelVariant("other", "// nothing\n", "80")

    def build(missing, prebuilt, jobs, done):
        done(jit.BuildResult(VARIANT, cache_dir()))
        raise KernelBuildError("no space left")

    monkeypatch.setattr("mla_backend.jit.builder._build", build)
    results = [(result.variant, result.error is None) for result in jit.build([VARIANT, other])]
    assert results == [(VARIANT, True), (other, False)]


def test_flags_reach_the_compiler_as_they_are(compiler):
    compiler(script=f'for a; do echo "[$a]"; done\n{WRITE}')
    flags = ("-DPRICE=$5", "-DTWO WORDS")
    (entry,) = prepare([KernelVariant("quick", "// nothing\n", "80", flags)]).values()
    assert set((entry / "build.log").read_text().splitlines()) >= {f"[{flag}]" for flag in flags}


def test_an_entry_without_its_kernel_is_built_again():
    (entry,) = prepare([VARIANT]).values()
    (entry / "kernel.so").unlink()
    (entry / "kept").touch()
    assert find_entry(VARIANT) is None
    assert prepare([VARIANT]) == {VARIANT: entry}
    assert (entry / "kernel.so").is_file() and not (entry / "kept").exists()


def test_a_kernel_that_cannot_be_loaded_is_named_with_its_folder():
    (entry,) = prepare([VARIANT]).values()
    with pytest.raises(KernelBuildError, match=rf"quick \(sm_80\) cannot be loaded: .*delete .*{entry.name}"):
        jit.load(VARIANT)


def test_where_building_is_forbidden_kernels_of_other_compilers_serve(compiler, monkeypatch):
    entries = []
    for version in ("13.0.88", "13.10.1", "13.2.5"):
        compiler(version)
        assert find_entry(VARIANT) is None
        entries += prepare([VARIANT]).values()
    compiler("12.9.1")
    assert find_entry(VARIANT) is None
    entries[1].with_name(entries[1].name + ".old").symlink_to(entries[1])
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    assert find_entry(VARIANT) == entries[1]


def test_a_broken_compiler_of_the_users_choice_is_an_error_with_cached_kernels_too(monkeypatch):
    prepare([VARIANT])
    monkeypatch.setenv("MLA_BACKEND_NVCC", "/absent/nvcc")
    assert find_entry(VARIANT) is None
    reason = "MLA_BACKEND_NVCC: /absent/nvcc is not an executable file .*correct or unset MLA_BACKEND_NVCC"
    with pytest.raises(KernelBuildError, match=reason):
        prepare([VARIANT])
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")  # no compiler is needed
    assert find_entry(VARIANT) is not None


def why_not(variant: KernelVariant) -> str:
    """Why a variant is unavailable where nothing can be built, for either of two reasons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "_candidates", lambda: iter(()))
        no_compiler = why_unavailable([variant])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_BACKEND_JIT", "0")
        forbidden = why_unavailable([variant])
    (no_compiler, there), (forbidden, again) = (text.split("; /", 1) for text in (no_compiler, forbidden))
    assert "no usable CUDA compiler" in no_compiler and "forbids building" in forbidden
    assert again.startswith(there)
    return f"/{there}"


def test_what_is_there_but_does_not_fit_is_named(glibc, monkeypatch):
    glibc("2.39")
    (entry,) = prepare([VARIANT]).values()
    changed = KernelVariant(VARIANT.name, "// something\n", VARIANT.arch)
    assert (
        why_not(changed)
        == f"{entry} is there, but of other sources, compiler flags or version of apache-tvm-ffi"
    )
    glibc("2.31")
    assert why_not(VARIANT) == f"{entry} is there, but of a system with glibc 2.39, newer than 2.31 here"
    monkeypatch.setattr(toolchain, "driver_version", lambda: "12.8")
    assert "driver serves CUDA 12.8 and no newer major" in why_not(VARIANT)


@pytest.fixture
def glibc(monkeypatch):
    """`glibc(version)` pretends that the system has another C library, at first 2.31."""

    def install(version):
        monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", version))

    install("2.31")
    return install


def test_systems_with_other_c_libraries_can_share_a_cache(glibc):
    """A kernel that was built with a newer one cannot be loaded."""
    entries = []
    for version in ("2.39", "2.31", "2.4"):
        glibc(version)
        assert find_entry(VARIANT) is None
        entries += prepare([VARIANT]).values()
        assert find_entry(VARIANT) == entries[-1]
    glibc("2.35")
    assert find_entry(VARIANT) == entries[1]


@pytest.mark.parametrize("place", ["prebuilt", "cache", "cache of a machine that does not build"])
def test_a_kernel_serves_where_the_c_library_is_no_older(place, glibc, tmp_path, monkeypatch):
    for module in ("builder", "store"):
        monkeypatch.setattr(f"mla_backend.jit.{module}.prebuilt_dir", lambda: tmp_path / "prebuilt")
    (result,) = jit.build([VARIANT], prebuilt=place == "prebuilt")
    if place == "cache of a machine that does not build":
        monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    for version, serves in (("2.31", True), ("2.39", True), ("2.30", False), ("2.4", False)):
        glibc(version)
        assert find_entry(VARIANT) == (result.entry if serves else None)


def test_the_version_of_the_c_library_is_its_own(monkeypatch):
    own = ctypes.CDLL(None).gnu_get_libc_version
    own.restype = ctypes.c_char_p
    assert toolchain.glibc_version() == own().decode()
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert toolchain.glibc_version() == "0" and not toolchain.glibc_serves("2.31")


def test_nvccs_own_flags_are_in_the_key_except_for_the_host_compiler(monkeypatch):
    plain = VARIANT.key()
    keys = {plain}
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "-G")
        keys.add(VARIANT.key())
        monkeypatch.setenv(name, " -ccbin=/opt/gcc  --compiler-bindir /opt/gcc -ccbin g++")
        assert VARIANT.key() == plain
        monkeypatch.setenv(name, "-ccbin /opt/gcc -G")
        assert VARIANT.key() in keys
        monkeypatch.delenv(name)
    assert len(keys) == 3


def scratch(host: str, pid: int, age: float = 0) -> Path:
    folder = cache_dir() / f".building-{host}-{pid}-abc"
    folder.mkdir(parents=True)
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_only_what_dead_builders_left_is_removed():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here, day = socket.gethostname(), 24 * 3600
    kept = [scratch(here, os.getppid()), scratch("other-host", dead.pid, day - 600)]
    removed = [scratch(here, dead.pid), scratch("other-host", os.getpid(), day + 600)]
    prepare([VARIANT])
    assert all(folder.exists() for folder in kept) and not any(folder.exists() for folder in removed)


def test_builders_that_no_lock_separates_share_the_first_result(compiler, tmp_path, monkeypatch):
    """Some network file systems have none, or their locks end at the host."""
    wait = f"touch {tmp_path}/began-$$; while [ $(ls {tmp_path} | grep -c began) -lt 2 ]; do sleep 0.1; done"
    compiler(script=f"{wait}\n{WRITE}")

    def no_lock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    results = []
    hosts = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: hosts.name)

    def build(host):
        hosts.name = host
        results.extend(jit.build([VARIANT]))

    threads = [threading.Thread(target=build, args=(host,)) for host in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(result.error, result.entry) for result in results] == [(None, find_entry(VARIANT))] * 2
    assert not list(cache_dir().glob(".building-*"))


def test_waiting_for_another_builder_is_logged_once(caplog):
    cache_dir().mkdir()
    holds = threading.Event()

    def hold():
        with open(cache_dir() / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            holds.set()
            time.sleep(2.5)

    threading.Thread(target=hold).start()
    assert holds.wait(10)
    with caplog.at_level(logging.INFO, "mla_backend"):
        prepare([VARIANT])
    waiting, begin, end = (record.message for record in caplog.records)
    assert waiting == f"waiting for another process that builds kernels in {cache_dir()}"
    assert begin.startswith("building") and end.startswith("compiled 1 of 1 kernel in")


def test_nobody_waits_for_more_than_the_own_kernels(tmp_path):
    """Another process holds the lock until all of its kernels are built; this one needs one of them."""
    (entry,) = prepare([VARIANT]).values()
    moved = entry.rename(tmp_path / "entry")
    with open(cache_dir() / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, lambda: moved.rename(entry)).start()
        (result,) = jit.build([VARIANT])
    assert (result.entry, result.cached) == (entry, True)


def test_a_process_that_was_forked_during_a_build_does_not_keep_the_lock():
    cache_dir().mkdir()
    with locked(cache_dir(), is_done=lambda: False):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with open(cache_dir() / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_loaded_kernels_are_there_while_another_thread_builds(monkeypatch):
    """Also in a process that is forked meanwhile, in which that thread does not exist."""
    module = object()
    monkeypatch.setitem(builder._loaded, VARIANT, module)
    monkeypatch.setattr(builder, "_load_entry", lambda variant, entry: module)
    other = KernelVariant("other", "// nothing\n", "80")
    with ThreadPoolExecutor() as threads, builder._load_lock:
        assert threads.submit(jit.load, VARIANT).result(timeout=10) is module
        child = os.fork()
        if child == 0:
            os._exit(0 if jit.load(other) is module else 1)
        deadline = time.monotonic() + 30
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
    assert ended[1] == 0


def test_failed_compilations_are_not_counted_as_compiled(compiler, caplog):
    compiler(script="exit 1")
    with caplog.at_level(logging.INFO, "mla_backend"), pytest.raises(KernelBuildError):
        prepare([VARIANT])
    assert caplog.messages[-1].startswith("compiled 0 of 1 kernel in")


@pytest.mark.parametrize("tmpdir", [None, "/no/such/folder"])
def test_temporary_files_go_to_the_cache_where_they_cannot_be_written(tmpdir, compiler, monkeypatch):
    compiler(script=f'echo "temporary files in $TMPDIR"\n{WRITE}')
    if tmpdir:
        monkeypatch.setenv("TMPDIR", tmpdir)
    else:
        monkeypatch.delenv("TMPDIR", raising=False)
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != "/tmp" and access(path, mode))
    (entry,) = prepare([VARIANT]).values()
    assert f"temporary files in {cache_dir()}/.building-" in (entry / "build.log").read_text()


@pytest.mark.parametrize(
    ("folder", "lock"), [(0o755, 0o644), (0o2775, 0o664), (0o777, 0o666), (0o700, 0o644)]
)
def test_whoever_may_write_to_the_folder_may_take_the_lock(folder, lock):
    cache_dir().mkdir()
    cache_dir().chmod(folder)
    before = os.umask(0o077)
    try:
        prepare([VARIANT])
    finally:
        os.umask(before)
    assert (cache_dir() / ".lock").stat().st_mode & 0o777 == lock


@pytest.mark.parametrize("prebuilt", [False, True])
def test_whoever_may_read_the_folder_may_read_its_kernels(prebuilt, tmp_path, monkeypatch):
    for module in ("builder", "store"):
        monkeypatch.setattr(f"mla_backend.jit.{module}.prebuilt_dir", lambda: tmp_path / "package/prebuilt")
    readable = tmp_path / "package" if prebuilt else cache_dir()
    readable.mkdir()
    readable.chmod(0o755)
    before = os.umask(0o077)
    try:
        (result,) = jit.build([VARIANT], prebuilt=prebuilt)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (result.entry, result.entry.parent)}
    assert modes == {0o755}
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in result.entry.iterdir())
