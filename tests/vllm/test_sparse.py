"""Sparse attention: from vLLM's batches and its indexer's positions to the decoder's lists, against fp64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from mla_backend import MLADecoder, TableKind, UnsupportedError, jit
from mla_backend.cache_format import E4M3, RECORD_656, cache_format, dequantize, quantize
from mla_backend_vllm import refusals, sparse, sparse_step
from mla_backend_vllm.sparse import SparseImpl, SparseMetadataBuilder, leave_out_absorbed_weights
from mla_backend_vllm.sparse import sparse_mla_attention as vllm_sparse
from mla_backend_vllm.sparse_step import MOST_HEADS_ON_RECORDS, CopiedPrompts, SparseStep, specs_of
from tests.support.mla_oracle import assert_attention_close, dense_attention

VllmBuilder = vllm_sparse.SparseMLACommonMetadataBuilder

PAGE_SIZE, TOPK, HEADS, D_C, D_ROPE = 64, 128, 2, 16, 8
DECODE_TOKENS = 3  # requests with more are prompts to vLLM


def decoder(rows, dims=(D_C, D_ROPE), kv_dtype=None, page_size=PAGE_SIZE):
    sizes = {"num_heads": HEADS, "kv_lora_rank": dims[0], "qk_rope_head_dim": dims[1]}
    sizes |= {"page_size": page_size, "dtype": torch.float32, "kv_dtype": kv_dtype}
    return MLADecoder(**sizes, table_kind=TableKind.LIST, device="cpu", max_batch=rows)


class Step:
    """A batch of vLLM's, the keys of its requests, and what the indexer wrote for each of its tokens."""

    def __init__(
        self, query_lens, seq_lens, padding=0, seed=0, dims=(D_C, D_ROPE), page_size=PAGE_SIZE, pool=1
    ):
        generator = torch.Generator().manual_seed(seed)
        self.dims, width = dims, sum(dims)
        self.tokens = sum(query_lens)
        pages = [-(-n // page_size) for n in seq_lens]
        order = torch.randperm(sum(pages) + 1, generator=generator).int()
        self.cache = torch.full((sum(pages) + 1, page_size, width), float("nan"))
        table = torch.zeros(len(seq_lens), max([1, *pages]) + 1, dtype=torch.int32)
        self.keys = [torch.randn(n, width, generator=generator) for n in seq_lens]
        for request, keys in enumerate(self.keys):
            first = sum(pages[:request])
            table[request, : pages[request]] = order[first : first + pages[request]]
            for position, key in enumerate(keys):
                self.cache[table[request, position // page_size], position % page_size] = key
        self.requests = [i for i, n in enumerate(query_lens) for _ in range(n)]
        self.num_keys = [
            seq - n + i + 1 for n, seq in zip(query_lens, seq_lens, strict=True) for i in range(n)
        ]
        # Stale positions lie behind the tokens of the batch.
        self.pool, columns = pool, TOPK if pool == 1 else 2 * TOPK
        self.topk = torch.randint(0, 1 << 20, (self.tokens + padding + 3, columns), generator=generator).int()
        self.topk[:, ::2] %= 4  # of which some exist
        for row, count in zip(self.topk, self.num_keys, strict=False):
            row.fill_(-1)
            pools = torch.randperm(count // pool, generator=generator)[: TOPK // pool]
            chosen = (pools[:, None] * pool + torch.arange(pool)).flatten()
            row[: len(chosen)] = chosen
            row[TOPK : TOPK + count % pool] = torch.arange(count - count % pool, count)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        decodes = sum(n <= DECODE_TOKENS for n in query_lens)
        self.metadata = {
            "num_decodes": decodes,
            "num_decode_tokens": sum(query_lens[:decodes]),
            "num_prefills": len(seq_lens) - decodes,
            "num_actual_tokens": self.tokens + padding,
            "max_query_len": max(query_lens),
            "query_start_loc": starts,
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "block_table": table,
            "req_id_per_token": torch.tensor(self.requests + [0] * padding, dtype=torch.int32),
            "block_size": PAGE_SIZE,
            "prefill": None,
        }
        self.q = torch.randn(self.tokens + padding, HEADS, width, generator=generator)

    def built(self, monkeypatch, decoder, *copy_decoders, buffer_pages=0):
        builder = self.builder = SparseMetadataBuilder.__new__(SparseMetadataBuilder)
        builder.decoder, builder.topk_tokens, builder.layer_names = decoder, TOPK, ["model.layer"]
        builder._buffer_pages, builder._copy_decoders = buffer_pages, copy_decoders
        builder._pool = self.pool
        builder._lengths = torch.full((decoder.spec.max_batch,), 7, dtype=torch.int32)
        monkeypatch.setattr(VllmBuilder, "build", lambda *_: SimpleNamespace(parts=[], **self.metadata))
        made = self.metadata
        batch = SimpleNamespace(
            seq_lens_cpu_upper_bound=made["seq_lens"],
            query_start_loc_cpu=made["query_start_loc"],
            max_query_len=made["max_query_len"],
            seq_lens=made["seq_lens"],
            num_actual_tokens=made["num_actual_tokens"],
        )
        return builder.build(0, batch)

    def quantize(self, kv_format, scale):
        """Store the cache in a format; the keys are then what it holds."""
        d_c = self.dims[0]
        rows = self.cache.flatten(0, 1)
        stored = quantize(kv_format, rows[:, :d_c], rows[:, d_c:], scale)
        self.cache = stored.view(*self.cache.shape[:2], -1)
        for request, keys in enumerate(self.keys):
            stored = quantize(kv_format, keys[:, :d_c], keys[:, d_c:], scale)
            self.keys[request] = dequantize(stored, scale, dtype=torch.float64).float()

    def expected(self):
        parts = []
        for token in range(self.tokens):
            positions = self.topk[token]
            keys = self.keys[self.requests[token]][positions[positions >= 0].long()]
            q = self.q[token : token + 1]
            parts.append(dense_attention(q, keys[:, None], keys[:, None, : self.dims[0]], 0.2, causal=False))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def batch_of(step, **changes):
    """The batch as vLLM describes it to its builders."""
    made = step.metadata
    fields = {
        "query_start_loc": made["query_start_loc"],
        "query_start_loc_cpu": made["query_start_loc"],
        "seq_lens": made["seq_lens"],
        "num_reqs": len(made["seq_lens"]),
        "num_actual_tokens": step.tokens,
        "max_query_len": made["max_query_len"],
        "max_seq_len": int(made["seq_lens"].max()),
        "block_table_tensor": made["block_table"],
        "slot_mapping": torch.zeros(step.tokens, dtype=torch.int64),
        "seq_lens_cpu_upper_bound": made["seq_lens"],
    }
    return CommonAttentionMetadata(**fields | changes)


LAYER = SimpleNamespace(_k_scale=torch.tensor(0.05))
LAYERS = ["layer 0", "layer 1"]  # vLLM's names


def forward_pass():
    """vLLM's context of a forward pass, in which layers run."""
    return override_forward_context(ForwardContext({}, {}, {}))


@pytest.fixture(autouse=True)
def one_forward_pass():
    with forward_pass():
        yield


def impl(topk, dims=(D_C, D_ROPE), kv_dtype=torch.float32):
    made = SparseImpl.__new__(SparseImpl)
    made.scale, made.topk_indices_buffer, made.kv_format = 0.2, topk, cache_format(kv_dtype)
    made.kv_lora_rank, made.qk_rope_head_dim = dims
    return made


@pytest.mark.parametrize(
    "query_lens, seq_lens, padding",
    [
        ([1, 1, 1], [5, 300, 128], 0),
        ([1, 1, 0], [5, 300, 0], 1),  # padded for a graph
        ([1, 1, 0], [5, 300, 0], 2),
        ([2, 1, 0], [5, 300, 0], 0),  # as many tokens as requests, but not one each
        ([3, 3], [300, 130], 0),  # drafts to verify
        ([1, 40, 150], [500, 240, 150], 0),  # with the last chunk of a prompt, and a whole one
    ],
    ids=["decode", "padded", "padded more", "not one each", "drafts", "mixed"],
)
def test_tokens_attend_to_what_the_indexer_chose(monkeypatch, query_lens, seq_lens, padding):
    step = Step(query_lens, seq_lens, padding)
    metadata = step.built(monkeypatch, decoder(256))
    pair = step.q[..., :D_C], step.q[..., D_C:]
    out, lse = impl(step.topk).forward_mqa(pair, step.cache, metadata, LAYER)
    assert_attention_close((out[: step.tokens], lse[: step.tokens]), step.expected(), torch.float32)
    assert (out[step.tokens :] == 0).all()  # padding attends to nothing
    of_one, _ = impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
    assert torch.equal(of_one, out)


@pytest.mark.parametrize(
    "kv_format, dims", [(E4M3, (D_C, D_ROPE)), (RECORD_656, (512, 64))], ids=["e4m3", "records"]
)
def test_fp8_caches(monkeypatch, kv_format, dims):
    step = Step([1, 3, 40], [500, 300, 90], dims=dims)
    scale = LAYER._k_scale if kv_format.takes_scale else None
    step.quantize(kv_format, scale)
    metadata = step.built(monkeypatch, decoder(256, dims, kv_format.name))
    attention = impl(step.topk, dims, kv_format.name)
    actual = attention.forward_mqa(step.q, step.cache, metadata, LAYER)
    assert_attention_close(actual, step.expected(), torch.float32)


@pytest.mark.parametrize("kv_format", [None, E4M3], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize(
    "query_lens, seq_lens, padding",
    [
        ([1, 1, 1, 1], [303, 129, 128, 3], 0),  # tails of 3, 1 and no keys, and no pool at all
        ([1, 1, 0], [303, 5, 0], 1),
        ([3, 3], [303, 131], 0),
        ([1, 3, 40, 150], [500, 7, 240, 150], 0),
    ],
    ids=["decode", "padded", "drafts", "mixed"],
)
def test_pools_of_keys_and_a_tail_of_latents_without_rotation(
    monkeypatch, query_lens, seq_lens, padding, kv_format
):
    """GLM-5.3-Flash's lists: a tail lies behind the places of all pools, also if there are fewer."""
    dims = (D_C, 0)
    step = Step(query_lens, seq_lens, padding, dims=dims, page_size=2 * PAGE_SIZE, pool=4)
    scale = None if kv_format is None else LAYER._k_scale
    if kv_format is not None:
        step.quantize(kv_format, scale)
    kv_dtype = torch.float32 if kv_format is None else kv_format.name
    metadata = step.built(monkeypatch, decoder(256, dims, kv_dtype, 2 * PAGE_SIZE))
    actual = impl(step.topk, dims, kv_dtype).forward_mqa(step.q, step.cache, metadata, LAYER)
    out, lse = (values[: step.tokens] for values in actual)
    assert_attention_close((out, lse), step.expected(), torch.float32)


def test_on_a_gpu_vllms_kernel_moves_keys_of_pools_to_the_front(monkeypatch):
    """It does if it is to count them. Without pools it need not."""
    asked = []

    def convert(requests, table, positions, *, return_valid_counts=False, **sizes):
        asked.append((return_valid_counts, sizes))
        return ("slots", "counts") if return_valid_counts else "slots"

    class Positions:
        device, shape = torch.device("cuda"), (1, 256)

        def __len__(self):
            return 1

    monkeypatch.setattr(sparse_step, "triton_convert_req_index_to_global_index", convert)
    one, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    for has_pools in (False, True):
        step = SparseStep(decoder(1, page_size=128), slice(0, 1), one, one, table, has_pools=has_pools)
        assert step.slots(Positions()) == "slots"
    sizes = {"BLOCK_SIZE": 128, "NUM_TOPK_TOKENS": 256}
    assert asked == [(False, sizes), (True, sizes)]


@pytest.mark.parametrize("learned", [[0.5, -1.0], [float("-inf"), 3.0]], ids=str)
def test_sinks_count_as_keys_without_values(monkeypatch, learned):
    """They are loaded behind the construction of their layer, as a parameter."""
    step = Step([1, 3, 40], [5, 300, 90])
    metadata = step.built(monkeypatch, decoder(256))
    attention = impl(step.topk)
    attention.sinks = torch.nn.Parameter(torch.zeros(HEADS))
    attention.sinks.data.copy_(torch.tensor(learned))
    out, lse = attention.forward_mqa(step.q, step.cache, metadata, LAYER)
    expected_out, expected_lse = step.expected()
    with_sinks = torch.logaddexp(expected_lse.double(), torch.tensor(learned).double())
    expected_out = expected_out * (expected_lse - with_sinks).exp().unsqueeze(-1)
    assert_attention_close((out, lse), (expected_out, with_sinks), torch.float32)


def dequantize_pages(cache, rows, table, starts, count):
    """What vLLM's kernel does that copies records: a request's tokens to the rows from its start on."""
    assert len(table) == len(starts) == count
    for pages, start, end in zip(table, starts.tolist(), [*starts.tolist()[1:], len(rows)], strict=True):
        stored = cache[pages[: -(-(end - start) // cache.shape[1])].long()].flatten(0, 1)
        rows[start:end] = dequantize(stored[: end - start], dtype=rows.dtype)


@pytest.mark.parametrize(
    "query_lens, seq_lens, stored, copied",
    [
        ([1, 3, 40, 100, 20], [500, 300, 90, 240, 64], [(0, 4)], [(4, 44), (44, 164)]),
        ([30, 50], [130, 50], [], [(0, 80)]),
        ([30], [320], [], [(0, 30)]),  # more pages in the buffer than the cache's table is wide
    ],
    ids=["two parts", "prompts alone", "the whole buffer"],
)
@pytest.mark.parametrize("page_size, pool", [(PAGE_SIZE, 1), (2 * PAGE_SIZE, 4)], ids=str)
def test_prompts_attend_to_copies_of_records(
    monkeypatch, query_lens, seq_lens, stored, copied, page_size, pool
):
    dims = (512, 64)
    step = Step(query_lens, seq_lens, dims=dims, page_size=page_size, pool=pool)
    step.quantize(RECORD_656, None)
    of_records, copies = specs_of(
        replace(decoder(256, dims, RECORD_656.name, page_size).spec, num_heads=MOST_HEADS_ON_RECORDS + 1)
    )
    assert copies.page_size == PAGE_SIZE and of_records.page_size == page_size
    of_records, of_copies = decoder(256, dims, RECORD_656.name, page_size), decoder(256, dims)
    metadata = step.built(monkeypatch, of_records, of_copies, buffer_pages=5)
    parts = {of_records: [], of_copies: []}
    for part in metadata.parts:
        parts[part.decoder].append((part.tokens.start, part.tokens.stop))
    assert parts == {of_records: stored, of_copies: copied}
    attention = impl(step.topk, dims, RECORD_656.name)
    attention._buffer = lambda pages: torch.full((pages, PAGE_SIZE, 576), float("nan"))
    monkeypatch.setattr(sparse_step._custom_ops, "cp_gather_and_upconvert_fp8_kv_cache", dequantize_pages)
    out, lse = attention.forward_mqa(step.q, step.cache, metadata, LAYER)
    assert_attention_close((out, lse), step.expected(), torch.float32)
    first = metadata.num_decode_tokens
    if first:  # nothing is copied if vLLM prefills the others
        attention._buffer = None
        alone, _ = attention.forward_mqa(step.q[:first], step.cache, metadata, LAYER)
        assert torch.equal(alone, out[:first])


@pytest.mark.parametrize("heads, copies", [(32, []), (64, ["hopper_many_rows-bf16-d512_64-r64-lists"])])
def test_kernels_for_copies_are_checked_before_weights_are_loaded(monkeypatch, heads, copies):
    spec = replace(decoder(8, (512, 64), RECORD_656.name).spec, dtype=torch.bfloat16, num_heads=heads)
    monkeypatch.setattr(refusals, "_spec_of_current_model", lambda *_: spec)
    checked = []
    monkeypatch.setattr(jit, "why_unavailable", lambda variants: checked.extend(v.name for v in variants))
    reasons = refusals.reasons_against_kernels((9, 0), torch.bfloat16, RECORD_656, 576, TableKind.LIST)
    assert not list(reasons)
    assert checked == ["hopper_many_rows_fp8-bf16-rec656-d512_64-r64-lists", *copies]


@pytest.mark.parametrize("width, pages", [(3, 3), (12, 5)], ids=["as the table", "as the buffer"])
def test_a_dummy_run_may_have_longer_prompts_than_the_model(monkeypatch, width, pages):
    """vLLM tunes kernels with batches of max_num_batched_tokens, whatever the longest prompt may be."""
    step = Step([700], [700], dims=(512, 64))
    step.metadata["block_table"] = step.metadata["block_table"][:, :width]
    decoders = decoder(1024, (512, 64), RECORD_656.name), decoder(1024, (512, 64))
    (part,) = step.built(monkeypatch, *decoders, buffer_pages=5).parts
    assert isinstance(part, CopiedPrompts) and part.pages == pages


def test_only_the_first_tokens_if_vllm_prefills_the_others(monkeypatch):
    step = Step([1, 1, 60], [300, 90, 60])
    metadata = step.built(monkeypatch, decoder(256))
    expected_out, expected_lse = step.expected()
    for rows in (2, step.tokens, 2):
        actual = impl(step.topk).forward_mqa(step.q[:rows], step.cache, metadata, LAYER)
        assert_attention_close(actual, (expected_out[:rows], expected_lse[:rows]), torch.float32)


def test_positions_that_do_not_exist_have_no_slot(monkeypatch):
    step = Step([1], [100])
    (part,) = step.built(monkeypatch, decoder(8)).parts
    step.builder._writer(SimpleNamespace(**step.metadata))()
    first, second = (step.metadata["block_table"][0, :2] * PAGE_SIZE).tolist()
    positions = torch.tensor([[-1, 0, 70, 1 << 20]], dtype=torch.int32)
    assert part.slots(positions).tolist() == [[-1, first, second + 6, -1]]


@pytest.mark.parametrize("start", [0, 1, 4, 7])
def test_triton_has_one_kernel_wherever_the_tokens_begin(monkeypatch, start):
    """It compiles another one for a pointer that is not aligned to 16 bytes."""
    seen = []

    def convert(requests, *arguments, **options):
        seen.append((requests.tolist(), requests.data_ptr() % 16))

    class Positions:
        device, shape = torch.device("cuda"), (3, 8)

        def __len__(self):
            return 3

    monkeypatch.setattr(sparse_step, "triton_convert_req_index_to_global_index", convert)
    requests = torch.arange(16, dtype=torch.int32)
    tokens, table = slice(start, start + 9), torch.zeros(16, 4, dtype=torch.int32)
    SparseStep(decoder(16), tokens, requests, requests, table).slots(Positions())
    assert seen == [([start, start + 1, start + 2], 0)]


def test_context_of_any_prompt_is_merged(monkeypatch):
    step = Step([1, 60], [300, 90])
    context = SimpleNamespace(prefill_tokens_with_context=0)  # vLLM 0.26
    step.metadata["prefill"] = SimpleNamespace(chunked_context=context)
    step.built(monkeypatch, decoder(256))
    assert context.prefill_tokens_with_context is None


def test_layers_share_a_plan_but_not_their_lists(monkeypatch):
    step = Step([1, 1], [300, 200])
    metadata = step.built(monkeypatch, decoder(8))
    (part,) = metadata.parts
    plan = part.plan_for(2)
    for seed in (1, 2):
        step.topk = Step([1, 1], [300, 200], seed=seed).topk
        actual = impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
        assert_attention_close(actual, step.expected(), torch.float32)
    assert part.plan_for(2) is plan


def test_each_forward_pass_plans_for_its_lengths(monkeypatch):
    """vLLM captures passes with metadata of earlier ones; a graph's replays have other lengths."""
    step = Step([1, 1], [100, 130])
    metadata = step.built(monkeypatch, decoder(8))
    lengths = step.metadata["seq_lens"]
    lengths -= 60
    with forward_pass():
        impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
    lengths += 60
    actual = impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
    assert_attention_close(actual, step.expected(), torch.float32)


def test_a_draft_models_next_step_reads_its_new_lengths(monkeypatch):
    """vLLM advances them on the device, and captures the call that plans anew, behind any other batch."""
    step = Step([1, 1], [100, 130])
    lengths = step.metadata["seq_lens"]
    lengths -= 2
    metadata = step.built(monkeypatch, decoder(8))
    impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
    lengths += 2
    step.builder._lengths.fill_(1)
    metadata.req_id_per_token.fill_(1)
    step.builder.update_draft_decode_metadata(metadata)
    actual = impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
    assert_attention_close(actual, step.expected(), torch.float32)


def test_a_draft_models_step_with_several_tokens_of_a_request_is_refused(monkeypatch):
    step = Step([2, 1], [100, 130])
    metadata = step.built(monkeypatch, decoder(8))
    with pytest.raises(UnsupportedError, match="one token at a time: leave this draft model out"):
        step.builder.update_draft_decode_metadata(metadata)


def test_a_step_is_planned_again_after_another_one(monkeypatch):
    steps = [Step([1, 1], [300, 200], seed=seed) for seed in (1, 2)]
    shared = decoder(8)
    built = [step.built(monkeypatch, shared) for step in steps]
    for step, metadata in 2 * list(zip(steps, built, strict=True)):
        actual = impl(step.topk).forward_mqa(step.q, step.cache, metadata, LAYER)
        assert_attention_close(actual, step.expected(), torch.float32)


@pytest.fixture
def model_config(deepseek_path, monkeypatch):
    """vLLM's configuration of a small model, as if it had an indexer."""
    config = EngineArgs(str(deepseek_path), dtype="float32", block_size=64).create_engine_config()
    for name in ("hf_config", "hf_text_config"):
        monkeypatch.setattr(getattr(config.model_config, name), "index_topk", TOPK, raising=False)
    with set_current_vllm_config(config):
        yield config


def layer_of(topk, **changes):
    """A layer's attention, made with vLLM's arguments."""
    layer = {"num_heads": HEADS, "head_size": 576, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None}
    layer |= {"sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    layer |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None, "q_lora_rank": None}
    layer |= {"kv_lora_rank": 512, "kv_b_proj": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    layer |= {"qk_head_dim": 192, "v_head_dim": 128, "indexer": SimpleNamespace(topk_indices_buffer=topk)}
    return SparseImpl(**layer | changes)


def test_layer_options_are_refused(model_config, monkeypatch):
    monkeypatch.setattr(vllm_sparse, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    topk = torch.zeros(8, TOPK, dtype=torch.int32)
    layer = layer_of(topk)
    assert layer.geometry.kv_lora_rank == 512 and layer.buffer_pages == 0
    with pytest.raises(UnsupportedError, match="logits_soft_cap"):
        layer_of(topk, logits_soft_cap=30.0)
    # HY-V4 keeps vLLM from regular prefill.
    sinks = torch.nn.Parameter(torch.zeros(HEADS))
    with pytest.raises(UnsupportedError, match="leave attention sinks out of regular prefill"):
        layer_of(topk, sinks=sinks)
    monkeypatch.setattr(model_config.attention_config, "sparse_mla_force_mqa", True, raising=False)
    assert layer_of(topk, sinks=sinks).sinks is sinks
    # vLLM selects once for engines that follow each other in a process.
    monkeypatch.setattr(refusals, "reasons_against_indexer", lambda config: ["HiSparse"])
    with pytest.raises(UnsupportedError, match="HiSparse"):
        layer_of(topk)


def test_memory_for_copies_is_reserved_at_start(model_config, monkeypatch):
    monkeypatch.setattr(vllm_sparse, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    monkeypatch.setattr(model_config.model_config, "dtype", torch.bfloat16)
    reserved = []

    def get_simultaneous(*what):
        reserved.extend(what)
        return [torch.empty(shape, dtype=dtype) for shape, dtype in what]

    manager = SimpleNamespace(get_simultaneous=get_simultaneous)
    monkeypatch.setattr(sparse, "current_workspace_manager", lambda: manager)
    topk = torch.zeros(8, TOPK, dtype=torch.int32)
    for heads, kv_cache_dtype in ((32, "fp8_ds_mla"), (64, "fp8")):
        assert layer_of(topk, num_heads=heads, kv_cache_dtype=kv_cache_dtype).buffer_pages == 0
    of_records = {"num_heads": 64, "kv_cache_dtype": "fp8_ds_mla"}
    with monkeypatch.context() as overlap:
        overlap.setattr(model_config.parallel_config, "enable_dbo", True)
        assert layer_of(topk, **of_records).buffer_pages == 0
    assert not reserved
    layer = layer_of(topk, **of_records)
    longest = model_config.model_config.max_model_len
    assert reserved == [((layer.buffer_pages, PAGE_SIZE, 576), torch.bfloat16)]
    assert layer.buffer_pages * PAGE_SIZE > longest


@pytest.fixture
def attention(model_config, monkeypatch):
    """That of `LAYERS`, in vLLM's context."""
    monkeypatch.setattr(vllm_sparse, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    attention = impl(None)
    attention.buffer_pages = 0
    attention.geometry = SimpleNamespace(num_heads=HEADS, kv_lora_rank=D_C, qk_rope_head_dim=D_ROPE)
    monkeypatch.setattr(
        "mla_backend_vllm.sparse.Policy", lambda *_: SimpleNamespace(absorbed_query_limit=lambda n: 64)
    )
    for name in LAYERS:
        layer = SimpleNamespace(impl=attention, prefill_backend=None, hooks=[])
        layer.register_state_dict_post_hook = layer.hooks.append
        model_config.compilation_config.static_forward_context[name] = layer
    return attention


def test_no_layer_saves_absorbed_weights(attention, model_config):
    make_builder(model_config)
    layers = model_config.compilation_config.static_forward_context
    assert all(layers[name].hooks == [leave_out_absorbed_weights] for name in LAYERS)


def test_prefix_hits_are_prompts_where_steps_are_split(attention, model_config, monkeypatch):
    """vLLM looks for hits on pages of the step's other half only above the threshold."""
    assert make_builder(model_config).reorder_batch_threshold > 1
    monkeypatch.setattr(model_config.parallel_config, "enable_dbo", True)
    assert make_builder(model_config).reorder_batch_threshold == 1


@pytest.fixture
def builder(attention, model_config):
    builder = make_builder(model_config)
    for held in vars(builder).values():
        if isinstance(held, torch.Tensor):
            held.zero_()  # vLLM 0.26 discards the builders' memory when it sleeps
    return builder


def make_builder(model_config):
    spec = MLAAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=D_C + D_ROPE, dtype=torch.float32)
    return SparseMetadataBuilder(spec, LAYERS, model_config, torch.device("cpu"))


def test_a_decoder_serves_the_largest_batch_and_the_largest_graph(attention, model_config, monkeypatch):
    tokens = model_config.scheduler_config.max_num_batched_tokens
    for graph_batch in (0, 2 * tokens):
        monkeypatch.setattr(model_config.compilation_config, "max_cudagraph_capture_size", graph_batch)
        assert make_builder(model_config).decoder.spec.max_batch == max(tokens, graph_batch)


@pytest.mark.parametrize("buffer_pages", [0, 5])
def test_copies_have_a_decoder_where_there_is_a_buffer(attention, model_config, monkeypatch, buffer_pages):
    monkeypatch.setattr(sparse, "specs_of", lambda spec: [spec, spec])
    attention.buffer_pages = buffer_pages
    assert len(make_builder(model_config)._copy_decoders) == (buffer_pages > 0)


def attend(attention, step, metadata):
    attention.topk_indices_buffer = step.topk
    return attention.forward_mqa((step.q[..., :D_C], step.q[..., D_C:]), step.cache, metadata, LAYER)


def test_vllms_own_builder_and_batch(attention, builder, model_config, monkeypatch):
    """From CommonAttentionMetadata through vLLM's builder: a decode and a chunk of a prompt."""
    step = Step([1, 70], [300, 90])
    requests = step.metadata["req_id_per_token"]  # made by a Triton kernel in some versions
    monkeypatch.setattr(VllmBuilder, "_build_req_id_per_token", lambda *_: requests)
    metadata = builder.build(0, batch_of(step))
    layer = model_config.compilation_config.static_forward_context[LAYERS[0]]
    assert (metadata.num_decodes, metadata.num_prefills, len(layer.hooks)) == (1, 1, 1)
    assert_attention_close(attend(attention, step, metadata), step.expected(), torch.float32)


def test_a_later_draft_step_of_vllms_model_runner_v1(attention, builder):
    """It has the first step's batch, changed in place, with what that batch kept of its tokens' requests."""
    step = Step([1, 1], [100, 130])
    requests_of_first_step = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)
    batch = batch_of(step, _token_to_req_indices_cache=requests_of_first_step)
    metadata = builder.build_for_drafting(batch, 1)
    assert_attention_close(attend(attention, step, metadata), step.expected(), torch.float32)


@pytest.mark.parametrize("kept", [5, 7], ids=["as many", "with padding"])
def test_tokens_that_vllm_adds_for_a_draft_model_have_their_requests(attention, builder, kept, monkeypatch):
    """In vLLM's Model Runner V1, a draft's first step: the target's batch of [2, 3] tokens, and one each."""
    step = Step([3, 4], [100, 130])
    requests = torch.tensor([0, 0, 1, 1, 1, 0, 0], dtype=torch.int32)[:kept]
    batch = batch_of(step, _token_to_req_indices_cache=requests)
    own = step.metadata["req_id_per_token"]
    if hasattr(CommonAttentionMetadata, "token_to_req_indices"):  # by a Triton kernel in some versions

        def token_to_req_indices(batch, buffer):
            kept = batch._token_to_req_indices_cache
            return own if kept is None else kept[: batch.num_actual_tokens]

        monkeypatch.setattr(CommonAttentionMetadata, "token_to_req_indices", token_to_req_indices)
    metadata = builder.build_for_drafting(batch, 0)
    assert_attention_close(attend(attention, step, metadata), step.expected(), torch.float32)
