"""The metadata builder on vLLM's batches, also those that are padded for CUDA graphs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.utils import extend_all_queries_by_N

from mla_backend import MLADecoder, MLAGeometry, RotaryAppend, Shard
from mla_backend.batch import WHOLE
from mla_backend.cache_format import E4M3, cache_format
from mla_backend_vllm import impl as impl_module
from mla_backend_vllm import metadata as metadata_module
from mla_backend_vllm import prefill_backend
from mla_backend_vllm.draft_lengths import with_added_tokens, with_sampled_tokens
from mla_backend_vllm.fused_append import FusedAppend
from mla_backend_vllm.impl import MLAImpl
from mla_backend_vllm.metadata import MetadataBuilder, MLACommonMetadataBuilder
from mla_backend_vllm.prefill_backend import MLAPrefill
from mla_backend_vllm.sharding import with_lengths_of
from mla_backend_vllm.sparse import SparseMetadataBuilder
from tests.support.mla_oracle import assert_attention_close, dense_attention

PAGE_SIZE = 32


# A decoder whose plan is the batch itself.
RECORDER = SimpleNamespace(spec=SimpleNamespace(page_size=PAGE_SIZE), plan=lambda batch: batch)
LAYER = SimpleNamespace(_k_scale=None)  # of a cache that needs no scale


def builder_of(shard):
    builder = MetadataBuilder.__new__(MetadataBuilder)
    builder._shard, builder.layer_names = shard, ["model.layers.0"]
    return builder


def build(query_lens, seq_lens, num_tokens=None, decoder=RECORDER, shard=WHOLE):
    """The metadata for requests with these lengths; `num_tokens` counts rows of padding too."""
    builder = builder_of(shard)
    builder.decoder = decoder
    whole = torch.tensor(seq_lens, dtype=torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    metadata = builder._build_decode(
        block_table_tensor=torch.zeros(len(query_lens), 4, dtype=torch.int32),
        seq_lens_device=shard.keys_of(whole),
        max_seq_len=max(seq_lens),
        query_start_loc_cpu=starts,
        query_start_loc_device=starts.clone(),
        num_decode_tokens=sum(query_lens) if num_tokens is None else num_tokens,
        dcp_tot_seq_lens_device=None if shard is WHOLE else whole,
    )
    (metadata.plan if decoder is RECORDER else metadata.plan.batch).check()
    return metadata


@pytest.mark.parametrize(
    "query_lens, seq_lens, num_tokens",
    [
        ([1, 1, 1], [5, 9, 64], None),
        ([4, 4], [8, 40], None),
        # Graph batches: padding requests have no query tokens, but their rows exist.
        ([1, 1, 0, 0], [5, 9, 0, 0], 4),
        ([4, 4, 0], [8, 40, 0], 12),
    ],
)
def test_uniform_batches_need_no_query_offsets(query_lens, seq_lens, num_tokens):
    metadata = build(query_lens, seq_lens, num_tokens)
    assert metadata.plan.query_start_loc is None
    assert metadata.plan.max_query_len == max(query_lens)
    assert metadata.plan.page_size == PAGE_SIZE
    assert metadata.path == ("absorbed_decode" if max(query_lens) == 1 else "absorbed_extend")


def test_a_batch_of_padding_alone_is_planned():
    """In a graph, on a rank whose requests have ended."""
    plan = build([0, 0], [0, 0], num_tokens=2).plan
    assert plan.max_query_len == 1 and plan.query_start_loc is None


def test_a_shard_is_planned_by_the_lengths_of_the_whole():
    shard = Shard(1, 2, 16)
    metadata = build([1, 1], [40, 15], shard=shard)
    assert metadata.plan.shard is shard and metadata.plan.seq_lens.tolist() == [40, 15]
    assert metadata.seq_lens.tolist() == [16, 0]  # vLLM reads these: whose rank has no key


def vllm_batch(query_lens, seq_lens):
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.zeros(len(query_lens), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
    )


def test_a_dummy_run_of_a_shard_gets_the_lengths_that_vllm_leaves_out(monkeypatch):
    batch = vllm_batch([1, 1], [40, 15])
    built = []
    monkeypatch.setattr(
        MLACommonMetadataBuilder,
        "build",
        lambda self, prefix, batch, fast: built.append(batch) or SimpleNamespace(prefill=None),
    )
    for shard in (Shard(1, 2, 16), WHOLE):
        builder_of(shard).build(common_prefix_len=0, common_attn_metadata=batch)
    sharded, whole = built
    assert sharded.dcp_local_seq_lens.tolist() == [16, 0] and sharded.seq_lens is batch.seq_lens
    assert whole is batch
    assert with_lengths_of(Shard(1, 2, 16), sharded) is sharded, "vLLM's own are kept"


@pytest.mark.parametrize("builder", [MetadataBuilder, SparseMetadataBuilder])
def test_lengths_on_the_host_count_the_tokens_added_for_a_draft_model(monkeypatch, builder):
    batch = vllm_batch([20, 7], [64 + 20, 7])
    longer = extend_all_queries_by_N(batch, 1, torch.arange(3), torch.zeros(29, dtype=torch.int64))
    built = []
    monkeypatch.setattr(
        builder, "build", lambda self, common_attn_metadata, **_: built.append(common_attn_metadata)
    )
    for metadata in (batch, longer):
        builder.__new__(builder).build_for_drafting(metadata, draft_index=0)
    unchanged, corrected = built
    assert unchanged is batch
    context = corrected.seq_lens_cpu_upper_bound - corrected.query_start_loc_cpu.diff()
    assert context.tolist() == [64, 0]


class Built(Exception):
    """Carries what vLLM's own builder gets."""


