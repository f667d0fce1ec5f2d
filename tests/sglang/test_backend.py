"""The backend without an engine: the method of a request, mixed prefill batches, weights, refusals."""

import math
import re
import types
import weakref
from pathlib import Path

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from mla_backend import prefill, prefill_libraries
from mla_backend.batch import WHOLE, DecodeBatch, TableKind
from mla_backend.cache_format import cache_format
from mla_backend.decode import MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, default_rates
from mla_backend_sglang import attention_backend, dispatch, weights
from mla_backend_sglang.append import NewTokens
from mla_backend_sglang.prefill_step import (
    LayerInputs,
    PrefillChooser,
    PrefillMethod,
    PrefillStep,
    expansion_tokens,
)
from mla_backend_sglang.query_scaling import QueryScaling
from mla_backend_sglang.settings import Settings

GEOMETRY = MLAGeometry(
    num_heads=2,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    softmax_scale=24**-0.5,
    hidden_size=64,
)
SCALE = 0.3
PAGE_SIZE = 4


class FakePolicy:
    """Absorbs up to two new tokens."""

    @staticmethod
    def absorbed(query_len, prefix_len):
        return query_len <= 2


def radix_attention(heads, dim, **others):
    return RadixAttention(GEOMETRY.num_heads, dim, SCALE, num_kv_heads=heads, layer_id=0, **others)


