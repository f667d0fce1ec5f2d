"""Parts of the backend on their own: the choice per request, a mixed prefill batch, weights, refusals."""

import math
import types

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
from sglang.srt.runtime_context import get_parallel

from mla_backend.batch import TableKind
from mla_backend.decode import MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, default_rates
from mla_backend.rotary import RotaryAppend
from mla_backend_sglang import NAME, backend, registration, settings, weights
from mla_backend_sglang.prefill import LayerInputs, PrefillChooser, PrefillMethod, PrefillStep
from tests.mla_oracle import cos_sin_cache, normalized, rotary_angles, rotated

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


class Attention(torch.nn.Module):
    """The attributes of SGLang's MLA layer that we touch, and its own split of kv_b_proj."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        g = GEOMETRY
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


Q_SIZE = GEOMETRY.num_heads * GEOMETRY.qk_head_dim


def projections(q_kind=ColumnParallelLinear, kv_dtype=torch.float32, bias=False):
    with get_parallel().override(tp_size=1, tp_rank=0):
        q = q_kind(GEOMETRY.hidden_size, Q_SIZE, bias=bias, params_dtype=torch.float32)
    kv = ReplicatedLinear(GEOMETRY.hidden_size, GEOMETRY.latent_dim, bias=False, params_dtype=kv_dtype)
    for layer in (q, kv):
        torch.nn.init.normal_(layer.weight)
    return dict(q_proj=q, kv_a_proj_with_mqa=kv)


def with_projections(attention, **changes):
    for name, layer in projections(**changes).items():
        setattr(attention, name, layer)
    return attention


def products(attention, x):
    """What the layers' parameters, as they are, make of x."""
    return [x @ layer.weight.T for layer in (attention.q_proj, attention.kv_a_proj_with_mqa)]


def test_the_choice_depends_on_the_request_alone():
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
        """Vanilla attention of each request, one query row at a time."""
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


# New tokens and prefix of requests that take each method, mixed up so that no method's requests lie together.
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


def test_absorbed_prefill_of_a_whole_batch():
    batch = Batch(LENGTHS)
    attention = Attention()
    absorbed = weights.LayerWeights(attention).absorbed
    q_nope, q_rope = batch.q.split([GEOMETRY.qk_nope_head_dim, GEOMETRY.qk_rope_head_dim], dim=-1)
    out = batch.step().attend_absorbed(absorbed.absorb_query(q_nope), q_rope, batch.cache, SCALE)
    expected = batch.expected(attention.weight)
    torch.testing.assert_close(absorbed.project_output(out), expected, atol=1e-5, rtol=1e-5)


def test_prefixes_of_an_unknown_layer_are_refused():
    batch = Batch([(2, 3)])
    key, value = batch.new_keys(Attention().weight)
    chooser = PrefillChooser(FakePolicy(), chunk_tokens=12)
    with pytest.raises(UnsupportedError, match="--disable-radix-cache"):
        batch.step().attend(LayerInputs(batch.q, key, value, batch.cache, SCALE, None), chooser)


def test_the_model_and_we_share_one_copy_of_absorbed_weights():
    model = Model()
    (layer,) = weights.adopt_weights(model).values()
    attention = model.attention
    assert attention.w_kc is layer.absorbed.w_uk and attention.w_vc is layer.absorbed.w_uv
    assert weights.adopt_weights(model)[0] is layer  # a second backend of the same model

    address = layer.absorbed.w_uk.data_ptr()
    new = torch.randn_like(attention.weight)
    model.load_weights(new)
    assert attention.w_kc is layer.absorbed.w_uk and layer.absorbed.w_uk.data_ptr() == address
    heads = new.view(GEOMETRY.num_heads, -1, GEOMETRY.kv_lora_rank)
    torch.testing.assert_close(layer.absorbed.w_uk, heads[:, : GEOMETRY.qk_nope_head_dim])
    torch.testing.assert_close(layer.absorbed.w_uv, heads[:, GEOMETRY.qk_nope_head_dim :].transpose(1, 2))