@pytest.mark.parametrize("builder", [MetadataBuilder, SparseMetadataBuilder])
@pytest.mark.parametrize(
    "layer, query_lens, bounds, expected",
    [
        ("draft_model.layers.0", [21, 8], [84, 7], [85, 8]),
        ("draft_model.layers.0", [21, 8], [84, 9], [85, 10]),  # on context
        ("draft_model.layers.0", [21, 8], [1024, 84], [1024, 85]),  # the runner cuts off the longest
        ("draft_model.layers.0", [1, 1], [85, 8], [85, 8]),  # later steps
        ("model.layers.0", [21, 8], [85, 8], [85, 8]),
    ],
    ids=["first step", "context", "full", "later step", "no draft model"],
)
def test_lengths_of_a_draft_model_in_model_runner_v2(
    monkeypatch, builder, layer, query_lens, bounds, expected
):
    """It only calls `build`, with the length of the model as that of the longest request."""

    def build(self, common_prefix_len, common_attn_metadata, *_, **__):
        raise Built(common_attn_metadata)

    batch = replace(vllm_batch(query_lens, bounds), max_seq_len=1024)
    batch.seq_lens_cpu_upper_bound = torch.tensor(bounds, dtype=torch.int32)
    monkeypatch.setattr(builder.__mro__[1], "build", build)
    made = builder.__new__(builder)
    made._shard, made.layer_names = WHOLE, [layer]
    with pytest.raises(Built) as built:
        made.build(0, batch)
    assert built.value.args[0].seq_lens_cpu_upper_bound.tolist() == expected


def test_tokens_are_counted_once_for_a_draft_model():
    """In Model Runner V1, `build_for_drafting` has counted them when it calls `build` with ``fast_build``."""
    batch = vllm_batch([21, 8], [85, 10])
    assert with_sampled_tokens(["draft_model.layers.0"], batch, fast_build=True) is batch


def test_lengths_that_are_not_on_the_host_are_not_counted():
    batch = replace(vllm_batch([21, 8], [84, 7]), seq_lens_cpu_upper_bound=None)
    assert with_added_tokens(batch) is with_sampled_tokens(["draft_model.layers.0"], batch, False) is batch


