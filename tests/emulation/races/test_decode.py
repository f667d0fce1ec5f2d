"""Races in the decode kernels with 16-bit caches, in the planner, and with lists."""

import pytest

from tests.emulation.emulator import assert_right, run, sources
from tests.emulation.races.support import (
    E4M3,
    HALVES,
    LONG,
    PAIRS,
    SAME_VALUES,
    SEVERAL,
    THREE,
    TWO_WIDE,
    Race,
    RaceCheckedModule,
)
from tests.support.cases import make_list_case


@pytest.mark.smoke(num_heads=(16, 40), page_size=8, batch=[HALVES])
@pytest.mark.parametrize(
    "family, num_heads, page_size, batch",
    [
        ("hopper", 16, 1, THREE),
        ("hopper", 16, 8, HALVES),
        ("hopper", 16, 8, PAIRS),
        ("hopper", 40, 8, SEVERAL),
        ("hopper", 40, 8, HALVES),
        ("hopper", 40, 1, THREE),
        ("hopper", 40, 8, TWO_WIDE),
        ("hopper", 24, 8, PAIRS),
        ("hopper", 40, 8, PAIRS),
        ("hopper", 80, 8, ([300, 70], 4)),
        ("hopper", 80, 8, HALVES),
        ("hopper", 2, 8, THREE),
        ("hopper", 2, 8, LONG),
        ("portable", 16, 8, THREE),
        ("portable", 16, 8, HALVES),
        ("portable", 40, 1, SEVERAL),
    ],
)
def test_no_races(judge, family, num_heads, page_size, batch):
    judge(family, num_heads, page_size, *batch)


# The largest m-blocks that few_rows has, and P, which lies elsewhere where keys have no rotary columns.
@pytest.mark.parametrize(
    "family, num_heads, page_size, latents, kv_dtype",
    [
        ("hopper", 32, 8, (256, 64), None),
        ("hopper", 40, 1, (256, 64), None),
        ("hopper", 40, 8, (256, 64), E4M3),
        ("hopper", 16, 1, (512, 0), None),
        ("hopper", 40, 8, (512, 0), None),
        ("hopper", 40, 1, (512, 0), None),
        ("hopper", 40, 8, (512, 0), E4M3),
        ("portable", 16, 8, (256, 64), None),
        ("portable", 40, 8, (512, 0), None),
    ],
)
def test_no_races_with_other_latents(judge, family, num_heads, page_size, latents, kv_dtype):
    judge(family, num_heads, page_size, *HALVES, latents=latents, kv_dtype=kv_dtype)


def test_no_races_also_in_the_planner(judge, monkeypatch):
    monkeypatch.setattr(RaceCheckedModule, "not_watched", ("workspace", "resident"))
    judge("hopper", 16, 8, *SEVERAL)


LISTS = [300, 200, 70]


@pytest.mark.parametrize(
    "family, num_heads, kv_dtype",
    [("hopper", 16, E4M3), ("hopper", 40, None), ("portable", 16, None)],
)
def test_no_races_in_lists(decoder, without_faults, family, num_heads, kv_dtype):
    case = make_list_case(LISTS, num_heads=num_heads, kv_dtype=kv_dtype, device="cpu")
    assert_right(case, *run(decoder(case, family, 2, root=without_faults), case))


@pytest.mark.faults
def test_a_list_overwritten_while_it_is_read_is_seen(decoder, tmp_path):
    edit = (
        "decode/hopper/many_rows/kernel.cuh",
        "t.rings.unnamed.of(stage_of(own))",
        "t.rings.unnamed.of(stage_of(own + 1))",
    )
    root = sources(tmp_path / "csrc", [*SAME_VALUES, edit])
    case = make_list_case(LISTS, num_heads=40, device="cpu")
    with pytest.raises(Race):
        run(decoder(case, "hopper", 2, root=root), case)


# A barrier, a fence or a wait less. Results may be right all the same. `test_no_races` has the same batches.
@pytest.mark.faults
@pytest.mark.parametrize(
    "family, num_heads, batch, file, before, after",
    [
        pytest.param(
            *("hopper", 2, LONG, "schedule/combine.cuh"),
            *("totals[warp] = total;\n        team.sync();", "totals[warp] = total;"),
            id="other warps' sums",
        ),
        pytest.param(
            *("hopper", 40, THREE, "schedule/combine.cuh"),
            *("team.sync();  // all values and weights are there", ""),
            id="weights and splits that other threads find and copy",
        ),
        pytest.param(
            *("hopper", 40, TWO_WIDE, "decode/hopper/kernel.cuh"),
            *("t.consumer * kHalfBytes", "0"),
            id="two teams with the same scratch memory",
        ),
        pytest.param(
            *("hopper", 80, HALVES, "decode/hopper/kernel.cuh"),
            *("cluster_wait();  // until", "// until"),
            id="shared memory that ends while the other CTA of a cluster accesses it",
        ),
        pytest.param(
            *("portable", 16, HALVES, "schedule/splits.cuh"),
            *("while (load_acquire(flag_of(p, splits.first + i)) == flag_before)", ""),
            id="another CTA's split",
        ),
        pytest.param(
            *("hopper", 16, PAIRS, "decode/hopper/pair.cuh"),
            *("{ wait_for_partner(t.pair.quads_arrived[t.consumer], 0); }", "{}"),
            id="what the other CTA of a pair sends",
        ),
        pytest.param(
            *("hopper", 40, PAIRS, "decode/hopper/pair.cuh"),
            *("wait_for_partner(t.pair.may_send, 0);", ""),
            id="queries overwritten while they are read",
        ),
        pytest.param(
            *("hopper", 40, HALVES, "decode/hopper/many_rows/kernel.cuh"),
            *("smem.p_is_there[t.warp].wait(tile % 2);", ""),
            id="probabilities that are not there yet",
        ),
        pytest.param(
            *("hopper", 40, HALVES, "decode/hopper/many_rows/kernel.cuh"),
            *("wgmma_wait<1>();", ""),
            id="buffer given back while it is read",
        ),
        pytest.param(
            *("hopper", 80, HALVES, "decode/hopper/kernel.cuh"),
            *("arrive_at_partner(empty);", "empty.arrive();"),
            id="keys overwritten while the other CTA of a cluster reads them",
        ),
        pytest.param(
            *("hopper", 16, HALVES, "decode/hopper/few_rows/keys_16bit.cuh"),
            *("publish_weights() const { fence_async_proxy(); }", "publish_weights() const {}"),
            id="probabilities without a proxy fence",
        ),
        pytest.param(
            *("hopper", 16, HALVES, "decode/hopper/few_rows/keys_16bit.cuh"),
            *("[column_block / kAwaited].wait", "[0].wait"),
            id="part of a tile not waited for",
        ),
    ],
)
def test_faults_are_seen(judge, family, num_heads, batch, file, before, after):
    with pytest.raises(Race):
        judge(family, num_heads, 8, *batch, (file, before, after))