class Attention(torch.nn.Module):
    """The attributes of SGLang's MLA layer that the backend uses, and the layer's split of kv_b_proj."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        g = GEOMETRY
        self.attn_mqa = radix_attention(1, g.latent_dim, v_head_dim=g.kv_lora_rank)
        self.attn_mha = radix_attention(2, g.qk_head_dim, v_head_dim=g.v_head_dim)
        self.layer_id = 0
        self.kv_lora_rank, self.scaling, self.hidden_size = g.kv_lora_rank, SCALE, g.hidden_size
        self.qk_nope_head_dim, self.qk_rope_head_dim = g.qk_nope_head_dim, g.qk_rope_head_dim
        self.v_head_dim = g.v_head_dim
        self.weight = torch.nn.Parameter(
            torch.randn(g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank, dtype=dtype),
            requires_grad=False,
        )
        self.kv_b_proj = lambda x: (x @ self.weight.T, None)
        self.kv_b_proj.weight = self.weight
        self.w_kc = self.w_vc = None
        self.split()

    def split(self):
        heads = self.weight.view(GEOMETRY.num_heads, -1, self.kv_lora_rank)
        for name, value in (
            ("w_kc", heads[:, : self.qk_nope_head_dim].clone()),
            ("w_vc", heads[:, self.qk_nope_head_dim :].transpose(1, 2).clone()),
        ):
            if getattr(self, name) is None:
                setattr(self, name, value)
            else:
                getattr(self, name).copy_(value)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(torch.float32)

    def load_weights(self, weight):
        self.attention.weight.copy_(weight)
        self.attention.split()


def adopt(model, layer_ids=None):
    return weights.adopt_weights(model, GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim, layer_ids)


def test_the_method_depends_only_on_the_request():
    chooser = PrefillChooser(Policy(GEOMETRY, default_rates("cpu")), chunk_tokens=100)
    assert chooser(1, 0) is chooser(5000, 0) is PrefillMethod.VANILLA
    assert chooser(1, 5000) is PrefillMethod.ABSORBED
    assert chooser(5000, 1) is PrefillMethod.CHUNKED
    small = PrefillChooser(FakePolicy(), chunk_tokens=100)
    assert small(3, 97) is PrefillMethod.ONE_SHOT
    assert small(3, 98) is PrefillMethod.CHUNKED
    only_absorbed = PrefillChooser(FakePolicy(), chunk_tokens=100, absorb_prefixes=True)
    assert only_absorbed(3, 97) is PrefillMethod.ABSORBED
    assert only_absorbed(3, 0) is PrefillMethod.VANILLA


def test_expanded_keys_and_values_of_all_heads_fit_512_mib():
    geometry = MLAGeometry(128, 512, 128, 64, 128, 0.1, 7168)
    per_token = 128 * (192 + 128) * 2  # bytes
    for heads in (128, 16):
        policy = Policy(geometry.per_rank(128 // heads), default_rates("cpu"))
        expected = (512 << 20) // (per_token * heads // 128)
        assert expansion_tokens(policy, torch.bfloat16) == expected


class Batch:
    """Requests with random latents in a paged cache whose unused slots hold NaN."""

    def __init__(self, lengths):
        torch.manual_seed(0)
        self.query_lens, self.prefix_lens = zip(*lengths, strict=True)
        self.total = sum(self.query_lens)
        totals = [q + p for q, p in lengths]
        pages = [-(-t // PAGE_SIZE) for t in totals]
        order = (torch.randperm(sum(pages)) + 1).tolist()
        self.cache = torch.full(
            (sum(pages) + 1, PAGE_SIZE, GEOMETRY.latent_dim), math.nan, dtype=torch.float64
        )
        self.table = torch.full((len(lengths) + 3, max(totals) + 5), -7, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
        self.latents = []
        for row, total, num_pages in zip(self.rows.tolist(), totals, pages, strict=True):
            latents = torch.randn(total, GEOMETRY.latent_dim, dtype=torch.float64)
            mine = [order.pop() for _ in range(num_pages)]
            slots = torch.tensor([mine[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(total)])
            self.cache.view(-1, GEOMETRY.latent_dim)[slots] = latents
            self.table[row, :total] = slots.int()
            self.latents.append(latents)
        self.q = torch.randn(self.total, GEOMETRY.num_heads, GEOMETRY.qk_head_dim, dtype=torch.float64)
        self.seq_lens = torch.tensor(totals, dtype=torch.int32)

    def step(self):
        decoder = MLADecoder(
            num_heads=GEOMETRY.num_heads,
            kv_lora_rank=GEOMETRY.kv_lora_rank,
            qk_rope_head_dim=GEOMETRY.qk_rope_head_dim,
            dtype=torch.float64,
            page_size=PAGE_SIZE,
            table_kind=TableKind.TOKEN,
            device="cpu",
            max_batch=16,
        )
        return PrefillStep(
            self.query_lens,
            self.prefix_lens,
            table=self.table,
            table_rows=self.rows,
            seq_lens=self.seq_lens,
            decoder=decoder,
            library="torch",
        )

    def expand(self, weight, latents):
        kv = (latents[:, : GEOMETRY.kv_lora_rank] @ weight.T).view(len(latents), GEOMETRY.num_heads, -1)
        rope = latents[:, None, GEOMETRY.kv_lora_rank :].expand(-1, GEOMETRY.num_heads, -1)
        return torch.cat([kv[..., : GEOMETRY.qk_nope_head_dim], rope], -1), kv[
            ..., GEOMETRY.qk_nope_head_dim :
        ]

    def new_keys(self, weight):
        latents = [x[p:] for x, p in zip(self.latents, self.prefix_lens, strict=True)]
        return self.expand(weight, torch.cat(latents))

    def expected(self, weight):
        """Vanilla attention of each request, one query token at a time."""
        rows, start = [], 0
        for latents, query_len, prefix_len in zip(
            self.latents, self.query_lens, self.prefix_lens, strict=True
        ):
            key, value = self.expand(weight, latents)
            for i in range(query_len):
                seen = prefix_len + i + 1
                scores = torch.einsum("hd,khd->hk", self.q[start + i], key[:seen]) * SCALE
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[:seen]))
            start += query_len
        return torch.stack(rows)


@pytest.mark.parametrize("padding", [0, 2])
def test_tokens_that_were_padded_after_planning_get_zero(padding):
    """As SGLang pads the eager steps of drafts with data-parallel attention."""
    batch = Batch([(1, 8), (1, 3), (1, 17)])
    decoder = batch.step()._decoder
    planned = DecodeBatch(
        batch.seq_lens, batch.table, PAGE_SIZE, None, 1, TableKind.TOKEN, table_rows=batch.rows
    )
    queries = torch.randn(3 + padding, GEOMETRY.num_heads, GEOMETRY.latent_dim, dtype=torch.float64)
    parts = queries.split([GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim], dim=-1)
    out, lse = attention_backend.attend_planned_tokens(
        decoder, decoder.plan(planned), *parts, batch.cache, SCALE, None
    )
    for i, latents in enumerate(batch.latents):
        weights = (torch.einsum("hd,kd->hk", queries[i], latents) * SCALE).softmax(-1)
        expected = weights @ latents[:, : GEOMETRY.kv_lora_rank]
        torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)
    assert len(out) == len(lse) == 3 + padding and not out[3:].any() and not lse[3:].any()


def test_queries_grow_with_their_positions():
    """The factors of a step are made once: in a CUDA graph, when its first layer attends."""
    scaling, positions = QueryScaling(0.5, 4), torch.arange(11)
    expected = 1 + 0.5 * (1 + positions // 4).double().log().view(-1, 1, 1)
    first, second = torch.ones(11, 2, 3), torch.ones(11, 2, 5)
    step = object()
    scaling.scale_(step, positions, first, second)
    for query in (first, second):
        torch.testing.assert_close(query.double(), expected.expand(query.shape), atol=1e-6, rtol=0)
    again, later = torch.ones(11, 1, 1), torch.ones(11, 1, 1)
    scaling.scale_(step, positions + 100, again)
    scaling.scale_(object(), positions + 100, later)
    assert torch.equal(again, first[:, :1, :1]) and (later > 2).all()
    with pytest.raises(UnsupportedError, match="10 positions for 11 query tokens: use a supported"):
        scaling.scale_(step, positions[:10], again)


@pytest.mark.parametrize("split", [True, False])
def test_queries_that_the_model_concatenates_it_has_scaled(split):
    backend = attention_backend.SglangMLABackend.__new__(attention_backend.SglangMLABackend)
    backend._query_scaling, backend.forward_metadata = QueryScaling(1.0, 1), object()
    layer, batch = Attention().attn_mqa, types.SimpleNamespace(positions=torch.tensor([0, 6]))
    q = torch.ones(2, GEOMETRY.num_heads, GEOMETRY.latent_dim)
    parts = q.clone().tensor_split([GEOMETRY.kv_lora_rank], dim=-1)
    given = {"q": parts[0], "q_rope": parts[1]} if split else {"q": q}
    tokens = NewTokens.of_call(k=None, v=None, layer=layer, forward_batch=batch, **given)
    for query in backend._scaled(tokens):
        assert torch.equal(query[0], torch.ones_like(query[0]))
        assert (query[1] > 2).all() if split else torch.equal(query[1], torch.ones_like(query[1]))


# New tokens and prefix of each request. All methods occur, and no method's requests are contiguous.
LENGTHS = [(3, 0), (1, 9), (6, 20), (7, 4), (5, 0), (2, 33), (4, 5), (9, 13)]


def test_one_batch_with_every_method():
    batch = Batch(LENGTHS)
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=12)
    assert {chooser(*lengths) for lengths in LENGTHS} == set(PrefillMethod)
    attention = Attention()
    layer = weights.LayerWeights(attention)
    key, value = batch.new_keys(attention.weight)
    padded = [torch.cat([x, torch.full_like(x[:3], math.nan)]) for x in (batch.q, key, value)]
    out = batch.step().attend(LayerInputs(*padded, batch.cache, SCALE, layer), chooser)
    torch.testing.assert_close(out[: batch.total], batch.expected(attention.weight), atol=1e-5, rtol=1e-5)
    assert (out[batch.total :] == 0).all()


def test_chunks_of_the_same_length_share_their_plans():
    step = Batch([(9, 43)]).step()
    (group,) = step._group_requests(PrefillChooser(FakePolicy(), chunk_tokens=10))
    assert [ragged.key_offsets.tolist() for _, ragged in group.chunks] == [[0, 10]] * 4 + [[0, 3]]
    assert len({id(ragged.plans) for _, ragged in group.chunks}) == 2


def test_layers_share_what_a_library_plans(monkeypatch):
    """However many requests a step has; and the plans end with it."""
    batch = Batch([(3, 30 + i) for i in range(12)])
    attention, planned = Attention(), []
    layer = weights.LayerWeights(attention)

    class Plan:
        pass

    def attend(call, plans):
        key = (id(call.cu_seqlens_q), id(call.cu_seqlens_k))
        if key not in plans:
            plans[key] = plan = Plan()
            planned.append(weakref.ref(plan))
        return prefill_libraries.by_torch(call)

    monkeypatch.setattr(prefill, "_choose", lambda *_: prefill._Library("planning", attend, takes_plans=True))
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=10)
    inputs = LayerInputs(batch.q, *batch.new_keys(attention.weight), batch.cache, SCALE, layer)
    for _ in range(2):
        step = batch.step()
        for _ in range(3):
            out = step.attend(inputs, chooser)
        torch.testing.assert_close(out, batch.expected(attention.weight), atol=1e-5, rtol=1e-5)
    of_a_step = 12 + 12 + 10  # new tokens, whole chunks, and a shorter one except for 30 and 40 cached tokens
    assert [plan() is not None for plan in planned] == [False] * of_a_step + [True] * of_a_step


def test_absorbed_attention_for_a_whole_batch():
    batch = Batch(LENGTHS)
    attention = Attention()
    absorbed = weights.LayerWeights(attention).absorbed
    padded = torch.cat([batch.q, torch.full_like(batch.q[:3], math.nan)])
    q_nope, q_rope = padded.split([GEOMETRY.qk_nope_head_dim, GEOMETRY.qk_rope_head_dim], dim=-1)
    out = batch.step().attend_absorbed(absorbed.absorb_query(q_nope), q_rope, batch.cache, SCALE)
    expected = batch.expected(attention.weight)
    projected = absorbed.project_output(out[: batch.total])
    torch.testing.assert_close(projected, expected, atol=1e-5, rtol=1e-5)
    assert (out[batch.total :] == 0).all()


def test_expanded_requests_fit_the_buffer_together():
    step = Batch([(3, 6), (2, 3), (4, 4), (5, 20), (1, 1)]).step()
    assert step._split_by_tokens(range(5), 14) == [[0, 1], [2], [3], [4]]


def test_cached_tokens_are_expanded_with_the_scale_of_the_cache():
    attention, scale = Attention(torch.float32), torch.tensor([0.5])
    values = torch.randn(8, GEOMETRY.latent_dim)
    stored = (values / scale).to(torch.float8_e4m3fn)
    layer = weights.LayerWeights(attention)
    q = torch.zeros(1, GEOMETRY.num_heads, GEOMETRY.qk_head_dim)
    inputs = LayerInputs(q, q, q, stored.view(2, PAGE_SIZE, -1), SCALE, layer, kv_scale=scale)
    actual, expected = inputs.expand(torch.arange(8)), layer.expand(stored.float() * scale)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("d_nope, d_rope", [(128, 64), (6, 2), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_expanded_keys_end_with_the_rotary_part(d_nope, d_rope, dtype):
    """Whether the parts consist of words of 8 bytes or not."""
    attention = types.SimpleNamespace(kv_lora_rank=16, qk_nope_head_dim=d_nope, qk_rope_head_dim=d_rope)
    attention.v_head_dim = 4
    kv, latent = torch.randn(7, 3, d_nope + 4).to(dtype), torch.randn(7, 16 + d_rope).to(dtype)
    attention.kv_b_proj = lambda _: (kv.flatten(1), None)
    layer = weights.LayerWeights.__new__(weights.LayerWeights)
    layer.attention, layer.absorbed = attention, types.SimpleNamespace(w_uk=torch.empty(3, 1))
    key, value = layer.expand(latent)
    assert torch.equal(key[..., :d_nope], kv[..., :d_nope]) and torch.equal(value, kv[..., d_nope:])
    assert torch.equal(key[..., d_nope:], latent[:, None, 16:].expand(-1, 3, -1))


def test_parts_of_any_layout_are_joined():
    """Words of 8 bytes can be moved only where rows begin and end at their borders."""
    numbers = torch.arange(400, dtype=torch.bfloat16)
    right = numbers[:48].view(3, 4, 4)
    parts = {
        "words": numbers[:96].view(3, 4, 8),
        "begins between": numbers[1:97].view(3, 4, 8),
        "rows between": numbers[:108].view(3, 4, 9)[..., :8],
        "columns apart": numbers[:96].view(3, 8, 4).mT,
    }
    for name, left in parts.items():
        assert torch.equal(weights._join(left, right), torch.cat([left, right], dim=-1)), name


def test_a_prefix_that_cannot_be_expanded_is_refused():
    batch = Batch([(2, 3)])
    key, value = batch.new_keys(Attention().weight)
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=12)
    with pytest.raises(UnsupportedError, match="--disable-radix-cache"):
        batch.step().attend(LayerInputs(batch.q, key, value, batch.cache, SCALE, None), chooser)


def test_model_and_backend_share_one_copy_of_absorbed_weights():
    model = Model()
    (layer,) = adopt(model).values()
    attention = model.attention
    assert attention.w_kc is layer.absorbed.w_uk and attention.w_vc is layer.absorbed.w_uv
    assert adopt(model)[0] is layer  # a second backend of the same model

    address = layer.absorbed.w_uk.data_ptr()
    new = torch.randn_like(attention.weight)
    model.load_weights(new)
    assert attention.w_kc is layer.absorbed.w_uk and layer.absorbed.w_uk.data_ptr() == address
    heads = new.view(GEOMETRY.num_heads, -1, GEOMETRY.kv_lora_rank)
    torch.testing.assert_close(layer.absorbed.w_uk, heads[:, : GEOMETRY.qk_nope_head_dim])
    torch.testing.assert_close(layer.absorbed.w_uv, heads[:, GEOMETRY.qk_nope_head_dim :].transpose(1, 2))


def test_absorbed_weights_take_the_place_of_the_models_split():
    """SGLang releases and restores that memory with the other weights."""
    model = Model()
    attention = model.attention
    attention.w_kc = attention.w_kc.mT.contiguous().mT  # as SGLang lays it out
    addresses = attention.w_kc.data_ptr(), attention.w_vc.data_ptr()
    (layer,) = adopt(model).values()
    assert addresses == (layer.absorbed.w_uk.data_ptr(), layer.absorbed.w_uv.data_ptr())
    heads = attention.weight.view(GEOMETRY.num_heads, -1, GEOMETRY.kv_lora_rank)
    for absorbed, expected in (
        (layer.absorbed.w_uk, heads[:, : GEOMETRY.qk_nope_head_dim]),
        (layer.absorbed.w_uv, heads[:, GEOMETRY.qk_nope_head_dim :].mT),
    ):
        assert absorbed.is_contiguous() and torch.equal(absorbed, expected)


def test_a_split_that_is_a_part_of_the_parameter_is_left_as_it_is():
    """As that of a single head may be."""
    model = Model()
    attention, before = model.attention, model.attention.weight.clone()
    heads = attention.weight.detach().view(GEOMETRY.num_heads, -1, GEOMETRY.kv_lora_rank)
    attention.w_kc, attention.w_vc = heads.split([GEOMETRY.qk_nope_head_dim, GEOMETRY.v_head_dim], dim=1)
    attention.w_vc = attention.w_vc.mT
    (layer,) = adopt(model).values()
    assert torch.equal(attention.weight, before)
    assert torch.equal(layer.absorbed.w_uk, heads[:, : GEOMETRY.qk_nope_head_dim])


def test_transfers_that_bypass_the_loading_of_weights_are_followed():
    """SGLang calls `post_load_weights` after them, which splits anew."""

    class Transferred(Model):
        def post_load_weights(self):
            self.attention.w_kc = self.attention.w_vc = None
            self.attention.split()

    model = Transferred()
    (layer,) = adopt(model).values()
    address = layer.absorbed.w_uk.data_ptr()
    model.attention.weight.copy_(torch.randn_like(model.attention.weight))
    model.post_load_weights()
    assert model.attention.w_kc is layer.absorbed.w_uk and layer.absorbed.w_uk.data_ptr() == address
    heads = model.attention.weight.view(GEOMETRY.num_heads, -1, GEOMETRY.kv_lora_rank)
    torch.testing.assert_close(layer.absorbed.w_uk, heads[:, : GEOMETRY.qk_nope_head_dim])


def test_an_update_that_fails_leaves_the_absorbed_weights_in_place():
    class Failing(Model):
        def load_weights(self, weight):
            raise RuntimeError("no such tensor")

    model = Failing()
    (layer,) = adopt(model).values()
    layer._is_requantized = True  # its split is taken away before an update
    with pytest.raises(RuntimeError, match="no such tensor"):
        model.load_weights(None)
    assert model.attention.w_kc is layer.absorbed.w_uk and model.attention.w_vc is layer.absorbed.w_uv


def test_an_update_that_fails_half_way_harms_no_other_layer():
    class Failing(Model):
        def load_weights(self, weight):
            self.attention.w_kc = self.attention.weight[:1]  # and no w_vc
            raise RuntimeError("out of memory")

    model, other = Failing(), Model()
    (layer,), (other_layer,) = adopt(model).values(), adopt(other).values()
    for each in (layer, other_layer):
        each._is_requantized, each.has_16_bit_source = True, lambda: False
    update = weights._with_refresh(Failing.load_weights, {0: layer, 1: other_layer})
    with pytest.raises(RuntimeError, match="out of memory"):
        update(model, None)
    for each in (layer, other_layer):
        assert each.attention.w_kc is each.absorbed.w_uk and each.attention.w_vc is each.absorbed.w_uv


def test_fp8_splits_keep_their_scale_through_updates():
    """SGLang splits per-tensor fp8 weights into fp8 w_kc and w_vc, and copies new splits over old ones."""

    class Fp8Attention(Attention):
        def split(self):
            self.w_scale = self.weight.abs().max() / 448
            quantized = (self.weight / self.w_scale).to(torch.float8_e4m3fn)
            heads = quantized.view(GEOMETRY.num_heads, -1, self.kv_lora_rank)
            self.dequantized = heads.float() * self.w_scale
            for name, value in (
                ("w_kc", heads[:, : self.qk_nope_head_dim]),
                ("w_vc", heads[:, self.qk_nope_head_dim :].transpose(1, 2)),
            ):
                if getattr(self, name) is None:
                    setattr(self, name, value.clone())
                else:
                    getattr(self, name).copy_(value)

    model = Model()
    model.attention = attention = Fp8Attention(torch.float32)
    del attention.kv_b_proj.weight  # as if it were quantized in a way unknown to the backend
    (layer,) = adopt(model).values()
    for _ in range(2):
        w_uk = attention.dequantized[:, : GEOMETRY.qk_nope_head_dim]
        torch.testing.assert_close(layer.absorbed.w_uk.float(), w_uk, atol=0.02, rtol=0.01)
        model.load_weights(3 * torch.randn_like(attention.weight))


@pytest.mark.parametrize(
    "scales, warned", [([1.0, 0.5, 0.25], ["0.5 for layer 1"]), ([1.0, None, 1.0], [])], ids=str
)
def test_scales_that_sglang_does_not_apply_are_warned_of_once(caplog, scales, warned):
    def layer(scale):
        k_scale = None if scale is None else torch.nn.Parameter(torch.tensor(scale), requires_grad=False)
        attention = types.SimpleNamespace(attn_mqa=types.SimpleNamespace(k_scale=k_scale))
        return types.SimpleNamespace(attention=attention)

    attention_backend._warn_of_scales({i: layer(scale) for i, scale in enumerate(scales)})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(warned)
    assert all(f"a k_scale of {text}" in message for text, message in zip(warned, messages, strict=True))


def started(page_size=64, device="cpu", absorb_prefixes=False):
    """A backend with the attributes that its start-up log reads."""
    ours = object.__new__(attention_backend.SglangMLABackend)
    spec = types.SimpleNamespace(page_size=page_size, device=torch.device(device), dtype=torch.float16)
    spec.kv_format, spec.kv_lora_rank, spec.qk_rope_head_dim = cache_format("fp8_e4m3"), 512, 64
    ours.token_to_kv_pool = types.SimpleNamespace(size=5000)
    ours._decoder = types.SimpleNamespace(implementation="portable", reason="why", spec=spec)
    ours._chooser = PrefillChooser(Policy(GEOMETRY, default_rates("cpu")), 100, absorb_prefixes)
    ours._layers, ours._appender = {0: None, 1: None}, types.SimpleNamespace(fused={0: None})
    ours._shard, ours._prefill_library = WHOLE, "torch"
    return ours


@pytest.mark.parametrize(
    "deterministic, absorb_prefixes, absorbed",
    [
        (False, False, "on a cached prefix, requests with at most"),
        (False, True, "requests with a cached prefix use absorbed attention, others regular prefill"),
        (True, False, "all requests use absorbed attention (deterministic inference)"),
    ],
)
def test_the_start_is_logged_in_one_line(monkeypatch, caplog, deterministic, absorb_prefixes, absorbed):
    caplog.set_level("INFO")
    monkeypatch.setattr(Settings, "is_deterministic", deterministic)
    started(absorb_prefixes=absorb_prefixes)._log_start(None)
    (line,) = [record.getMessage() for record in caplog.records]
    for item in (
        " (supported) on the CPU; decode kernel: portable (why); cache: fp8_e4m3, 576 bytes per token and "
        "layer, 5,000 tokens; page size: 64; prefill library: torch; ",
        f"; {absorbed}",
        "; norm, rotary embedding and cache append fused in 1 of 2 attention layers",
    ):
        assert item in line


@pytest.mark.parametrize(
    "page_size, device, hint", [(1, "cuda", True), (64, "cuda", False), (1, "cpu", False)]
)
def test_pages_of_one_token_on_a_gpu_are_logged(monkeypatch, caplog, page_size, device, hint):
    caplog.set_level("INFO")
    monkeypatch.setattr(Settings, "is_deterministic", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    started(page_size, device)._log_start("4 kernels from the cache")
    assert ("--page-size 64" in caplog.text) is hint


def bare(draft_step=None, num_draft_tokens=0):
    """A backend with the attributes that its decoder and its plans depend on."""
    ours = object.__new__(attention_backend.SglangMLABackend)
    ours._shard, ours._draft_step, ours._num_draft_tokens = WHOLE, draft_step, num_draft_tokens
    ours._page_size, ours._table, ours._outgrown = PAGE_SIZE, torch.zeros(1, 1, dtype=torch.int32), []
    ours._is_draft, ours.max_context_len = False, 100
    ours._dimensions = GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim
    return ours


def spec_of(ours, absorbed_limit=100):
    pool = types.SimpleNamespace(size=2)
    runner = types.SimpleNamespace(dtype=torch.float32, kv_cache_dtype=torch.float32, req_to_token_pool=pool)
    return ours._decoder_spec(GEOMETRY, runner, absorbed_limit)


def test_a_decoder_is_made_for_the_longest_queries(monkeypatch):
    monkeypatch.setattr(Settings, "is_deterministic", False)
    lengths = [spec_of(bare(num_draft_tokens=drafts)).max_query_len for drafts in (0, 8, 200)]
    assert lengths == [100, 100, 200]
    assert spec_of(bare(draft_step=0, num_draft_tokens=8)).max_query_len == 1
    assert not spec_of(bare()).batch_invariant
    monkeypatch.setattr(Settings, "is_deterministic", True)
    assert spec_of(bare()).batch_invariant


@pytest.mark.parametrize("draft_step, keys", [(None, 0), (0, 1), (2, 3)])
def test_a_draft_step_sees_the_tokens_drafted_before_it(draft_step, keys):
    mode = types.SimpleNamespace(is_target_verify=lambda: False)
    assert bare(draft_step)._extra_keys(types.SimpleNamespace(forward_mode=mode)) == keys


def test_what_captured_graphs_use_is_kept_when_batches_grow(monkeypatch):
    monkeypatch.setattr(Settings, "is_deterministic", False)
    ours = bare()
    ours._make_decoder(spec_of(ours))
    old = weakref.ref(ours._decoder), weakref.ref(ours._seq_lens)
    ours._make_room(5)
    assert ours._decoder.spec.max_batch == len(ours._seq_lens) == 5
    assert ours._decoder is not old[0]() is not None and old[1]() is not None


@pytest.mark.parametrize(
    "num_tokens, ranks, fits", [(4, None, True), (6, [6], True), (6, None, False), (3, [3], False)]
)
def test_a_step_has_the_planned_tokens_or_is_padded(num_tokens, ranks, fits):
    planned = DecodeBatch(torch.ones(4).int(), torch.zeros(4, 1).int(), PAGE_SIZE)
    step = types.SimpleNamespace(global_num_tokens_cpu=ranks)
    if fits:
        attention_backend._check_tokens(planned, num_tokens, step)
    else:
        with pytest.raises(UnsupportedError, match=f"attends with {num_tokens} query tokens of 4 requests"):
            attention_backend._check_tokens(planned, num_tokens, step)


def test_prefixes_in_chunks_of_sglangs_are_refused():
    ours = bare()
    cache = torch.zeros(PAGE_SIZE, 1, GEOMETRY.latent_dim)
    ours.token_to_kv_pool = types.SimpleNamespace(get_key_buffer=lambda layer: cache)
    ours.forward_metadata = None
    step = types.SimpleNamespace(forward_mode=ForwardMode.EXTEND, attn_attend_prefix_cache=True)
    with pytest.raises(UnsupportedError, match="start with --disable-chunked-prefix-cache"):
        ours.forward_extend(cache, cache, cache, radix_attention(2, GEOMETRY.qk_head_dim), step)


def test_arguments_of_prefill_that_would_change_the_result_are_refused():
    ours = bare()
    cache = torch.zeros(PAGE_SIZE, 1, GEOMETRY.latent_dim)
    ours.token_to_kv_pool = types.SimpleNamespace(get_key_buffer=lambda layer: cache)
    ours.forward_metadata = None
    step = types.SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    layer, given = radix_attention(2, GEOMETRY.qk_head_dim), {"save_kv_cache": False, "sinks": torch.zeros(2)}
    with pytest.raises(UnsupportedError, match="calls attention with sinks, which mla_backend does not"):
        ours.forward_extend(cache, cache, cache, layer, step, **given)


def without_kv_b_proj(attention):
    del attention.kv_b_proj


def without_split(attention):
    attention.w_kc = None


def with_selected_keys(attention):
    attention.use_dsa = True


def with_sinks(attention):
    attention.learnable_sink_param = torch.zeros(2)


def with_a_window(attention):
    attention.attn_mqa.sliding_window_size = 128


def with_a_soft_cap(attention):
    attention.attn_mqa.logit_cap = 30.0


def without_causality(attention):
    """As in diffusion models."""
    attention.attn_mqa.attn_type = AttentionType.ENCODER_ONLY


def with_bidirectional_tokens(attention):
    """As in prompts with images."""
    attention.attn_mha.attn_type = AttentionType.DECODER_BIDIRECTIONAL


def with_another_pair(attention):
    """Latents of the same width as the cache's rows, divided at another place."""
    del attention.kv_b_proj, attention.attn_mha
    attention.attn_mqa.v_head_dim -= 8


