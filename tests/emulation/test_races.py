"""ThreadSanitizer judges whether what the kernels' threads access is ordered as CUDA demands (`order.h`)."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_backend.jit import KernelVariant
from mla_backend.jit.toolchain import Toolchain
from mla_backend.kernels.prefill import prefill_config
from tests.emulation.emulator import (
    EmulatedModule,
    IsolatedModule,
    assert_right,
    run,
    shared_sources,
    sources,
)
from tests.support.cases import make_case, make_list_case
from tests.support.missing import skip_without
from tests.support.prefill_cases import PrefillCase

E4M3 = torch.float8_e4m3fn


class Race(Exception):
    """ThreadSanitizer's report of accesses that nothing orders."""


class RaceCheckedModule(IsolatedModule):
    """The kernels in processes that ThreadSanitizer watches.

    Args:
        unwatched: without faults, for what `not_watched` names. ThreadSanitizer takes milliseconds for a
            thread, and the planner has more of them than the decode kernel of a small batch.
    """

    _host_options = "-fPIC,-w,-g1,-fsanitize=thread"
    not_watched = ("plan", "workspace")

    def __init__(self, variant: KernelVariant, root: Path, toolchain: Toolchain, unwatched: EmulatedModule):
        super().__init__(variant, root, toolchain)
        self._unwatched = unwatched

    def _call(self, name: str, arguments: Sequence[Tensor | float | None]) -> list[int]:
        if name in self.not_watched:
            return self._unwatched._call(name, arguments)
        return super()._call(name, arguments)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess:
        called = subprocess.run(
            command, env=watched("halt_on_error=1 exitcode=66"), capture_output=True, text=True
        )
        if called.returncode == 66:
            raise Race(called.stderr)
        return called


def libtsan() -> Path:
    """Of the host's compiler; does not exist if that has none."""
    command = ["g++", "-print-file-name=libtsan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def watched(options: str = "") -> dict[str, str]:
    """The environment of a process that ThreadSanitizer watches."""
    return {**os.environ, "LD_PRELOAD": str(libtsan()), "TSAN_OPTIONS": options}


@pytest.fixture(scope="module")
def module_class(toolchain, builds):
    if not libtsan().exists():
        skip_without("tsan", "needs libtsan, which belongs to g++")
    started = subprocess.run([sys.executable, "-c", ""], env=watched(), capture_output=True, text=True)
    if started.returncode:
        skip_without("tsan", f"ThreadSanitizer does not start here: {started.stderr}")
    root = shared_sources(builds / "csrc")
    return lambda variant, *where: RaceCheckedModule(
        variant, *where, unwatched=EmulatedModule(variant, root, toolchain)
    )


# Several threads write the same value here, which does no harm.
SAME_VALUES = [
    ("sm80/softmax.cuh", f"{to} = {value};", f"__atomic_store(&{to}, &{value}, __ATOMIC_RELAXED);")
    for to, value in (("smem.refreshed", "left"), ("smem.factor[mine.row(i)]", "factor[i]"))
]


@pytest.fixture(scope="module")
def without_faults(builds):
    """Sources for all tests that edit nothing more."""
    return shared_sources(builds / "csrc-races", SAME_VALUES)


@pytest.fixture
def judge(decoder, without_faults, tmp_path):
    """Runs a batch, on edited sources if there are edits, and checks the result; raises `Race`."""

    def run_batch(family, num_heads, page_size, lengths, num_ctas, *edits, kv_dtype=None):
        root = sources(tmp_path / "csrc", [*SAME_VALUES, *edits]) if edits else without_faults
        sizes = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype}
        case = make_case(lengths, [1] * len(lengths), **sizes, device="cpu")
        assert_right(case, *run(decoder(case, family, num_ctas, root=root), case))

    return run_batch


SEVERAL = [0, 9, 60, 300, 33, 70, 2], 2
"""Lengths and CTAs: several m-blocks a CTA, one of which they share."""
THREE = [640, 200, 60], 4
"""An m-block of three CTAs, the last of which shares another one with the fourth."""
LONG = [570], 3
"""An m-block of three CTAs."""
TWO_WIDE = [519, 472, 76], 5
"""With 64 rows and more: of five CTAs, or clusters, the third has the last of an m-block's three splits and
the first of another's. So each of its consumers combines one."""
PAIRS = [300, 190], 4
"""Two m-blocks of two CTAs each."""
WHOLE, HALVES = ([300], 1), ([300], 2)
"""An m-block of one CTA, or of two."""
TWO = [200, 70], 2
"""Two m-blocks, which are short: fp8 keys take several times as long as others."""
THIRDS = [300], 3
"""An m-block of three CTAs, or clusters."""