@pytest.mark.parametrize("query_lens", [[1, 3, 2], [2, 2, 0, 0], [1, 17]])
def test_ragged_batches_carry_their_offsets(query_lens):
    metadata = build(query_lens, [n + 20 for n in query_lens])
    assert metadata.plan.query_start_loc.tolist() == [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    assert metadata.plan.max_query_len == max(query_lens)
    assert metadata.path == "absorbed_extend"


def test_a_ragged_batch_padded_to_a_uniform_size_stays_ragged():
    metadata = build([1, 3], [21, 23], num_tokens=6)
    assert metadata.plan.query_start_loc.tolist() == [0, 1, 4]


@pytest.fixture
def decoder():
    sizes = {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "page_size": PAGE_SIZE}
    return MLADecoder(**sizes, dtype=torch.float32, device="cpu", max_batch=4, max_query_len=4)


@pytest.fixture
def impl():
    made = MLAImpl.__new__(MLAImpl)
    made.kv_format = cache_format(torch.float32)
    made.scale, made.kv_lora_rank, made.qk_rope_head_dim = 0.1, 32, 16
    return made


def test_a_draft_models_next_step_reads_its_new_lengths(decoder, impl):
    """vLLM advances them on the device, and captures the call that plans anew."""
    cache, q = torch.randn(4, PAGE_SIZE, 48), torch.randn(2, 4, 48)
    decode = build([1, 1], [20, 7], decoder=decoder)
    metadata, builder = SimpleNamespace(decode=decode), builder_of(WHOLE)
    builder.decoder = decoder
    for _ in range(2):
        decode.seq_lens += 1
        builder.update_draft_decode_metadata(metadata)
        actual = impl.forward_mqa(q, cache, metadata, LAYER)
        keys = [cache[0, :length, None] for length in decode.seq_lens]  # the table has page 0 alone
        rows = zip(q.split(1), keys, strict=True)
        each = [dense_attention(row, k, k[..., :32], 0.1, causal=True) for row, k in rows]
        expected = [torch.cat(parts) for parts in zip(*each, strict=True)]
        assert_attention_close(actual, expected, torch.float32)
    builder.update_draft_decode_metadata(SimpleNamespace(decode=None))  # a rank without requests


@pytest.mark.newest
@pytest.mark.parametrize("is_causal", [True, False])
def test_tokens_of_a_block_draft_see_the_whole_block(decoder, impl, is_causal):
    """DSpark's and DFlash's batches, through vLLM's own builder; the last request is padding of a graph."""
    cache, q = torch.randn(5, PAGE_SIZE, 48), torch.randn(9, 4, 48)
    builder = builder_of(WHOLE)
    builder.decoder, builder.reorder_batch_threshold = decoder, 4
    vars(builder).update(device=torch.device("cpu"), non_causal_multi_token_decode=True, dcp_world_size=1)
    builder.use_pcp, builder.metadata_cls = False, metadata_module.Metadata
    builder.model_config = SimpleNamespace(get_head_size=lambda: 48)
    batch = replace(vllm_batch([3, 3, 0], [40, 3, 0]), num_actual_tokens=9, causal=is_causal)
    batch.block_table_tensor = torch.tensor([[3, 1, 0, 0], [4, 0, 0, 0], [0] * 4], dtype=torch.int32)
    metadata = builder.build(0, batch)
    assert (metadata.num_decodes, metadata.causal) == (3, is_causal)
    actual = impl.forward_mqa(q, cache, metadata, LAYER)
    keys = cache[[3, 1]].flatten(0, 1)[:40, None], cache[4, :3, None]
    each = [
        dense_attention(rows, k, k[..., :32], 0.1, causal=is_causal)
        for rows, k in zip(q[:6].split(3), keys, strict=True)
    ]
    expected = [torch.cat(parts) for parts in zip(*each, strict=True)]
    assert_attention_close(tuple(values[:6] for values in actual), expected, torch.float32)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 3, 2]], ids=str)
def test_queries_may_come_in_one_tensor(decoder, impl, query_lens):
    """Kimi-K3 passes q_nope and q_rope in one tensor, other models as a pair; the result is the same."""
    cache = torch.randn(4, PAGE_SIZE, 48)
    decode = build(query_lens, [n + 20 for n in query_lens], decoder=decoder)
    q = torch.randn(sum(query_lens), 4, 48)
    of_pair = impl.forward_mqa((q[..., :32], q[..., 32:]), cache, SimpleNamespace(decode=decode), LAYER)
    of_one = impl.forward_mqa(q, cache, SimpleNamespace(decode=decode), LAYER)
    for pair, one in zip(of_pair, of_one, strict=True):
        torch.testing.assert_close(one, pair, rtol=0, atol=0)