def with_weights_in_8_bits(attention):
    attention.use_deep_gemm_bmm = True


def packed(attention):
    attention.use_intel_amx_backend = True


def with_packed_kv_b_proj(attention):
    attention.kv_b_proj.use_intel_amx_backend = True


@pytest.mark.parametrize(
    "change, message",
    [
        (
            packed,
            r"layer 0 \(Attention\) has weights that SGLang packed .*: use --attention-backend intel_amx",
        ),
        (with_packed_kv_b_proj, "packed for Intel AMX"),
        (with_weights_in_8_bits, "absorbed weights in 8 bits.*: unset SGLANG_USE_DEEPGEMM_BMM"),
        (with_a_window, r"layer 0 \(Attention\) has a sliding window or a soft cap.*: choose another"),
        (without_causality, r"layer 0 \(Attention\) is not causal \(encoder_only\).*: choose another"),
        (with_bidirectional_tokens, r"is not causal \(decoder_bidirectional\)"),
        (with_another_pair, "attends with keys per head, but has no kv_b_proj"),
        (with_a_soft_cap, "has a sliding window or a soft cap"),
        (without_kv_b_proj, r"layer 0 \(Attention\) attends with keys per head, but has no kv_b_proj"),
        (without_split, "has no kv_b_proj and w_kc .*GGUF.*: choose another .*leave out --weight-cache-mode"),
        (with_selected_keys, r"layer 0 \(Attention\) attends to selected keys \(DSA\).*MLA_BACKEND_DSA=1"),
        (with_sinks, r"layer 0 \(Attention\) has attention sinks.*: choose another"),
        (lambda layer: (with_sinks(layer), with_selected_keys(layer)), "has attention sinks"),
    ],
)
def test_layers_that_cannot_be_served_are_refused_at_start(change, message):
    model = Model()
    change(model.attention)
    with pytest.raises(UnsupportedError, match=message):
        adopt(model)