@pytest.mark.parametrize(
    "family, num_heads, page_size, batch",
    [
        ("sm90", 16, 1, THREE),
        ("sm90", 16, 8, HALVES),
        ("sm90", 16, 8, PAIRS),
        ("sm90", 40, 8, SEVERAL),
        ("sm90", 40, 8, HALVES),
        ("sm90", 40, 1, THREE),
        ("sm90", 40, 8, TWO_WIDE),
        ("sm90", 24, 8, PAIRS),
        ("sm90", 40, 8, PAIRS),
        ("sm90", 80, 8, ([300, 70], 4)),
        ("sm90", 80, 8, HALVES),
        ("sm90", 80, 8, (TWO_WIDE[0], 10)),
        ("sm90", 2, 8, THREE),
        ("sm90", 2, 8, LONG),
        ("sm80", 16, 8, THREE),
        ("sm80", 16, 8, HALVES),
        ("sm80", 40, 1, SEVERAL),
    ],
)
def test_no_races(judge, family, num_heads, page_size, batch):
    judge(family, num_heads, page_size, *batch)


def test_no_races_also_in_the_planner(judge, monkeypatch):
    monkeypatch.setattr(RaceCheckedModule, "not_watched", ("workspace",))
    judge("sm90", 16, 8, *SEVERAL)


@pytest.mark.parametrize(
    "family, num_heads, page_size, batch, kv_dtype",
    [
        ("sm90", 40, 8, TWO, E4M3),
        ("sm90", 32, 8, TWO, E4M3),
        ("sm90", 16, 1, TWO, E4M3),
        ("sm90", 16, 8, HALVES, E4M3),
        ("sm90", 40, 8, HALVES, E4M3),
        ("sm90", 40, 1, HALVES, E4M3),
        ("sm90", 16, 8, TWO, "fp8_ds_mla"),
        ("sm90", 32, 8, TWO, "fp8_ds_mla"),
        ("sm90", 40, 8, TWO, "fp8_ds_mla"),
        ("sm90", 40, 8, WHOLE, "fp8_ds_mla"),
        ("sm90", 40, 1, TWO, "fp8_ds_mla"),
        ("sm90", 40, 1, TWO, E4M3),
        ("sm90", 80, 8, TWO, E4M3),
        ("sm90", 40, 8, THIRDS, E4M3),
        ("sm90", 40, 8, THIRDS, "fp8_ds_mla"),
        ("sm90", 80, 8, (THIRDS[0], 6), E4M3),
        ("sm80", 16, 8, TWO, E4M3),
        ("sm80", 16, 8, HALVES, E4M3),
        ("sm80", 16, 8, TWO, "fp8_ds_mla"),
    ],
)
def test_no_races_with_fp8_keys(judge, family, num_heads, page_size, batch, kv_dtype):
    judge(family, num_heads, page_size, *batch, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    "num_heads, page_size, file, line",
    [
        (16, 8, "swapped_fp8", "        Base::sync_consumers();\n"),
        (16, 8, "swapped_fp8", "        fence_async_proxy();\n"),
        (16, 8, "swapped", "            Base::publish_probabilities();\n"),
        (40, 8, "swapped64", "        fence_async_proxy();\n        Base::sync_consumers();\n"),
        (40, 8, "swapped64_e4m3", "        Base::sync_consumers();  // all have read the queries\n"),
        (40, 8, "swapped64", "        smem.p_full[tile % 2].wait(tile / 2 % 2);\n"),
        (40, 1, "swapped64_e4m3", "                if constexpr (!C::kTma) fence_async_proxy();\n"),
    ],
    ids=[
        "queries that are converted",
        "queries that tensor cores do not see",
        "probabilities that tensor cores do not see",
        "queries that are converted for m-blocks of 64",
        "queries overwritten while they are read",
        "probabilities that are not there yet",
        "keys that tensor cores do not see",
    ],
)
def test_a_missing_barrier_with_fp8_keys_is_seen(judge, num_heads, page_size, file, line):
    with pytest.raises(Race):
        judge("sm90", num_heads, page_size, *HALVES, (f"sm90/{file}.cuh", line, ""), kv_dtype=E4M3)


def test_ratios_of_records_overwritten_while_they_are_read_are_seen(judge):
    edit = ("sm90/swapped64_records.cuh", "smem.ratios[tile % 4]", "smem.ratios[tile % 2]")
    with pytest.raises(Race):
        judge("sm90", 40, 8, *WHOLE, edit, kv_dtype="fp8_ds_mla")


@pytest.mark.parametrize(
    "before, after",
    [
        ("buffer = left / C::kTile % 2", "buffer = 0"),
        ("cp_async_wait<C::kStages - 3>();", "cp_async_wait<C::kStages - 2>();"),
        ("weights, buffer);\n                __syncthreads();", "weights, buffer);"),
    ],
    ids=["P overwritten while it is read", "keys that have not landed", "P read while it is written again"],
)
def test_faults_with_whole_scores_are_seen(judge, before, after):
    with pytest.raises(Race):
        judge("sm80", 16, 8, *HALVES, ("sm80/token_products.cuh", before, after), kv_dtype=E4M3)


LISTS = [300, 200, 70]