HEADS_OF_CONTEXT = {
    "num_heads": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 8,
}


def impl_for_context(weight, kv_dtype):
    """A layer's attention with `HEADS_OF_CONTEXT`; ``weight`` is that of its kv_b_proj."""
    impl = MLAImpl.__new__(MLAImpl)
    vars(impl).update(HEADS_OF_CONTEXT, kv_b_proj=lambda kv_c: (kv_c @ weight.T, None))
    vars(impl).update(kv_format=cache_format(kv_dtype), _use_flashinfer_concat_mla_k=False)
    impl.geometry = SimpleNamespace(latent_dim=32 + 16)
    return impl


def chunk_of_context(request_slice, token_slice, starts, lengths, query_lens):
    """As vLLM plans it; ``starts`` and ``lengths`` are those of the requests' parts of the chunk."""

    def offsets(sizes):
        return torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)

    request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return SimpleNamespace(
        request_slice=request_slice,
        token_slice=token_slice,
        num_context_tokens=sum(lengths),
        query_start_loc=offsets(query_lens),
        max_query_len=max(query_lens),
        cu_seq_lens=offsets(lengths),
        max_seq_len=max(lengths),
        starts=torch.tensor(starts, dtype=torch.int32),
        token_to_seq=torch.cat([request.int(), torch.tensor([99], dtype=torch.int32)]),  # may be padded
    )


@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3.storage], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("pages_are_apart", [False, True], ids=["unknown width", "pages apart"])
def test_context_of_rows_that_vllm_does_not_gather(monkeypatch, kv_dtype, pages_are_apart):
    """Three prompts with contexts of 40, 0 and 20 tokens, in chunks as vLLM plans them."""
    monkeypatch.setattr(impl_module, "is_gathered_by_vllm", lambda width, device: pages_are_apart)
    heads, kv_lora_rank, d_rope, d_nope, d_v = HEADS_OF_CONTEXT.values()
    scale, page_size = torch.tensor(0.25), 16
    weight = torch.randn(heads * (d_nope + d_v), kv_lora_rank) / 8

    latents = torch.randn(60, kv_lora_rank + d_rope)
    cache = torch.full((8, page_size, kv_lora_rank + d_rope), float("nan"))
    table = torch.tensor([[6, 1, 4], [0, 0, 0], [3, 7, 0]], dtype=torch.int32)
    requests = torch.tensor([0] * 40 + [2] * 20)
    positions = torch.cat([torch.arange(40), torch.arange(20)])
    cache[table[requests, positions // page_size], positions % page_size] = latents
    if kv_dtype is not torch.float32:
        cache = (cache / scale).to(kv_dtype)
        latents = (latents / scale).to(kv_dtype).float() * scale
    if pages_are_apart:  # as with VLLM_KV_CACHE_LAYOUT=BLHNC
        cache = torch.stack([cache.view(torch.uint8)] * 2, dim=1).view(kv_dtype)[:, 0]

    query_lens = [3, 2, 4]
    backend = MLAPrefill.__new__(MLAPrefill)
    backend.scale = 0.2
    chunks = [
        chunk_of_context(slice(0, 1), slice(0, 3), [0], [32], query_lens[:1]),
        chunk_of_context(slice(0, 3), slice(0, 9), [32, 0, 0], [8, 0, 20], query_lens),
    ]
    prefill = SimpleNamespace(
        block_table=table, prefill_backend=backend, chunked_context=SimpleNamespace(chunks=chunks)
    )
    q, step = torch.randn(9, heads, d_nope + d_rope), SimpleNamespace(prefill=prefill)
    out, lse = impl_for_context(weight, kv_dtype)._compute_prefill_context(q, cache, step, scale)

    kv = (latents[:, :kv_lora_rank] @ weight.T).view(60, heads, -1)
    rope = latents[:, None, kv_lora_rank:].expand(-1, heads, -1)
    keys, values = torch.cat([kv[..., :d_nope], rope], dim=-1), kv[..., d_nope:]
    contexts = (keys[:40], values[:40]), (keys[:0], values[:0]), (keys[40:], values[40:])
    each = [
        dense_attention(part, *context, backend.scale, causal=False)
        for part, context in zip(q.split(query_lens), contexts, strict=True)
    ]
    expected = [torch.cat(parts) for parts in zip(*each, strict=True)]
    assert_attention_close((out, lse.T), expected, torch.float32)


def test_chunks_of_context_as_vllm_before_0_28_gives_them():
    """It gives the number of a chunk; a chunk's offsets and lengths are in the metadata."""
    backend = MLAPrefill.__new__(MLAPrefill)
    backend.scale = 0.2
    query_lens, contexts = [3, 2], ([32, 32], [8, 20])
    offsets = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, *contexts)]
    context = SimpleNamespace(cu_seq_lens=offsets[1:], max_seq_lens=[32, 20])
    backend._prefill_metadata = SimpleNamespace(
        query_start_loc=offsets[0], max_query_len=3, chunked_context=context
    )
    q = torch.randn(5, 2, 24)
    for index, lens in enumerate(contexts):
        k, v = torch.randn(sum(lens), 2, 24), torch.randn(sum(lens), 2, 16)
        out, lse = backend.run_prefill_context_chunk(q=q, k=k, v=v, chunk_idx=index)
        parts = zip(q.split(query_lens), k.split(lens), v.split(lens), strict=True)
        each = [dense_attention(*part, backend.scale, causal=False) for part in parts]
        expected = [torch.cat(results) for results in zip(*each, strict=True)]
        assert_attention_close((out, lse.T), expected, torch.float32)