def test_a_model_whose_attention_is_hidden_is_refused():
    """SGLang's models for --model-impl transformers keep it in a dictionary."""
    model = torch.nn.Module()
    model.attention_instances = {0: radix_attention(2, GEOMETRY.qk_head_dim)}
    with pytest.raises(UnsupportedError, match="no attention layers in Module.*: leave --model-impl out"):
        adopt(model)


def test_layers_with_linear_attention_belong_to_another_backend():
    """As in Ling-2.5 and Ring-2.5."""
    model = Model()
    model.linear = torch.nn.Module()
    model.linear.attn = RadixAttention(2, 16, SCALE, num_kv_heads=2, layer_id=1)
    assert adopt(model, layer_ids={0: 0}).keys() == {0}
    del model.mla_backend_layers
    with pytest.raises(UnsupportedError, match="has no kv_b_proj"):
        adopt(model)


def test_layers_that_are_always_absorbed_need_no_kv_b_proj():
    """As in MiniCPM3."""
    model = Model()
    del model.attention.kv_b_proj, model.attention.attn_mha
    assert adopt(model) == {}


def test_layers_with_adapters_of_kv_b_proj_are_always_absorbed(monkeypatch):
    """SGLang corrects absorbed queries and outputs, but knows no adapter of a cached token."""
    monkeypatch.setattr(Settings, "is_deterministic", False)
    attention, batch = Attention(), types.SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    assert dispatch.choose_forward_method(attention, batch) is AttnForwardMethod.MHA
    attention.kv_b_proj.set_lora = False  # as on SGLang's wrapper, even before the first adapter is loaded
    assert dispatch.choose_forward_method(attention, batch) is AttnForwardMethod.MLA


