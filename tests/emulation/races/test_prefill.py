"""Races in the prefill kernels."""

import pytest
import torch

from mla_backend.kernels.prefill import prefill_config
from tests.emulation.emulator import sources
from tests.emulation.races.support import Race
from tests.support.prefill_cases import PrefillCase


@pytest.fixture
def judge_prefill(modules, without_faults, tmp_path):
    """Runs the prefill kernel on edited sources and checks the result; raises `Race`."""

    def run_case(d_qk, d_v, small, *edits):
        root = sources(tmp_path / "csrc", edits) if edits else without_faults
        module = modules(prefill_config(torch.bfloat16, d_qk, d_v, "80", small).variant(), root)
        case = PrefillCase([20, 33], [140, 33], d_qk, d_v, heads=2, scale=1.0)
        case.check(lambda causal: case.run(module, causal), True)

    return run_case


@pytest.mark.smoke(d_qk=96)
@pytest.mark.smoke(d_v=128)
@pytest.mark.parametrize(
    "d_qk, d_v, small", [(96, 64, False), (256, 128, True), (256, 256, True), (256, 256, False)]
)
def test_no_races_in_prefill(judge_prefill, d_qk, d_v, small):
    judge_prefill(d_qk, d_v, small)


@pytest.mark.faults
@pytest.mark.parametrize(
    "small, file, before, after",
    [
        (True, "loader.cuh", "cp_async_wait<kAhead - 1>();", ""),
        (True, "loader.cuh", "kAhead - 1>();\n            __syncthreads();", "0>();"),
        (True, "softmax.cuh", "        synchronize_row_group();  // all", "        // all"),
        (False, "loader.cuh", "smem.empty[stage].wait(number / C::kStages % 2 ^ 1);", ";"),
    ],
    ids=[
        "a slice not waited for",
        "a stage filled while it is read",
        "maxima replaced while they are read",
        "a stage filled while it is read, with mbarriers",
    ],
)
def test_faults_in_prefill_are_seen(judge_prefill, small, file, before, after):
    with pytest.raises(Race):
        judge_prefill(256, 128 if small else 256, small, (f"prefill/{file}", before, after))