@pytest.mark.parametrize("mode", [False, True])
def test_prefill_is_batch_invariant_where_vllm_is(monkeypatch, mode):
    seen = []

    def attend(*arguments, batch_invariant):
        seen.append(batch_invariant)

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(mode)))
    monkeypatch.setattr(prefill_backend, "prefill", attend)
    backend = MLAPrefill.__new__(MLAPrefill)
    backend.scale = 0.2
    starts = torch.tensor([0, 3], dtype=torch.int32)
    backend._prefill_metadata = SimpleNamespace(query_start_loc=starts, max_query_len=3)
    backend.run_prefill_new_tokens(*[torch.randn(3, 2, 8)] * 3, return_softmax_lse=False)
    assert seen == [mode]


def merged_by_vllm_026(with_context, without, bound):
    """Merge attention with and without context, as vLLM 0.26 does (its merge_attn_states)."""
    bound = len(without) if bound is None else bound
    return torch.cat([with_context[:bound], without[bound:]])


def test_no_prompt_loses_its_context(monkeypatch):
    """In vLLM 0.26, if a prompt without context precedes one with context; test_gpu.py runs the engine."""
    with_context, without = torch.randn(2, 7, 4)
    with_context[:3] = without[:3]  # the first prompt has none: its context's weight is 0
    context = SimpleNamespace(prefill_tokens_with_context=4)  # vLLM counts only the second prompt's rows
    metadata = SimpleNamespace(prefill=SimpleNamespace(chunked_context=context))
    monkeypatch.setattr(MLACommonMetadataBuilder, "build", lambda *_: metadata)
    builder_of(WHOLE).build(0, None)
    merged = merged_by_vllm_026(with_context, without, context.prefill_tokens_with_context)
    torch.testing.assert_close(merged, with_context, rtol=0, atol=0)


@pytest.mark.parametrize(
    "prefill", [None, SimpleNamespace(chunked_context=None)], ids=["decode", "no context"]
)
def test_other_batches_stay_unchanged(monkeypatch, prefill):
    metadata = SimpleNamespace(prefill=prefill)
    monkeypatch.setattr(MLACommonMetadataBuilder, "build", lambda *_: metadata)
    assert builder_of(WHOLE).build(0, None) is metadata
    assert metadata.prefill is prefill


def test_absorbed_weights_are_left_out_of_what_is_saved():
    names = ("kv_b_proj.weight", "W_UK_T", "W_UV", "W_UK_T_dcp_qrep")
    saved = {f"layer.{name}": None for name in names}
    metadata_module.leave_out_absorbed_weights(None, saved, "layer.", None)
    assert list(saved) == ["layer.kv_b_proj.weight"]