def test_prefills_that_sglang_captures_are_absorbed(monkeypatch, caplog):
    """Whichever of the functions that tell this a version has; without any, the user learns what to do."""
    monkeypatch.setattr(Settings, "is_deterministic", False)
    attention, batch = Attention(), types.SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    assert dispatch._is_captured and not any(is_in_graph() for is_in_graph in dispatch._is_captured)
    for captured, method in ((True, AttnForwardMethod.MLA), (False, AttnForwardMethod.MHA)):
        monkeypatch.setattr(dispatch, "_is_captured", [lambda: False, lambda captured=captured: captured])
        assert dispatch.choose_forward_method(attention, batch) is method
    monkeypatch.setattr(dispatch, "_CAPTURES", [f"{name}_elsewhere" for name in dispatch._CAPTURES])
    monkeypatch.setattr(dispatch, "_is_captured", dispatch._find_captures())
    assert "use --cuda-graph-backend-prefill disabled" in caplog.text
    assert dispatch.choose_forward_method(attention, batch) is AttnForwardMethod.MHA


def test_sglang_tells_of_all_kinds_of_captured_prefills():
    """The names of functions that ask whether a prefill is in a graph; some versions have no full graphs."""
    import sglang

    executor = Path(sglang.__file__).parent / "srt/model_executor"
    asking = re.compile(r"^def (is_in_\w+_graph)\(", re.MULTILINE)
    names = {name for file in executor.rglob("*.py") for name in asking.findall(file.read_text())}
    assert names == {function.__name__ for function in dispatch._is_captured}


