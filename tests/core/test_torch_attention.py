"""Attention in plain torch against dense fp64 attention, with everything unused poisoned."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import DecodeBatch, InvalidInputError, TableKind, cache, prefill, torch_attention
from tests.support.mla_oracle import assert_attention_close, dense_attention, paged_problem

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def attend(problem, **changes):
    fields = {name: getattr(problem, name) for name in ("q_nope", "q_rope", "latent_cache", "batch")}
    options = {name: changes.pop(name) for name in list(changes) if name not in fields}
    options = {"softmax_scale": problem.scale, "kv_scale": problem.kv_scale} | options
    return torch_attention.paged_attention(*{**fields, **changes}.values(), **options)


@st.composite
def problems(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 5)), min_size=1, max_size=6))
    uniform = draw(st.booleans())
    q_len = draw(st.integers(1, 4))
    return paged_problem(
        [kv_len for kv_len, _ in requests],
        [q_len if uniform else n for _, n in requests],
        uniform=uniform,
        num_heads=draw(st.integers(1, 5)),
        kv_lora_rank=draw(st.sampled_from([8, 24])),
        page_size=draw(st.integers(1, 17)),
        table_kind=draw(st.sampled_from([TableKind.BLOCK, TableKind.TOKEN])),
        dtype=draw(st.sampled_from(DTYPES)),
        page_gap=draw(st.sampled_from([0, 5, 64])),
        row_gap=draw(st.sampled_from([0, 0, 3])),
        indirect_rows=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )


@settings(max_examples=60, deadline=None)
@given(problems(), st.booleans())
def test_paged_attention_equals_dense_attention(problem, causal):
    dtype = problem.q_nope.dtype
    out = torch.full_like(problem.q_nope, math.nan, memory_format=torch.contiguous_format)
    compute_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    actual = attend(problem, causal=causal, compute_dtype=compute_dtype, out=out)
    assert actual[0] is out
    assert actual[1].dtype is torch.float32
    assert_attention_close(actual, problem.expected(causal), dtype)


def test_bf16_inputs_can_be_attended_to_in_fp64():
    problem = paged_problem([300, 77], dtype=torch.bfloat16)
    out = torch.empty(problem.q_nope.shape, dtype=torch.float64)
    attend(problem, compute_dtype=torch.float64, out=out)
    torch.testing.assert_close(out, problem.expected()[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("query_lens", [None, [3, 70, 1]], ids=["decode", "extend"])
@pytest.mark.parametrize("product_dtype", [torch.float32, torch.bfloat16])
def test_bf16_scores_keep_fp32_precision(query_lens, product_dtype, monkeypatch):
    # Which of them is taken depends on the CPU.
    monkeypatch.setattr(torch_attention, "_product_dtype", lambda *_: product_dtype)
    # DeepSeek's widths and sharp scores (standard deviation 10), which bf16 would round by up to 0.1.
    problem = paged_problem(
        [300, 77, 1024],
        query_lens,
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        gain=10.0,
    )
    out, lse = attend(problem)
    expected_out, expected_lse = problem.expected()
    assert (lse - expected_lse).abs().max() < 2e-3
    assert (out - expected_out).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("kv_dtype", "changes"),
    [
        (torch.float8_e4m3fn, {"kv_scale": 0.07, "row_gap": 3, "page_gap": 5}),
        (torch.float8_e4m3fn, {"kv_scale": 2.0**10, "gain": 2.0**-14}),
        (torch.float8_e4m3fn, {"kv_scale": 2.0**-10, "gain": 64.0}),
        ("fp8_ds_mla", {"row_gap": 48, "page_gap": 1}),
        ("fp8_ds_mla", {"scale_exponents": (-10, 10), "gain": 2.0**-10}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_caches(kv_dtype, changes, dtype):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": dtype, "kv_dtype": kv_dtype}
    problem = paged_problem([9, 0, 70], [2, 1, 3], **sizes, **changes)
    out, lse = attend(problem)
    expected_out, expected_lse = problem.expected()
    tolerance = 1e-5 if dtype is torch.float32 else 2.5e-3
    assert (out - expected_out).norm() <= tolerance * expected_out.norm()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_a_scale_comes_with_e4m3_and_only_with_it():
    with pytest.raises(InvalidInputError, match="an fp8_e4m3 cache needs its kv_scale"):
        attend(paged_problem([9], kv_dtype=torch.float8_e4m3fn), kv_scale=None)
    with pytest.raises(InvalidInputError, match="a float32 cache takes no kv_scale"):
        attend(paged_problem([9]), kv_scale=torch.ones(1))
    with pytest.raises(InvalidInputError, match="with one element on cpu, got torch.float32 .2. on cpu"):
        attend(paged_problem([9], kv_dtype=torch.float8_e4m3fn), kv_scale=torch.ones(2))


def test_rows_past_the_batch_are_not_written():
    problem = paged_problem([5, 3], [2, 1])
    out = torch.full((6, 2, 16), math.nan)
    lse = torch.full((6, 2), math.nan)
    pad = (0, 0, 0, 0, 0, 3)
    q_nope, q_rope = (F.pad(q, pad, value=math.nan) for q in (problem.q_nope, problem.q_rope))
    attend(problem, q_nope=q_nope, q_rope=q_rope, out=out, lse=lse)
    assert_attention_close((out[:3], lse[:3]), problem.expected(), torch.float32)
    assert out[3:].isnan().all()
    assert lse[3:].isnan().all()


def test_an_empty_batch_gives_empty_results():
    problem = paged_problem([])
    out, lse = attend(problem)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)


def test_same_inputs_give_the_same_bits():
    problem = paged_problem([100, 40, 90, 7], [2, 2, 1, 1], dtype=torch.bfloat16)
    first, second = attend(problem), attend(problem)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("kv_lens", [[1000] + [100] * 3, [8000] + [100] * 63], ids=["4", "64"])
def test_one_long_request_does_not_pad_the_short_ones(monkeypatch, kv_lens):
    gathered = []
    select_rows = cache.select_rows
    monkeypatch.setattr(
        cache, "select_rows", lambda c, slots: gathered.append(len(slots)) or select_rows(c, slots)
    )
    problem = paged_problem(kv_lens, page_size=64)
    actual = attend(problem)
    assert_attention_close(actual, problem.expected(), torch.float32)
    assert sum(gathered) < 1.4 * sum(kv_lens)


def test_long_extends_are_blocked_over_queries(monkeypatch):
    blocks = []
    scores = torch_attention._scores
    monkeypatch.setattr(torch_attention, "_BLOCK_SCORES", 8_000)
    monkeypatch.setattr(
        torch_attention, "_scores", lambda q, k: blocks.append(scores(q, k)) or blocks[-1].clone()
    )
    problem = paged_problem([300, 300, 64], [100, 100, 2], page_size=16)
    actual = attend(problem)
    assert_attention_close(actual, problem.expected(), torch.float32)
    assert max(block.numel() for block in blocks) <= 8_000


@pytest.mark.parametrize("q_len, kv_len", [(100, 60), (2, 9000)])
def test_long_prompts_are_blocked_over_heads_and_queries(monkeypatch, q_len, kv_len):
    blocks = []
    scores = torch_attention._scores
    monkeypatch.setattr(torch_attention, "_BLOCK_SCORES", 9_000)
    monkeypatch.setattr(
        torch_attention, "_scores", lambda q, k: blocks.append(scores(q, k)) or blocks[-1].clone()
    )
    q, k = torch.randn(q_len, 4, 8), torch.randn(kv_len, 4, 8)
    torch_attention.prefill_attention(q, k, k, offsets([q_len]), offsets([kv_len]), 1.0, causal=False)
    assert max(block.numel() for block in blocks) <= 9_000


@st.composite
def ragged(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=4))
    return [n for n, _ in requests], [m for _, m in requests]


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def new_nans(tensor, *shape, **options):
    """`Tensor.new_empty` as memory that others have used."""
    return tensor.new_full(shape[0] if isinstance(shape[0], tuple) else shape, math.nan, **options)


def dense_prefill(q, k, v, q_lens, kv_lens, scale, causal):
    parts = [
        dense_attention(*parts, scale, causal)
        for parts in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@settings(max_examples=40, deadline=None)
@given(
    ragged(),
    st.booleans(),
    st.sampled_from(DTYPES),
    st.sampled_from([1 << 20, 60, 4]),
    st.integers(0, 1 << 16),
)
def test_prefill_attention_equals_dense_attention(lens, causal, dtype, block_scores, seed):
    q_lens, kv_lens = lens
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(q_lens), 3, 24, generator=g).to(dtype)
    kv = torch.randn(sum(kv_lens), 3, 40, generator=g).to(dtype)
    k, v = kv[..., :24], kv[..., 24:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "_BLOCK_SCORES", block_scores)
        patch.setattr(torch.Tensor, "new_empty", new_nans)
        actual = torch_attention.prefill_attention(
            q,
            k,
            v,
            offsets(q_lens),
            offsets(kv_lens),
            0.3,
            causal=causal,
            compute_dtype=torch.float64 if dtype is torch.float64 else torch.float32,
        )
    assert_attention_close(actual, dense_prefill(q, k, v, q_lens, kv_lens, 0.3, causal), dtype)


def test_whole_blocks_may_see_no_key(monkeypatch):
    """Of the first tokens of a causal request with fewer keys than tokens."""
    monkeypatch.setattr(torch_attention, "_BLOCK_SCORES", 4)
    q, k = torch.randn(9, 2, 8), torch.randn(3, 2, 8)
    actual = torch_attention.prefill_attention(q, k, k, offsets([9]), offsets([3]), 1.0, causal=True)
    assert_attention_close(actual, dense_attention(q, k, k, 1.0, True), torch.float32)


def test_prefilled_rows_behind_the_last_request_are_empty(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "new_empty", new_nans)
    q, starts = torch.randn(5, 2, 8), torch.tensor([0, 3]).int()
    out, lse = torch_attention.prefill_attention(q, q, q, starts, starts, 1.0, causal=True)
    assert (out[3:] == 0).all() and lse[3:].isneginf().all()
    assert_attention_close((out[:3], lse[:3]), dense_attention(*[q[:3]] * 3, 1.0, True), torch.float32)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=3),
    st.integers(0, 1 << 16),
)
def test_chunked_context_merges_into_the_whole(requests, seed):
    """New tokens (causal) merged with two chunks of context (not causal) equal one causal pass."""
    g = torch.Generator().manual_seed(seed)
    q_lens = [n for n, _, _ in requests]
    q = torch.randn(sum(q_lens), 2, 24, generator=g)
    pieces = [[torch.randn(n, 2, 40, generator=g) for n in (a, b, new)] for new, a, b in requests]
    whole = torch.cat([torch.cat(piece) for piece in pieces])
    kv_lens = [sum(len(p) for p in piece) for piece in pieces]

    state = None
    for chunk in range(3):
        kv = torch.cat([piece[chunk] for piece in pieces])
        lens = [len(piece[chunk]) for piece in pieces]
        part = torch_attention.prefill_attention(
            q, kv[..., :24], kv[..., 24:], offsets(q_lens), offsets(lens), 0.3, causal=chunk == 2
        )
        state = part if state is None else torch_attention.merge_states(*state, *part)
    expected = dense_prefill(q, whole[..., :24], whole[..., 24:], q_lens, kv_lens, 0.3, True)
    assert_attention_close(state, expected, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from(DTYPES),
    st.integers(0, 1 << 16),
)
def test_merged_halves_equal_the_whole(first, second, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 2, 16, generator=g, dtype=torch.float64)
    k = torch.randn(first + second, 2, 16, generator=g, dtype=torch.float64)
    states = []
    for keys in (k[:first], k[first:]):
        out, lse = dense_attention(q, keys, keys, 1.0, causal=False)
        # What an attention kernel leaves in rows without keys must not matter.
        states += [torch.where(lse.isneginf()[..., None], math.nan, out).to(dtype), lse.float()]
    merged = torch_attention.merge_states(*states)
    assert_attention_close(merged, dense_attention(q, k, k, 1.0, causal=False), dtype)


def test_merged_states_are_rounded_once():
    g = torch.Generator().manual_seed(0)
    outs = [torch.randn(50, 2, 16, generator=g).bfloat16() for _ in range(2)]
    lses = [torch.randn(50, 2, generator=g, dtype=torch.float64) for _ in range(2)]
    out, lse = torch_attention.merge_states(outs[0], lses[0], outs[1], lses[1])
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    expected = (torch.stack(outs).double() * weights).sum(0)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=2**-8)
    assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32


@pytest.mark.parametrize("lse", [0.0, 1e4, 1e6, 3e7, -1e6])
def test_weights_of_merged_states_add_up_to_1(lse):
    """However coarse fp32 is at the lse."""
    out, lses = torch.ones(1, 2, 4), torch.full((1, 2), lse)
    merged, _ = torch_attention.merge_states(out, lses, out, lses + 1)
    torch.testing.assert_close(merged, out, atol=0, rtol=1e-6)


def test_an_output_in_the_place_of_queries():
    """Also if some requests have no keys, whose outputs are zeros."""
    problem = paged_problem([5, 0, 3])
    expected = problem.expected()
    inputs = (problem.q_nope, problem.q_rope, problem.latent_cache, problem.batch, problem.scale)
    out, lse = torch_attention.paged_attention(*inputs, out=problem.q_nope)
    assert out is problem.q_nope
    assert_attention_close((out, lse), expected, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_nope": torch.zeros(2, 2, 15)}, "rows are 24 wide, expected d_c . d_rope = 23"),
        ({"q_nope": torch.zeros(2, 3, 16)}, "with the same T and H"),
        ({"q_nope": torch.zeros(2, 32)}, "with the same T and H"),
        ({"q_rope": torch.zeros(2, 2, 8).half()}, "must have one dtype"),
        (
            {
                name: torch.zeros(2, 2, width, device="meta")
                for name, width in (("q_nope", 16), ("q_rope", 8))
            },
            "must be on one device, got meta, meta, cpu",
        ),
        (
            {"q_nope": torch.zeros(1, 2, 16), "q_rope": torch.zeros(1, 2, 8)},
            "1 tokens, the batch has 2 query tokens",
        ),
        ({"latent_cache": torch.zeros(9, 8, 24)}, "pages of 8 tokens, expected 4"),
        ({"latent_cache": torch.zeros(9, 24)}, r"must be \[num_pages, page_size, d_c . d_rope\]"),
        ({"latent_cache": torch.zeros(9, 4, 24).int()}, "must be one of .*got torch.int32"),
        ({"latent_cache": torch.zeros(9, 24, 4).transpose(1, 2)}, "last dimension of latent_cache"),
        ({"compute_dtype": torch.bfloat16}, "compute_dtype must be torch.float32 or torch.float64"),
        ({"out": torch.zeros(2, 2, 15)}, r"out must be \[2, 2, 16\]"),
        ({"lse": torch.zeros(2, 2).double()}, r"lse must be torch.float32 \[2, 2\]"),
        ({"q_nope": None}, "q_nope must be a torch.Tensor, got NoneType"),
        ({"latent_cache": None}, "latent_cache must be a torch.Tensor, got NoneType"),
        ({"out": [1]}, "out must be a torch.Tensor, got list"),
        ({"lse": [1]}, "lse must be a torch.Tensor, got list"),
        ({"batch": None}, "batch must be a DecodeBatch, got NoneType"),
        (
            {"softmax_scale": 0.0},
            "softmax_scale must be a number, finite and greater than 0 in fp32 .*, got 0.0",
        ),
    ],
)
def test_paged_attention_refuses(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        attend(paged_problem([9, 3]), **changes)


def batch_of(
    seq_lens,
    starts=None,
    *,
    max_query_len=1,
    width=3,
    page_size=4,
    kind=TableKind.BLOCK,
    pages=None,
    rows=None,
):
    table = torch.zeros(len(seq_lens), width, dtype=torch.int32) if pages is None else pages
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    rows = None if rows is None else torch.tensor(rows)
    return DecodeBatch(lengths, table, page_size, starts, max_query_len, kind, rows)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of([13, 2]), "range from 2 to 13, the table holds 0 .. 12 tokens"),
        (batch_of([5, 2], page_size=0), "page_size must be a positive int"),
        (batch_of([4, 2], kind=TableKind.TOKEN), "the table holds 0 .. 3 tokens"),
        (batch_of([-1, 2]), "range from -1 to 2"),
        (batch_of([5, 5], [0, 2, 1], max_query_len=2), "query_start_loc must rise from 0"),
        (batch_of([5, 5], [1, 2, 3]), "query_start_loc must rise from 0"),
        (batch_of([5, 5], [0, 1, 3]), "has 2 query tokens, max_query_len is 1: set .* max_query_len to 2"),
        (batch_of([5, 5], rows=[0, 2]), "table_rows range from 0 to 2, the table has rows 0 .. 1"),
        (batch_of([5, 5], rows=[-1, 1]), "table_rows range from -1 to 1"),
    ],
)
def test_paged_attention_refuses_batch(batch, message):
    with pytest.raises(InvalidInputError, match=message):
        torch_attention.paged_attention(
            torch.zeros(3, 2, 16), torch.zeros(3, 2, 8), torch.zeros(9, 4, 24), batch, 1.0
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 2, 8)}, "must agree in H and d_qk"),
        ({"v": torch.zeros(5, 2, 4)}, "k and v in S and H"),
        ({"v": torch.zeros(6, 4)}, r"\[S, H, d_v\]"),
        ({"k": torch.zeros(6, 2, 12).half()}, "must have one dtype"),
        ({"cu_seqlens_q": offsets([1, 1, 2])}, r"must both be \[batch . 1\]"),
        (
            {name: torch.zeros(0).int() for name in ("cu_seqlens_q", "cu_seqlens_k")},
            r"must both be \[batch . 1\]",
        ),
        ({"cu_seqlens_k": offsets([3, 4])}, "cu_seqlens_k must rise from 0 to at most 6"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2]).int()}, "cu_seqlens_q must rise from 0 to at most 4"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, "must be torch.int32, got torch.int64 and torch.int32"),
        ({"v": torch.zeros(6, 2, 4, device="meta")}, "must be on one device, got cpu, cpu, meta, cpu, cpu"),
        (
            {"softmax_scale": math.nan},
            "softmax_scale must be a number, finite and greater than 0 in fp32 .*, got nan",
        ),
    ],
)
def test_prefill_attention_refuses(changes, message):
    args = {
        "q": torch.zeros(4, 2, 12),
        "k": torch.zeros(6, 2, 12),
        "v": torch.zeros(6, 2, 4),
        "cu_seqlens_q": offsets([2, 2]),
        "cu_seqlens_k": offsets([3, 3]),
        "softmax_scale": 1.0,
    }
    with pytest.raises(InvalidInputError, match=message):
        torch_attention.prefill_attention(**args | changes, causal=True)


@pytest.mark.parametrize("merge_states", [torch_attention.merge_states, prefill.merge_states])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_b": torch.zeros(2, 3, 5)}, "two outputs"),
        ({"out_a": None}, "out_a must be a torch.Tensor, got NoneType"),
        ({"lse_b": [1]}, "lse_b must be a torch.Tensor, got list"),
        ({"out_b": torch.zeros(2, 3, 4).half()}, "of one dtype, got torch.float32 and torch.float16"),
        ({"lse_b": torch.zeros(2, 3, device="meta")}, "on one device, got cpu, cpu, cpu, meta"),
    ],
)
def test_merge_states_refuses(merge_states, changes, message):
    states = {"out_a": torch.zeros(2, 3, 4), "lse_a": torch.zeros(2, 3)}
    states |= {"out_b": torch.zeros(2, 3, 4), "lse_b": torch.zeros(2, 3)}
    with pytest.raises(InvalidInputError, match=message):
        merge_states(**states | changes)
