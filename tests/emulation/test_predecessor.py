"""What is read before a launch's predecessor has ended may still be written: kernels that do are stopped."""

import pytest

from mla_backend.kernels import append
from tests.emulation.emulator import IsolatedModule, run, sources
from tests.emulation.test_append import check
from tests.support.cases import make_case

WAIT = "wait_for_predecessor();\n"
STOPPED = pytest.raises(AssertionError, match="did not wait for the predecessor")


@pytest.fixture(scope="module")
def module_class():
    return IsolatedModule


@pytest.mark.parametrize(
    "num_heads, page_size, file, what",
    [
        (16, 8, "loader.cuh", "        if constexpr (C::kRangeCtas == 2) cluster_wait();"),
        (16, 1, "loader.cuh", "        bool planned"),
        (16, 8, "query_loader.cuh", "#pragma unroll\n        for (int column_block = 0; column_block <"),
        (2, 8, "query_loader.cuh", "                smem.flag"),
    ],
    ids=["keys by TMA", "keys by row", "queries", "flag"],
)
def test_decode(decoder, tmp_path, num_heads, page_size, file, what):
    root = sources(tmp_path / "csrc", [(f"sm90/{file}", WAIT + what, what)])
    case = make_case([300], [1], num_heads=num_heads, page_size=page_size, device="cpu")
    with STOPPED:
        run(decoder(case, "sm90", 2, root=root), case)


def test_append(modules, tmp_path):
    root = sources(tmp_path / "csrc", [("common/append.cuh", WAIT, "")])
    with STOPPED:
        check(modules(append.variant("90a"), root), 0)
