"""Kernels that run on the CPU in place of what would be loaded onto a GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.jit.toolchain import find_toolchain
from mla_backend.kernels import hopper, portable
from mla_backend.spec import DecoderSpec
from tests.emulation.emulator import Compiler, EmulatedModule, remove_unused, shared_sources
from tests.support.missing import skip_without

# Ignored by git, and kept by nox. To build everything again, remove it.
CACHE = Path(__file__).resolve().parents[2] / ".nox" / ".cache" / "emulated"


@pytest.fixture(scope="session")
def compiler():
    """Builds the emulated kernels."""
    try:
        toolchain = find_toolchain()
    except KernelBuildError as error:
        skip_without("nvcc", f"needs the CUDA headers: {error}")
    CACHE.mkdir(parents=True, exist_ok=True)
    remove_unused(CACHE)
    return Compiler(toolchain, CACHE)


@pytest.fixture(scope="module")
def module_class():
    """How the tests of a file build and run the kernels."""
    return EmulatedModule


@pytest.fixture(scope="module")
def modules(run_folder, compiler, module_class):
    """Emulated modules by the root of their sources and the variant's name."""
    made = {}
    kernels_as_they_are = shared_sources(run_folder / "csrc")

    def load(variant, root=kernels_as_they_are):
        if (root, variant.name) not in made:
            made[root, variant.name] = module_class(variant, root, compiler)
        return made[root, variant.name]

    return load


@pytest.fixture
def decoder(monkeypatch, modules):
    """Makes an implementation that runs on the CPU, on as many CTAs as asked for."""

    def make(
        case,
        family,
        num_ctas=6,
        max_query_len=None,
        batch_invariant=False,
        root: Path | None = None,
        two_term_blocks=None,
    ):
        def load(variant):
            return modules(variant, root) if root else modules(variant)

        monkeypatch.setattr(jit, "load", load)
        monkeypatch.setattr(jit, "load_all", lambda variants: [load(variant) for variant in variants])
        monkeypatch.setattr(jit, "arch_of", lambda device: "90a")
        properties = SimpleNamespace(multi_processor_count=num_ctas)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        spec = DecoderSpec(
            num_heads=case.q_nope.shape[1],
            kv_lora_rank=case.q_nope.shape[2],
            qk_rope_head_dim=case.q_rope.shape[2],
            dtype=case.q_nope.dtype,
            kv_dtype=case.kv_dtype,
            page_size=case.batch.page_size,
            table_kind=case.batch.table_kind,
            device=torch.device("cpu"),
            max_batch=case.batch.batch_size,
            max_query_len=max_query_len or case.batch.max_query_len,
            batch_invariant=batch_invariant,
        )
        if family == "hopper":
            return hopper.HopperDecode(spec, two_term_blocks=two_term_blocks)
        return portable.PortableDecode(spec, within_99k=family == "portable_99k")

    return make