def test_a_batch_without_new_tokens():
    """Every prefill of some models and modes is absorbed, also of ranks that run a batch for others."""
    batch = Batch([(0, 9), (0, 4)])
    q_nope, q_rope = torch.empty(0, 2, GEOMETRY.kv_lora_rank), torch.empty(0, 2, GEOMETRY.qk_rope_head_dim)
    out = batch.step().attend_absorbed(q_nope.double(), q_rope.double(), batch.cache, SCALE)
    assert out.shape == q_nope.shape


def test_layers_of_both_kinds_in_turn():
    """One kind plans a batch of some requests, the other a batch of all; a decoder holds only one plan."""
    batch = Batch(LENGTHS)
    step = batch.step()
    attention = Attention()
    layer = weights.LayerWeights(attention)
    inputs = LayerInputs(batch.q, *batch.new_keys(attention.weight), batch.cache, SCALE, layer)
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=12)
    q_nope, q_rope = batch.q.split([GEOMETRY.qk_nope_head_dim, GEOMETRY.qk_rope_head_dim], dim=-1)
    expected = batch.expected(attention.weight)
    for _ in range(2):
        torch.testing.assert_close(step.attend(inputs, chooser), expected, atol=1e-5, rtol=1e-5)
        out = step.attend_absorbed(layer.absorbed.absorb_query(q_nope), q_rope, batch.cache, SCALE)
        torch.testing.assert_close(layer.absorbed.project_output(out), expected, atol=1e-5, rtol=1e-5)
