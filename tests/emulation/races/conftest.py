"""Kernels in processes that ThreadSanitizer watches."""

import subprocess
import sys

import pytest

from tests.emulation.emulator import EmulatedModule, assert_right, run, shared_sources, sources
from tests.emulation.races.support import SAME_VALUES, RaceCheckedModule, libtsan, watched
from tests.support.cases import make_case
from tests.support.missing import skip_without


@pytest.fixture(scope="module")
def module_class(compiler, run_folder):
    if not libtsan().exists():
        skip_without("tsan", "needs libtsan, which belongs to g++")
    started = subprocess.run([sys.executable, "-c", ""], env=watched(), capture_output=True, text=True)
    if started.returncode:
        skip_without("tsan", f"ThreadSanitizer does not start here: {started.stderr}")
    root = shared_sources(run_folder / "csrc")
    return lambda variant, *where: RaceCheckedModule(
        variant, *where, unwatched=EmulatedModule(variant, root, compiler)
    )


@pytest.fixture(scope="module")
def without_faults(run_folder):
    """Sources for all tests that edit nothing more."""
    return shared_sources(run_folder / "csrc-races", SAME_VALUES)


@pytest.fixture
def judge(decoder, without_faults, tmp_path):
    """Runs a batch, on edited sources if there are edits, and checks the result; raises `Race`."""

    def run_batch(
        family,
        num_heads,
        page_size,
        lengths,
        num_ctas,
        *edits,
        latents=(512, 64),
        kv_dtype=None,
        two_term_blocks=None,
    ):
        root = sources(tmp_path / "csrc", [*SAME_VALUES, *edits]) if edits else without_faults
        sizes = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype}
        d_c, d_rope = latents
        case = make_case(lengths, [1] * len(lengths), **sizes, d_c=d_c, d_rope=d_rope, device="cpu")
        implementation = decoder(case, family, num_ctas, root=root, two_term_blocks=two_term_blocks)
        tolerances = {} if two_term_blocks is None else {"tolerance": 5.5e-2, "of_lse": 0.3}
        assert_right(case, *run(implementation, case), **tolerances)

    return run_batch
