"""What is read before a launch's predecessor has ended may still be written: kernels that do are stopped."""

from contextlib import nullcontext

import pytest
import torch

from mla_backend.kernels import append, head_product
from tests.emulation.emulator import IsolatedModule, run, sources
from tests.emulation.test_append import check
from tests.support.cases import make_case, make_list_case

pytestmark = pytest.mark.faults

WAIT = "wait_for_predecessor();\n"
STOPPED = pytest.raises(AssertionError, match="did not wait for the predecessor")


@pytest.fixture(scope="module")
def module_class():
    return IsolatedModule


@pytest.mark.parametrize(
    "num_heads, page_size, file, what",
    [
        (16, 8, "load/tma_keys.cuh", "        if constexpr (C::kRangeCtas == 2) cluster_wait();"),
        (16, 1, "load/gather_keys.cuh", "        bool planned"),
        (16, 8, "load/queries.cuh", "#pragma unroll\n        for (int column_block = 0; column_block <"),
        (2, 8, "load/queries.cuh", "                t.rings.flag"),
    ],
    ids=["keys by TMA", "keys by row", "queries", "flag"],
)
def test_decode(decoder, tmp_path, num_heads, page_size, file, what):
    root = sources(tmp_path / "csrc", [(f"decode/hopper/{file}", WAIT + what, what)])
    case = make_case([300], [1], num_heads=num_heads, page_size=page_size, device="cpu")
    with STOPPED:
        run(decoder(case, "hopper", 2, root=root), case)


@pytest.mark.parametrize("num_heads", [16, 40])
@pytest.mark.parametrize("waits", [True, False])
def test_lists(decoder, tmp_path, num_heads, waits):
    """They are read by plain loads, which are told to need the predecessor."""
    read = "return row_of_table["
    edits = [("schedule/params.cuh", read, f"emulation::need_predecessor(); {read}")]
    if not waits:
        many = ("decode/hopper/load/token_keys.cuh", f"        if constexpr (C::kLists) {WAIT}", "")
        edits.append(
            many
            if num_heads == 40
            else ("decode/hopper/load/gather_keys.cuh", f"{WAIT}        bool planned", "        bool planned")
        )
    root = sources(tmp_path / "csrc", edits)
    case = make_list_case([300, 70], num_heads=num_heads, device="cpu")
    with nullcontext() if waits else STOPPED:
        run(decoder(case, "hopper", 2, root=root), case)


def test_append(modules, tmp_path):
    root = sources(tmp_path / "csrc", [("small/append.cuh", WAIT, "")])
    with STOPPED:
        check(modules(append.variant("90a"), root), 0)


@pytest.mark.parametrize("waits", [True, False])
def test_head_product(modules, tmp_path, waits):
    """Its weights are read before it waits, but nothing else."""
    root = sources(tmp_path / "csrc", [] if waits else [("small/head_product.cuh", WAIT, "")])
    w_uk, _ = head_product.shipped_variants()
    x, weights, out = (
        torch.zeros(1, *size, dtype=torch.bfloat16) for size in ((1, 128), (128, 512), (1, 512))
    )
    with nullcontext() if waits else STOPPED:
        modules(w_uk, root).multiply(x, weights, out)
