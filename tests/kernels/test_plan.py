"""Properties of the planner, and the device planner against the one in Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend.plan import UNIT_TOKENS, blocks_of_rows, plan_reference
from tests.support.cases import assert_first_keys


def blocks_of_requests(seq_lens, query_lens, num_heads, rows):
    each = query_lens if isinstance(query_lens, list) else [query_lens] * len(seq_lens)
    return [blocks_of_rows(num_heads, query_len, rows) for query_len in each]


@st.composite
def batches(draw):
    size = draw(st.integers(1, 40))
    uniform = draw(st.booleans())
    length = st.one_of(st.integers(0, 40), st.integers(0, 20000))
    seq_lens = [draw(length)] * size if uniform else draw(st.lists(length, min_size=size, max_size=size))
    each = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    query_lens = draw(st.one_of(st.integers(1, 9), each))
    return (
        seq_lens,
        query_lens,
        draw(st.sampled_from([1, 8, 16, 20, 128])),
        draw(st.sampled_from([1, 7, 78, 132])),
    )


@given(batches())
@settings(max_examples=300, deadline=None)
def test_every_key_of_every_entry_belongs_to_one_cta(batch):
    seq_lens, query_lens, num_heads, num_ctas = batch
    rows = 32
    ranges = plan_reference(seq_lens, query_lens, num_heads=num_heads, rows=rows, num_ctas=num_ctas)
    units = [-(-length // UNIT_TOKENS) for length in seq_lens]
    blocks = blocks_of_requests(seq_lens, query_lens, num_heads, rows)
    assert len(ranges) == num_ctas
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for cta, (*begin, first, end_request, end_block, end_unit, last, _, one_block) in enumerate(ranges):
        begin = tuple(begin)
        split_at_ends = []
        while begin < (end_request, end_block, end_unit):
            request, block, unit = begin
            if block >= blocks[request]:
                begin = (request + 1, 0, 0)
                continue
            cut = (request, block) == (end_request, end_block)
            stop = end_unit if cut else units[request]
            parts.setdefault((request, block), []).append((unit, stop, cta))
            if unit > 0:
                split_at_ends.append(first)
            if cut:
                split_at_ends.append(last)
            begin = (request + 1, block, 0) if one_block else (request, block + 1, 0)
            if cut:
                break
        assert len(split_at_ends) <= 2
    expected = {(request, block) for request, count in enumerate(blocks) for block in range(count)}
    assert set(parts) == expected
    for (request, _), pieces in parts.items():
        assert pieces[0][0] == 0 and pieces[-1][1] == units[request]
        assert all(a[1] == b[0] and a[2] + 1 == b[2] for a, b in zip(pieces, pieces[1:], strict=False))
        for begin, stop, cta in pieces:
            assert begin < stop or len(pieces) == 1
            if begin > 0:
                assert ranges[cta][3] == pieces[0][2]
            if stop < units[request]:
                assert ranges[cta][7] == pieces[-1][2]
    for cta, (*_, paired, _) in enumerate(ranges):
        if paired:
            [owners] = [ctas for pieces in parts.values() if cta in (ctas := {piece[2] for piece in pieces})]
            assert owners == {cta, cta ^ 1}


@pytest.mark.parametrize(
    "requests, length, ctas", [(1, 131072, 128), (8, 8192, 128), (64, 1024, 128), (128, 2048, 128)]
)
def test_uniform_batches_are_cut_at_borders(requests, length, ctas):
    ranges = plan_reference([length] * requests, [1] * requests, num_heads=16, rows=16, num_ctas=132)
    busy = [r for r in ranges if r[:3] != r[4:7]]
    assert len(busy) == ctas
    assert all(r[4] == r[0] or r[4:7] == [r[0] + 1, 0, 0] for r in busy)
    assert all(r[8] == (requests == 64) for r in busy)


@pytest.mark.parametrize("num_blocks, crew", [(2, 66), (3, 44), (5, 26)])
def test_blocks_are_computed_side_by_side(num_blocks, crew):
    ranges = plan_reference([5000, 300, 70000], 1, num_heads=64 * num_blocks, rows=64, num_ctas=132)
    for cta in range(num_blocks * crew):
        assert ranges[cta][1] == ranges[cta][5] == cta // crew
        assert [ranges[cta][i] for i in (0, 2, 4, 6)] == [ranges[cta % crew][i] for i in (0, 2, 4, 6)]
    assert all(r[:3] == r[4:7] for r in ranges[num_blocks * crew :])


@given(batches())
@settings(max_examples=100, deadline=None)
def test_entries_can_be_kept_whole(batch):
    seq_lens, query_lens, num_heads, num_ctas = batch
    ranges = plan_reference(seq_lens, query_lens, num_heads=num_heads, rows=32, num_ctas=num_ctas, whole=True)
    assert all(r[2] == 0 and r[6] == 0 for r in ranges)
    entries = sum(blocks_of_requests(seq_lens, query_lens, num_heads, 32))
    busy = sum(r[:3] != r[4:7] for r in ranges)
    assert min(entries, 1) <= busy <= entries


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_device_planner_equals_reference(seed):
    from mla_backend import MLADecoder
    from mla_backend.batch import DecodeBatch, TableKind
    from mla_backend.kernels import sm90

    generator = torch.Generator().manual_seed(seed)

    def integers(high, count):
        return torch.randint(0, high, (count,), generator=generator, dtype=torch.int32)

    size = [1, 3, 64, 132, 200, 1500][seed % 6]
    seq_lens = integers([50, 3000, 100000][seed % 3], size)
    if seed % 4 == 0:
        seq_lens[:] = seq_lens[0]
    query_lens = integers(10 if seed % 11 == 0 else 5, size)
    query_lens[0] = 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()]).cuda()
    uniform = seed % 7 < 3
    if uniform:
        query_lens[:] = query_lens.max()
    num_heads = [1, 16, 40, 128][seed % 4]
    decoder = MLADecoder(
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        page_size=64,
        device="cuda",
        max_batch=size,
        max_query_len=int(query_lens.max()),
        batch_invariant=seed % 5 == 0,
    )
    table = torch.randint(
        1 << 24, (size, int(seq_lens.max()) // 64 + 1), generator=generator, dtype=torch.int32
    )
    batch = DecodeBatch(seq_lens.cuda(), table.cuda(), 64, None if uniform else starts, int(query_lens.max()))
    plans = decoder.plan(batch).state.plans.cpu()
    rows = sm90.decode_config(torch.bfloat16, 512, 64, 64, num_heads * int(query_lens.max())).rows
    expected = plan_reference(
        seq_lens.tolist(),
        int(query_lens.max()) if uniform else query_lens.tolist(),
        num_heads=num_heads,
        rows=rows,
        num_ctas=len(plans),
        whole=decoder.spec.batch_invariant,
    )
    assert plans[:, :10].tolist() == expected
    assert_first_keys(plans, seq_lens.tolist(), query_lens.tolist(), table, None, 64, TableKind.BLOCK, 8)
