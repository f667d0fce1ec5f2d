"""Decode context parallelism: what two ranks of SGLang's groups do, one after the other in this process."""

import functools
import math
import types

import pytest
import torch

from mla_backend.batch import Shard
from mla_backend.errors import UnsupportedError
from mla_backend.torch_attention import merge_states
from mla_backend_sglang import attention_backend, refusals, shard
from mla_backend_sglang.append import Appender
from mla_backend_sglang.prefill_step import LayerInputs, PrefillChooser, PrefillMethod
from mla_backend_sglang.settings import Settings
from mla_backend_sglang.weights import LayerWeights
from tests.sglang.test_backend import GEOMETRY, PAGE_SIZE, SCALE, Attention, Batch, FakePolicy

RANKS = 2
WIDTH = GEOMETRY.latent_dim


def divided(batch):
    """The caches of all ranks; the batch's table gets the slots that SGLang allocates for all of them."""
    rows = batch.cache.shape[0] * PAGE_SIZE
    caches = torch.full((RANKS, rows // PAGE_SIZE, PAGE_SIZE, WIDTH), torch.nan, dtype=batch.cache.dtype)
    page = PAGE_SIZE * RANKS
    first = 0
    for row, latents in zip(batch.rows.tolist(), batch.latents, strict=True):
        slots = first * page + torch.arange(len(latents))
        first += -(-len(latents) // page)
        batch.table[row, : len(latents)] = slots.int()
        caches.view(RANKS, rows, WIDTH)[slots % RANKS, slots // RANKS] = latents
    return caches


class Group:
    """A group whose ranks come one after the other: a sum has what all of them would add."""

    def __init__(self):
        self.added = []

    def all_reduce(self, rows):
        self.added.append(rows.clone())
        return rows


def set_rank(monkeypatch, rank, group=None):
    parallel = types.SimpleNamespace(attn_dcp_rank=rank, attn_dcp_size=RANKS, dcp_group=group)
    monkeypatch.setattr(shard, "get_parallel", lambda: parallel)


def test_ranks_gather_what_they_have_among_them(monkeypatch):
    batch = Batch([(3, 6), (2, 0)])
    caches = divided(batch)
    slots = batch.table[batch.rows[0], :9].long()
    group = Group()
    for rank in range(RANKS):
        set_rank(monkeypatch, rank, group)
        shard.gather_rows(caches[rank], slots, shard.current_shard(), None, caches.dtype)
    torch.testing.assert_close(sum(group.added), batch.latents[0], rtol=0, atol=0)


def test_a_prefill_attends_to_the_tokens_of_all_ranks(monkeypatch):
    lengths = [(3, 0), (1, 9), (6, 20), (7, 4), (2, 33)]
    batch = Batch(lengths)
    caches = divided(batch)
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=12, may_absorb=False)
    assert {chooser(*each) for each in lengths} == set(PrefillMethod) - {PrefillMethod.ABSORBED}
    attention = Attention()
    inputs = [batch.q, *batch.new_keys(attention.weight)]

    def rows_of_all(latent_cache, slots, *_):
        return caches.view(RANKS, -1, WIDTH)[slots % RANKS, slots // RANKS]

    monkeypatch.setattr("mla_backend_sglang.prefill_step.gather_rows", rows_of_all)
    layer = LayerInputs(*inputs, caches[1], SCALE, LayerWeights(attention), Shard(1, RANKS))
    out = batch.step().attend(layer, chooser)
    torch.testing.assert_close(out, batch.expected(attention.weight), atol=1e-5, rtol=1e-5)


def backend_of(rank, batch, latent_cache):
    """A backend with the attributes that a decode step needs."""
    ours = object.__new__(attention_backend.SglangMLABackend)
    ours._shard, ours._draft_step = shard.current_shard(), None
    ours._kv_scale, ours._is_draft, ours._num_draft_tokens = None, False, 0
    ours._query_scaling = None
    ours.max_context_len, ours._page_size, ours._table = len(batch.table[0]), PAGE_SIZE, batch.table
    runner = types.SimpleNamespace(
        dtype=latent_cache.dtype,
        kv_cache_dtype=latent_cache.dtype,
        req_to_token_pool=types.SimpleNamespace(size=len(batch.latents)),
    )
    spec = ours._decoder_spec(GEOMETRY, runner, 100)
    assert (spec.num_heads, spec.max_query_len) == (GEOMETRY.num_heads * RANKS, 1)
    ours._make_decoder(spec)
    pool = types.SimpleNamespace(get_key_buffer=lambda layer: latent_cache.view(-1, 1, WIDTH))
    ours.token_to_kv_pool = pool
    ours._appender = Appender({}, ours._shard, None, latent_cache.dtype, "cpu")
    return ours


def check_that_only_own_tokens_are_written(rank, slots, before, after):
    before, after = before.view(-1, WIDTH), after.view(-1, WIDTH)
    written = torch.zeros(len(before), dtype=torch.bool)
    written[slots.long()[slots % RANKS == rank] // RANKS] = True
    assert torch.equal(before[~written].nan_to_num(7.0), after[~written].nan_to_num(7.0))
    assert not after[written].isnan().any()


def test_a_decode_step_of_all_ranks_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(Settings, "is_deterministic", False)
    batch = Batch([(1, 9), (1, 0), (1, 20), (1, 4)])
    caches = divided(batch)
    heads, d_c = GEOMETRY.num_heads * RANKS, GEOMETRY.kv_lora_rank
    q = torch.randn(4, heads, WIDTH, dtype=torch.float64)
    new = torch.stack([latents[-1] for latents in batch.latents])
    slots = torch.stack([batch.table[r, len(x) - 1] for r, x in zip(batch.rows, batch.latents, strict=True)])
    caches.view(RANKS, -1, WIDTH)[slots.long() % RANKS, slots.long() // RANKS] = torch.nan
    mode = types.SimpleNamespace(
        is_decode_or_idle=lambda: True, is_target_verify=lambda: False, is_draft_extend_v2=lambda: False
    )
    step = types.SimpleNamespace(
        forward_mode=mode,
        batch_size=4,
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.rows,
        out_cache_loc=slots,
        out_cache_loc_is_physical=False,
    )
    layer = types.SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, v_head_dim=d_c, head_dim=WIDTH, scaling=SCALE
    )
    states = []
    for rank in range(RANKS):
        set_rank(monkeypatch, rank)
        before = caches[rank].clone()
        ours = backend_of(rank, batch, caches[rank])
        ours.init_forward_metadata(step)
        key = new.unsqueeze(1)
        out, lse = ours.forward_decode(
            q[..., :d_c],
            key[..., :d_c],
            key[..., :d_c],
            layer,
            step,
            q_rope=q[..., d_c:],
            k_rope=key[..., d_c:],
        )
        states.append((out, lse / math.log2(math.e)))
        check_that_only_own_tokens_are_written(rank, slots, before, caches[rank])
    out, lse = functools.reduce(lambda a, b: merge_states(*a, *b), states)
    for i, latents in enumerate(batch.latents):
        scores = torch.einsum("hd,kd->hk", q[i], latents) * SCALE
        torch.testing.assert_close(lse[i].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out[i], scores.softmax(-1) @ latents[:, :d_c], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("served", [True, False])
def test_layers_that_cannot_be_divided_are_refused(served):
    model = torch.nn.Module()
    model.attention = Attention()
    if served:
        model.attention.attn_mqa_for_dcp_decode = torch.nn.Identity()
        refusals.check_layers_of_shard(model)
        model.attention.kv_b_proj.set_lora = True
    with pytest.raises(UnsupportedError, match="leave --dcp-size out"):
        refusals.check_layers_of_shard(model)


def test_layers_without_kv_b_proj_can_be_divided():
    """They cannot have adapters of it, either."""
    model = torch.nn.Module()
    model.attention = Attention()
    model.attention.attn_mqa_for_dcp_decode = torch.nn.Identity()
    del model.attention.kv_b_proj
    refusals.check_layers_of_shard(model)