def test_two_projections_become_one_product_of_the_same_parameters():
    model = Model()
    attention = with_projections(model.attention)
    x = torch.randn(3, GEOMETRY.hidden_size)
    expected = products(attention, x)
    parameters = dict(model.named_parameters())
    (layer,) = weights.adopt_weights(model).values()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(list(layer.projection(x)), expected)
    torch.testing.assert_close(products(attention, x), expected)

    address = layer.projection.weight.data_ptr()
    attention.q_proj.weight.copy_(torch.randn_like(attention.q_proj.weight))  # as SGLang's loaders do
    attention.kv_a_proj_with_mqa.weight.data = torch.randn(GEOMETRY.latent_dim, GEOMETRY.hidden_size)
    expected = products(attention, x)
    model.load_weights(attention.weight.clone())
    torch.testing.assert_close(list(layer.projection(x)), expected)
    torch.testing.assert_close(products(attention, x), expected)
    attention.q_proj.weight.data = torch.randn(Q_SIZE, GEOMETRY.hidden_size)
    weights.refresh_after_direct_load(None, model)
    torch.testing.assert_close(list(layer.projection(x)), products(attention, x))
    assert layer.projection.weight.data_ptr() == address  # captured graphs know it


class AdaptedLinear(ColumnParallelLinear):
    pass


def quantized(attention):
    attention.q_proj.quant_method = object()
    del attention.q_proj.weight


def packed(attention):
    attention.q_proj.use_intel_amx_backend = True


def offloaded(attention):
    attention.kv_a_proj_with_mqa.to("meta")


@pytest.mark.parametrize(
    "changes, then",
    [
        (dict(q_kind=AdaptedLinear), None),
        (dict(bias=True), None),
        (dict(kv_dtype=torch.bfloat16), None),
        ({}, quantized),
        ({}, packed),
        ({}, offloaded),
    ],
)
def test_projections_stay_two(changes, then):
    plain, attention = Attention(torch.float32), Attention(torch.float32)
    assert not weights.JointProjection.is_possible(plain)  # as with q_lora_rank
    assert weights.JointProjection.is_possible(with_projections(plain))
    with_projections(attention, **changes)
    if then:
        then(attention)
    assert not weights.JointProjection.is_possible(attention)


@pytest.mark.parametrize(
    "changes, shared",
    [
        ({}, False),
        (dict(remote_instance_weight_loader_start_seed_via_transfer_engine=True), True),
        (dict(load_format="remote_instance"), True),
        (dict(weight_cache_mode="client"), True),
    ],
)
def test_whose_the_parameters_are(monkeypatch, changes, shared):
    model = dict(load_format="auto", remote_instance_weight_loader_start_seed_via_transfer_engine=False)
    monkeypatch.setattr(settings, "_settings", lambda group: types.SimpleNamespace(**(model | changes)))
    assert settings.are_weights_shared() is shared


def test_shared_parameters_stay_where_they_are():
    model = Model()
    attention = with_projections(model.attention)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    (layer,) = weights.adopt_weights(model, may_move=False).values()
    assert layer.projection is None
    assert [parameter.data_ptr() for parameter in attention.parameters()] == addresses


def test_fp8_splits_keep_their_scale_through_updates():
    """SGLang splits per-tensor fp8 weights into fp8 w_kc and w_vc, and copies over what it finds there."""

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
    del attention.kv_b_proj.weight  # quantized some way of its own
    (layer,) = weights.adopt_weights(model).values()
    for _ in range(2):
        w_uk = attention.dequantized[:, : GEOMETRY.qk_nope_head_dim]
        torch.testing.assert_close(layer.absorbed.w_uk.float(), w_uk, atol=0.02, rtol=0.01)
        model.load_weights(3 * torch.randn_like(attention.weight))


def runner(**changes):
    settings = dict(
        use_mla_backend=True,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        token_to_kv_pool=None,
        model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace()),
    )
    return types.SimpleNamespace(**(settings | changes))


SCALED = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(llama_4_scaling={"beta": 0.1}))
UNIFIED = types.SimpleNamespace(requires_physical_write_loc=True)


def speculation(**changes):
    settings = dict(speculative_algorithm=None, speculative_eagle_topk=None)
    return lambda: types.SimpleNamespace(**(settings | changes))