@pytest.mark.parametrize(
    "family, num_heads, kv_dtype",
    [("sm90", 16, E4M3), ("sm90", 40, None), ("sm80", 16, None)],
)
def test_no_races_in_lists(decoder, without_faults, family, num_heads, kv_dtype):
    case = make_list_case(LISTS, num_heads=num_heads, kv_dtype=kv_dtype, device="cpu")
    assert_right(case, *run(decoder(case, family, 2, root=without_faults), case))


def test_a_list_overwritten_while_it_is_read_is_seen(decoder, tmp_path):
    edit = ("sm90/rows64.cuh", "smem.listed.of(stage_of(tile))", "smem.listed.of(stage_of(tile + 1))")
    root = sources(tmp_path / "csrc", [*SAME_VALUES, edit])
    case = make_list_case(LISTS, num_heads=40, device="cpu")
    with pytest.raises(Race):
        run(decoder(case, "sm90", 2, root=root), case)


# A barrier, a fence or a wait less. Results may be right all the same. `test_no_races` has the same batches.
@pytest.mark.parametrize(
    "family, num_heads, batch, file, before, after",
    [
        pytest.param(
            *("sm90", 2, LONG, "common/combine.cuh"),
            *("totals[warp] = total;\n        team.sync();", "totals[warp] = total;"),
            id="other warps' sums",
        ),
        pytest.param(
            *("sm90", 40, THREE, "common/combine.cuh"),
            *("team.sync();  // all values and weights are there", ""),
            id="weights and splits that other threads find and copy",
        ),
        pytest.param(
            *("sm90", 40, TWO_WIDE, "sm90/consumer.cuh"),
            *("consumer * kHalfBytes", "0"),
            id="two teams with the same scratch memory",
        ),
        pytest.param(
            *("sm90", 80, HALVES, "sm90/rows64.cuh"),
            *("cluster_wait();  // until", "// until"),
            id="shared memory that ends while the other CTA of a cluster accesses it",
        ),
        pytest.param(
            *("sm80", 16, HALVES, "common/splits.cuh"),
            *("while (load_acquire(flag_of(p, splits.first + i)) == flag_before)", ""),
            id="another CTA's split",
        ),
        pytest.param(
            *("sm90", 16, PAIRS, "sm90/consumer.cuh"),
            *("{ wait_for_partner(smem.pair.quads_arrived[consumer], 0); }", "{}"),
            id="what the other CTA of a pair sends",
        ),
        pytest.param(
            *("sm90", 40, PAIRS, "sm90/consumer.cuh"),
            *("wait_for_partner(smem.pair.may_send, 0);", ""),
            id="queries overwritten while they are read",
        ),
        pytest.param(
            *("sm90", 40, HALVES, "sm90/rows64.cuh"),
            *("smem.p_full[warp].wait(tile % 2);", ""),
            id="probabilities that are not there yet",
        ),
        pytest.param(
            *("sm90", 40, HALVES, "sm90/rows64.cuh"),
            *("wgmma_wait<1>();", ""),
            id="buffer given back while it is read",
        ),
        pytest.param(
            *("sm90", 80, HALVES, "sm90/consumer.cuh"),
            *("arrive_at_partner(empty);", "empty.arrive();"),
            id="keys overwritten while the other CTA of a cluster reads them",
        ),
        pytest.param(
            *("sm90", 16, HALVES, "sm90/swapped_products.cuh"),
            *("publish_probabilities() const { fence_async_proxy(); }", "publish_probabilities() const {}"),
            id="probabilities without a proxy fence",
        ),
        pytest.param(
            *("sm90", 16, HALVES, "sm90/swapped_products.cuh"),
            *("[column_block / C::kSegmentColumnBlocks].wait", "[0].wait"),
            id="part of a tile not waited for",
        ),
    ],
)
def test_faults_are_seen(judge, family, num_heads, batch, file, before, after):
    with pytest.raises(Race):
        judge(family, num_heads, 8, *batch, (file, before, after))


@pytest.fixture
def judge_prefill(modules, without_faults, tmp_path):
    """Runs the prefill kernel on edited sources and checks the result; raises `Race`."""

    def run_case(d_qk, d_v, small, *edits):
        root = sources(tmp_path / "csrc", edits) if edits else without_faults
        module = modules(prefill_config(torch.bfloat16, d_qk, d_v, "80", small).variant(), root)
        case = PrefillCase([20, 33], [140, 33], d_qk, d_v, heads=2, scale=1.0)
        case.check(lambda causal: case.run(module, causal), True)

    return run_case


@pytest.mark.parametrize(
    "d_qk, d_v, small", [(96, 64, False), (256, 128, True), (256, 256, True), (256, 256, False)]
)
def test_no_races_in_prefill(judge_prefill, d_qk, d_v, small):
    judge_prefill(d_qk, d_v, small)


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
        judge_prefill(256, 128 if small else 256, small, (f"sm80/prefill_{file}", before, after))