@pytest.fixture
def made(monkeypatch):
    """A function that makes a builder of a layer, and the hooks of the layer. vLLM's part is left out."""
    geometry = MLAGeometry(16, 512, 128, 64, 128, 0.1, 2048)
    impl, hooks = SimpleNamespace(geometry=geometry, kv_format=cache_format(torch.float32)), []
    vars(impl).update(fused_append=None, why_not_fused="a reason")
    layers = {"layer": SimpleNamespace(impl=impl, register_state_dict_post_hook=hooks.append)}
    prefill = SimpleNamespace(get_name=lambda: "another")

    def init(builder, *_, **__):
        builder._prefill_backend = prefill
        builder.chunked_prefill_workspace = torch.zeros(2, 576, dtype=torch.bfloat16)

    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", init)
    monkeypatch.setattr(metadata_module, "_with_our_prefill", lambda *_: prefill)

    def make(shard=WHOLE, graph_batch=3, batch_invariant=False, use_ubatching=False, append=None):
        if append is not None:
            vars(impl).update(fused_append=append, why_not_fused=None)
        monkeypatch.setattr(metadata_module, "shard_of", lambda *_: shard)
        envs = SimpleNamespace(VLLM_BATCH_INVARIANT=batch_invariant)
        monkeypatch.setattr(metadata_module, "envs", envs)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                static_forward_context=layers, max_cudagraph_capture_size=graph_batch
            ),
            model_config=SimpleNamespace(dtype=torch.float32),
            parallel_config=SimpleNamespace(use_ubatching=use_ubatching),
            scheduler_config=SimpleNamespace(max_num_seqs=5),
        )
        return MetadataBuilder(SimpleNamespace(block_size=64), ["layer"], config, torch.device("cpu"))

    return make, hooks


def test_what_a_builder_makes_its_decoder_for(made):
    make, hooks = made
    builder = make()
    spec = builder.decoder.spec
    assert (spec.num_heads, spec.max_batch, spec.batch_invariant) == (16, 5, False)
    assert spec.max_query_len == builder.reorder_batch_threshold > 1
    assert builder.supports_draft_decode_metadata_update
    assert hooks == [metadata_module.leave_out_absorbed_weights]
    assert builder.chunked_prefill_workspace.dtype is torch.float32
    assert make(graph_batch=8).decoder.spec.max_batch == 8, "graphs pad batches"


def test_a_builder_gives_fused_layers_their_launch(made, monkeypatch):
    lines = []
    monkeypatch.setattr(
        metadata_module.logger, "info_once", lambda text, *values: lines.append(text % values)
    )
    made[0]()
    append = FusedAppend()
    made[0](append=append)
    assert isinstance(append.launch, RotaryAppend) and not append.launch.has_kernel
    assert "vLLM's kernels append new tokens (a reason)" in lines[0]
    assert "one launch normalizes, rotates and appends new tokens" in lines[1]


def test_a_builder_of_a_shard_has_the_queries_of_all_ranks(made):
    builder = made[0](Shard(1, 4, 16))
    assert builder.decoder.spec.num_heads == 4 * 16
    assert not builder.supports_draft_decode_metadata_update


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_our_prefill_is_prepared_as_it_will_be_called(made, monkeypatch, batch_invariant):
    prepared = []
    ours = MLAPrefill.__new__(MLAPrefill)
    monkeypatch.setattr(metadata_module, "_with_our_prefill", lambda *_: ours)
    prepare = lambda *what, **how: prepared.append((what, how)) or "a library"  # noqa: E731
    monkeypatch.setattr(metadata_module.prefill, "prepare", prepare)
    made[0](batch_invariant=batch_invariant)
    what = (torch.device("cpu"), torch.float32, 128 + 64, 128)
    assert prepared == [(what, {"batch_invariant": batch_invariant})]


def test_a_batch_invariant_builder_absorbs_decode_alone(made):
    builder = made[0](batch_invariant=True)
    assert builder.reorder_batch_threshold == builder.decoder.spec.max_query_len == 1
    assert builder.decoder.spec.batch_invariant


def test_prefix_hits_are_prompts_where_steps_are_split(made):
    """vLLM looks for hits on pages of the step's other half only above the threshold."""
    builder = made[0](use_ubatching=True)
    assert builder.reorder_batch_threshold == builder.decoder.spec.max_query_len == 1
    assert not builder.decoder.spec.batch_invariant