@pytest.mark.parametrize(
    "parallel, changes, spec, message",
    [
        ({}, dict(use_mla_backend=False), {}, "choose another backend"),
        ({}, dict(kv_cache_dtype=torch.float8_e4m3fn), {}, "leave --kv-cache-dtype at auto"),
        ({}, dict(model_config=SCALED), {}, "llama_4_scaling asks: choose another backend"),
        ({}, dict(token_to_kv_pool=UNIFIED), {}, "leave --enable-unified-memory off"),
        ({}, dict(token_to_kv_pool=types.SimpleNamespace(full_kv_pool=UNIFIED)), {}, "unified-memory off"),
        (dict(attn_cp_size=2), {}, {}, "leave context parallelism off"),
        (dict(attn_dcp_size=2), {}, {}, "leave context parallelism off"),
        ({}, {}, dict(speculative_algorithm="EAGLE", speculative_eagle_topk=4), "--speculative-eagle-topk 1"),
        ({}, {}, dict(speculative_algorithm="NGRAM"), "another --speculative-algorithm"),
    ],
)
def test_refusals_name_the_remedy(monkeypatch, parallel, changes, spec, message):
    sizes = dict(attn_tp_size=1, attn_cp_size=1, attn_dcp_size=1) | parallel
    monkeypatch.setattr(backend, "get_parallel", lambda: types.SimpleNamespace(**sizes))
    monkeypatch.setattr(backend.settings, "speculation", speculation(**spec))
    with pytest.raises(UnsupportedError, match=message):
        backend._check_supported(runner(**changes))


class DynamicRotaryEmbedding(RotaryEmbedding):
    """May have angles of its own."""


@pytest.mark.parametrize(
    "changes, taken",
    [
        ({}, True),
        (dict(mode=ForwardMode.IDLE), True),
        (dict(mode=ForwardMode.TARGET_VERIFY), True),
        (dict(mode=ForwardMode.DRAFT_EXTEND_V2), True),
        (dict(kind=RotaryEmbedding), True),
        (dict(mode=ForwardMode.EXTEND), False),
        (dict(kind=DynamicRotaryEmbedding), False),
        (dict(kind=None), False),
        (dict(rotary_dim=4), False),
        (dict(dtype=torch.bfloat16), False),
        (dict(use_fallback_kernel=True), False),
        (dict(norm=torch.nn.Identity()), False),
        (dict(norm=RMSNorm(GEOMETRY.kv_lora_rank, cast_x_before_out_mul=True)), False),
        (dict(norm=RMSNorm(GEOMETRY.kv_lora_rank, var_hidden_size=8)), False),
        (dict(norm=RMSNorm(GEOMETRY.kv_lora_rank, weight_dtype=torch.float64)), False),
        (dict(deterministic=True), False),
        (dict(context=types.SimpleNamespace), False),  # a draft's, on another backend
        (dict(name="triton"), False),
    ],
)
def test_what_is_taken_from_the_model(monkeypatch, changes, taken):
    case = dict(
        mode=ForwardMode.DECODE,
        kind=DeepseekScalingRotaryEmbedding,
        rotary_dim=8,
        dtype=torch.float32,
        use_fallback_kernel=False,
        norm=RMSNorm(GEOMETRY.kv_lora_rank),
        deterministic=False,
        context=backend.MLABackend,
        name=NAME,
    )
    case |= changes
    registration.register_model_side(NAME)
    monkeypatch.setattr(backend.settings, "is_deterministic", lambda: case["deterministic"])
    attention = with_projections(Attention(torch.float32))
    attention.layer_id, attention.q_lora_rank, attention.use_dsa = 3, None, False
    attention.num_local_heads, attention.qk_head_dim = GEOMETRY.num_heads, GEOMETRY.qk_head_dim
    attention.current_attention_backend, attention.kv_a_layernorm = case["name"], case["norm"]
    attention.is_dcp_q_replicate_phase = lambda batch: False  # asked from 0.5.22 on; from 0.5.17 to 0.5.21:
    no_dcp = types.SimpleNamespace(dcp_replicate_q_proj=False)
    monkeypatch.setattr(forward_mla, "get_parallel", lambda: no_dcp)
    x = torch.randn(3, GEOMETRY.hidden_size)
    expected = products(attention, x)
    ours = case["context"].__new__(case["context"])
    ours.data_type, ours._norms = torch.float32, {3: RMSNorm(GEOMETRY.kv_lora_rank)}  # from the step before
    ours._layers = {3: weights.LayerWeights(attention)}
    context = types.SimpleNamespace(attn_backend=ours)
    monkeypatch.setattr("sglang.srt.model_executor.forward_context.get_forward_context", lambda: context)
    rotary = case["kind"] and object.__new__(case["kind"])
    if rotary is not None:
        rotary.rotary_dim, rotary.cos_sin_cache = case["rotary_dim"], torch.zeros(9, 8, dtype=case["dtype"])
        rotary.use_fallback_kernel = case["use_fallback_kernel"]
    attention.rotary_emb = rotary
    seen = []

    class Enough(Exception):
        pass

    def stop(q, latent):
        is_taken = forward_mla.DeepseekMLAForwardMixin._fuse_rope_for_trtllm_mla(attention, batch)
        seen.append((is_taken, q, latent))
        raise Enough

    attention._split_q_nope_pe = stop
    normalized_by_model = []
    case["norm"].register_forward_hook(lambda norm, *_: normalized_by_model.append(norm))
    batch = types.SimpleNamespace(forward_mode=case["mode"])
    with pytest.raises(Enough):
        forward_mla.DeepseekMLAForwardMixin.forward_absorb_prepare(attention, x, x, batch, None)
    ((is_taken, q, latent),) = seen
    assert is_taken is taken
    torch.testing.assert_close(q.flatten(1), expected[0])
    torch.testing.assert_close(latent, expected[1])
    assert (q.untyped_storage().data_ptr() == latent.untyped_storage().data_ptr()) is taken  # of one product
    assert normalized_by_model == ([] if taken else [attention.kv_a_layernorm])
    assert not {"kv_a_layernorm", "q_proj", "kv_a_proj_with_mqa"} & vars(attention).keys()
    assert forward_mla.DeepseekMLAForwardMixin._fuse_rope_for_trtllm_mla(attention, batch) is taken


