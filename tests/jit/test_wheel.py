"""A wheel of kernels: made where there is a compiler, used where there is none."""

import base64
import csv
import ctypes
import hashlib
import io
import zipfile

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from mla_backend import jit
from mla_backend.errors import InvalidInputError, KernelBuildError
from mla_backend.jit import KernelVariant, wheel
from tests.support.missing import skip_without

TINY = 'extern "C" __attribute__((visibility("default"))) int answer() {{ return {value}; }}\n'
VARIANTS = [KernelVariant(f"good-{value}", TINY.format(value=value), "80") for value in (1, 2)]


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The wheel of `VARIANTS`."""
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLA_BACKEND_JIT", raising=False)
    try:
        jit.find_toolchain()
    except KernelBuildError as error:
        skip_without("nvcc", error)
    return jit.write_wheel(jit.prepare(VARIANTS).values(), tmp_path / "wheels")


def test_kernels_of_a_wheel_serve_without_a_compiler(kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    assert "not built yet" in jit.why_unavailable(VARIANTS)
    with zipfile.ZipFile(kernels) as archive:
        archive.extractall(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert jit.why_unavailable(VARIANTS) is None
    entries = [jit.find_entry(variant) for variant in VARIANTS]
    assert [ctypes.CDLL(str(entry / "kernel.so")).answer() for entry in entries] == [1, 2]
    other = KernelVariant("good-1", VARIANTS[0].source + "// changed", "80")
    assert "but of other sources" in jit.why_unavailable([other])


def test_installers_accept_the_wheel_here(kernels):
    name, _, _, tags = parse_wheel_filename(kernels.name)
    assert name == "mla-backend-kernels" and tags & set(sys_tags())
    with zipfile.ZipFile(kernels) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        assert {path for path, *_ in rows} == set(archive.namelist())
        for path, digest, size in rows:
            if path != record:
                content = archive.read(path)
                told = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
                assert (digest, int(size)) == (f"sha256={told}", len(content))
        metadata = archive.read(record.replace("RECORD", "METADATA")).decode()
    assert "Requires-Dist: mla-backend==" in metadata


def test_a_system_without_glibc_has_another_tag(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "glibc_version", lambda: "0")
    assert "-py3-none-linux_" in jit.write_wheel([], tmp_path).name


def test_a_wheel_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot be written"):
        jit.write_wheel([], tmp_path / "file")