def storing_backend():
    ours = object.__new__(backend.MLABackend)
    rows = torch.full((5 * PAGE_SIZE, GEOMETRY.latent_dim), math.nan)
    ours._append, ours._table = RotaryAppend(torch.float32, "cpu"), rows
    norm = RMSNorm(GEOMETRY.kv_lora_rank, eps=0.1)
    torch.nn.init.normal_(norm.weight)
    ours._norms = {0: norm}
    layer = types.SimpleNamespace(
        layer_id=0,
        tp_q_head_num=GEOMETRY.num_heads,
        head_dim=GEOMETRY.latent_dim,
        v_head_dim=GEOMETRY.kv_lora_rank,
    )
    return ours, layer, rows


@pytest.mark.parametrize("is_neox", [False, True])
def test_new_tokens_are_normalized_rotated_and_stored(is_neox):
    ours, layer, rows = storing_backend()
    d_c, d_rope = GEOMETRY.kv_lora_rank, GEOMETRY.qk_rope_head_dim
    q, q_rope = torch.randn(2, GEOMETRY.num_heads, d_c), torch.randn(2, GEOMETRY.num_heads, d_rope)
    k, k_rope = torch.randn(2, 1, d_c), torch.randn(2, 1, d_rope)
    angles = rotary_angles(30, d_rope)
    slots = torch.tensor([[9, 10], [4, 5]])[:, 0]  # the first of two draft steps
    batch = types.SimpleNamespace(out_cache_loc=slots, positions=torch.tensor([17, 3]))
    turned = rotated(q_rope, angles[batch.positions], interleaved=not is_neox)
    q_nope, q_rotated = ours._store(
        rows.unflatten(0, (-1, PAGE_SIZE)), q, k, k, layer, batch, q_rope=q_rope, k_rope=k_rope,
        cos_sin_cache=cos_sin_cache(angles).float(), is_neox=is_neox,
    )  # fmt: skip
    near = {"rtol": 1e-5, "atol": 1e-6}
    assert torch.equal(q_nope, q)
    torch.testing.assert_close(q_rotated.double(), turned, **near)
    norm = ours._norms[0]
    latents = normalized(k[:, 0], norm.weight.detach(), norm.variance_epsilon)
    keys = rotated(k_rope[:, 0], angles[batch.positions], not is_neox)
    torch.testing.assert_close(rows[[9, 4]].double(), torch.cat([latents, keys], -1), **near)
    assert rows.isnan().all(-1).sum() == len(rows) - 2


def test_arguments_that_would_change_the_result_are_refused():
    ours, layer, rows = storing_backend()
    q, k = torch.zeros(1, GEOMETRY.num_heads, GEOMETRY.latent_dim), None
    ours._store(rows, q, k, k, layer, None, topk_indices=None)
    with pytest.raises(UnsupportedError, match="layer 0 asks for attention with attn_sink"):
        ours._store(rows, q, k, k, layer, None, attn_sink=torch.zeros(2))
    with pytest.raises(UnsupportedError, match="no keys to store"):
        ours._store(rows, q, k, k, layer, None, cos_sin_cache=torch.zeros(3, 8))
