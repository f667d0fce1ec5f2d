"""SGLang's own attention test kit, from its wheel, on this backend.

The kit builds tiny MLA layers on a mock runner and compares each mode with its own reference. These are the
cases that SGLang runs on its own backends. They run on a GPU if there is one, otherwise on the CPU; captured
graphs are emulated on both.
"""

import dataclasses
import types
import unittest

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
import sgl_kernel_stub  # noqa: E402

sgl_kernel_stub.install()

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers.attention import base_attn_backend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend  # noqa: E402
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend  # noqa: E402
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from mla_backend import decode  # noqa: E402
from mla_backend.errors import UnsupportedError  # noqa: E402
from mla_backend_sglang import attention_backend, create_backend  # noqa: E402
from mla_backend_sglang.settings import Settings  # noqa: E402

load_plugins()

from sglang.test.kits.attention_unittest.attention_methods import mla_attention  # noqa: E402
from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase  # noqa: E402
from sglang.test.kits.attention_unittest.runner_modes import (  # noqa: E402
    cuda_graph_decode_runner,
    speculative_draft_extend_runner,
    speculative_target_verify_runner,
)

pytestmark = pytest.mark.usefixtures("one_rank")

NAME = "mla_backend"
DIMENSIONS = dict(kv_lora_rank=512, qk_rope_head_dim=64, device=DEVICE)
SPECULATION = ("eagle", "frozen_kv_mtp", "dflash", "ngram")
EAGER_CASES = mla_attention.make_mla_cases(NAME)


@pytest.fixture
def kit():
    """The TestCase through which the kit asserts and skips."""
    return unittest.TestCase()


def case(name, mode, prefix_lens, extend_lens=(), page_size=16):
    return MLAAttentionCase(
        name=name,
        backend=NAME,
        forward_mode=mode,
        num_heads=4,
        page_size=page_size,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
    )


def verify_case(page_size=16):
    return case("verify", ForwardMode.TARGET_VERIFY, (4, 7), (3, 3), page_size)


def draft_extend_case(page_size=16, width=3):
    return case("draft_extend", ForwardMode.DRAFT_EXTEND_V2, (4, 7), (width, width), page_size)


def decode_case(page_size):
    return case("decode", ForwardMode.DECODE, (14, 15, 16), page_size=page_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("eager_case", EAGER_CASES, ids=lambda c: c.name)
def test_eager(kit, eager_case, dtype):
    mla_attention.run_mla_attention_case(kit, eager_case, dtype=dtype, **DIMENSIONS)


@pytest.mark.parametrize(
    "layout, layout_case",
    [
        ("interleaved_pages", case("layout", ForwardMode.EXTEND, (16,), (2,))),
        ("interleaved_pages", decode_case(16)),
        # SGLang's allocator keeps the order of tokens in a page, but pages may come in any order.
        ("non_monotonic_extend", case("layout", ForwardMode.EXTEND, (16,), (2,), page_size=1)),
    ],
)
def test_layouts(kit, layout, layout_case):
    mla_attention.run_mla_attention_case(kit, layout_case, loc_layout=layout, **DIMENSIONS)


@pytest.mark.parametrize("kind", SPECULATION)
def test_verify(kit, kind):
    speculative_target_verify_runner.run_mla_eagle_verify_case(
        kit, verify_case(), topk=1, spec_kind=kind, **DIMENSIONS
    )


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_decode_graph_metadata(kit, page_size):
    cuda_graph_decode_runner.run_mla_cuda_graph_decode_case(kit, decode_case(page_size), **DIMENSIONS)


@pytest.mark.parametrize("kind", SPECULATION)
def test_verify_graph_metadata(kit, kind):
    speculative_target_verify_runner.run_mla_eagle_verify_cuda_graph_case(
        kit, verify_case(), topk=1, spec_kind=kind, **DIMENSIONS
    )


@pytest.mark.parametrize("pad_style", ["small_real", "prod_fill"])
@pytest.mark.parametrize("captured_batch", [2, 4, 8])
def test_draft_extend_graph_metadata(kit, pad_style, captured_batch):
    speculative_draft_extend_runner.run_mla_draft_extend_v2_cuda_graph_case(
        kit,
        draft_extend_case(),
        cuda_graph_capture_batch_size=captured_batch,
        pad_style=pad_style,
        **DIMENSIONS,
    )


@pytest.fixture
def two_drafts(monkeypatch):
    """Backends that know of two draft tokens, whatever SGLang's kit says."""
    drafts = types.SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=2)
    monkeypatch.setattr(Settings, "speculation", drafts)


def widened(kit, width):
    """A draft extension as with several draft layers, whose queries begin before the two draft tokens."""
    fixture = mla_attention.build_mla_attention_fixture(kit, draft_extend_case(width=width), **DIMENSIONS)
    speculative_draft_extend_runner._prepare_eagle_draft_extend_v2_batch(
        fixture.case, fixture.forward_batch, device=DEVICE
    )
    return fixture


@pytest.mark.parametrize("width", [2, 5])
def test_draft_extension_may_begin_before_the_drafts(kit, two_drafts, width):
    """SGLang says how many tokens a request has; in eager steps and in graphs, which are padded here."""
    fixture = widened(kit, width)
    actual = mla_attention.run_mla_fixture_eager(fixture)
    expected = mla_attention.expected_mla_fixture_output(fixture)
    torch.testing.assert_close(actual, expected, atol=mla_attention.MLA_ATOL, rtol=mla_attention.MLA_RTOL)
    speculative_draft_extend_runner.run_mla_draft_extend_v2_cuda_graph_case(
        kit,
        draft_extend_case(width=width),
        cuda_graph_capture_batch_size=4,
        pad_style="prod_fill",
        **DIMENSIONS,
    )


@pytest.mark.parametrize("ranks", [None, [10, 10]], ids=["alone", "data-parallel attention"])
def test_queries_that_were_not_planned_are_an_error_unless_sglang_pads(kit, two_drafts, ranks):
    fixture = widened(kit, 5)
    fixture.forward_batch.spec_info.num_tokens_per_req = 4
    fixture.forward_batch.global_num_tokens_cpu = ranks
    if ranks is None:
        with pytest.raises(UnsupportedError, match="10 query tokens of 2 requests, .* planned 4: use a supp"):
            mla_attention.run_mla_fixture_eager(fixture)
    else:
        mla_attention.run_mla_fixture_eager(fixture)


def test_lengths_can_stay_on_the_gpu(kit):
    """SGLang then sizes the masks of drafts for the longest context."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    assert not fixture.backend.needs_cpu_seq_lens
    assert fixture.backend.max_context_len == fixture.runner.model_config.context_len


def test_drafts_write_a_mask_of_their_own_tokens_only(kit):
    """SGLang writes a mask in each step. That of a chain is not read: it has no columns for the context."""
    verify_mask = pytest.importorskip(
        "sglang.srt.layers.attention.verify_mask", reason="in this SGLang, backends have no such mask"
    )
    fixture = mla_attention.build_mla_attention_fixture(kit, verify_case(), **DIMENSIONS)
    backend, drafts = fixture.backend, 3
    backend._num_draft_tokens = drafts
    backend.init_cuda_graph_state(max_bs=100, max_num_tokens=300)
    mask = backend.verify_mask
    assert mask.mode is verify_mask.TreeMaskMode.QLEN_ONLY and not mask.is_read
    assert mask.fits(100) and mask.buffer.numel() == 100 * drafts**2
    without_drafts = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    assert without_drafts.backend.verify_mask is None


@pytest.mark.parametrize("mode, lengths", [(ForwardMode.DECODE, ()), (ForwardMode.EXTEND, (3, 2, 1))])
def test_batches_may_be_larger_than_the_pool_of_requests(kit, monkeypatch, mode, lengths):
    """As SGLang makes them to tune kernels, and by rounding for data-parallel attention."""
    larger = case("larger", mode, (4, 7, 9), lengths)
    make = attention_backend.SglangMLABackend._make_decoder

    def make_small(self, spec):  # for one request less than there are
        make(self, spec if "_decoder" in vars(self) else dataclasses.replace(spec, max_batch=2))

    monkeypatch.setattr(attention_backend.SglangMLABackend, "_make_decoder", make_small)
    mla_attention.run_mla_attention_case(kit, larger, **DIMENSIONS)


def test_what_is_not_supported_is_refused_when_the_backend_is_made(kit):
    """test_refusals.py has all that is refused."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    fixture.runner.use_mla_backend = False
    with pytest.raises(UnsupportedError, match="this model has none: choose another --attention-backend"):
        create_backend(fixture.runner)


@pytest.mark.newest
def test_layers_without_divided_caches_are_refused_when_the_backend_is_made(kit, monkeypatch):
    monkeypatch.setattr(Settings, "is_chunked_prefix_disabled", False)
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    fixture.runner.model = torch.nn.ModuleDict({"undivided": torch.nn.Module()})
    fixture.runner.model.undivided.attn_mqa = torch.nn.Module()
    with (
        get_parallel().override(attn_dcp_size=2),
        pytest.raises(UnsupportedError, match="undivided cannot attend with decode context parallelism"),
    ):
        create_backend(fixture.runner)


@pytest.mark.parametrize("layers", [None, {3: 0}], ids=["all", "beside linear attention"])
def test_only_layers_with_attention_are_adopted(kit, monkeypatch, layers):
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    fixture.runner.model = torch.nn.Module()
    if layers is not None:
        fixture.runner.token_to_kv_pool.full_attention_layer_id_mapping = layers
    adopted = []
    monkeypatch.setattr(attention_backend, "adopt_weights", lambda *given: adopted.append(given[3]) or {})
    monkeypatch.setattr(attention_backend, "fuse_appends", lambda *_: {})
    create_backend(fixture.runner)
    assert adopted == [layers]


def test_prefill_is_prepared_when_the_backend_is_made(kit, monkeypatch):
    """So that no request waits for a compiler, and a library that fails is not used."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    prepared = []
    monkeypatch.setattr(
        attention_backend.prefill, "prepare", lambda *what, **how: prepared.append((what, how))
    )
    create_backend(fixture.runner)
    config = fixture.runner.model_config.hf_text_config
    dimensions = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    table = fixture.runner.req_to_token_pool.req_to_token
    assert prepared == [((table.device, fixture.runner.dtype, *dimensions), {"with_plans": True})]


@pytest.mark.skipif(
    not hasattr(base_attn_backend, "SharedReadEnds"),
    reason="this SGLang does not ask how long a table is read",
)
def test_the_table_is_read_until_a_step_ends(kit):
    """It is SGLang's own and no copy, so SGLang may write to it only after the step."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    mla_attention.run_mla_fixture_eager(fixture)
    backend, table = fixture.backend, fixture.runner.req_to_token_pool.req_to_token
    assert backend.forward_metadata.batch.table.data_ptr() == table.data_ptr()
    ends = base_attn_backend.SharedReadEnds.POST_REPLAY
    assert backend.shared_read_ends(fixture.forward_batch.forward_mode) is ends


def test_multimodal_models_are_read_from_their_text_config(kit):
    """SGLang finds it under any name, also as ``llm_config`` or ``thinker_config``."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    config = fixture.runner.model_config
    config.hf_config = types.SimpleNamespace(model_type="vision", llm_config=config.hf_text_config)
    create_backend(fixture.runner)


@pytest.mark.parametrize("disabled", [False, True])
def test_settings_decide_what_prefills_may_use(kit, monkeypatch, disabled):
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    monkeypatch.setattr(Settings, "is_chunked_prefix_disabled", disabled)
    chooser = create_backend(fixture.runner)._chooser
    assert chooser.absorb_prefixes is disabled and chooser.may_absorb
    with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(1000):
        assert create_backend(fixture.runner)._chooser.chunk_tokens == 1000 < chooser.chunk_tokens


@pytest.mark.newest
def test_a_rank_of_a_divided_cache_absorbs_no_prefills(kit, monkeypatch):
    monkeypatch.setattr(Settings, "is_chunked_prefix_disabled", False)
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    with get_parallel().override(attn_dcp_size=2):
        assert not create_backend(fixture.runner)._chooser.may_absorb


def test_idle_batch(kit):
    """The batch that a data-parallel rank runs without requests."""
    fixture = mla_attention.build_mla_attention_fixture(kit, decode_case(16), **DIMENSIONS)
    idle = types.SimpleNamespace(forward_mode=ForwardMode.IDLE, batch_size=0)
    fixture.backend.init_forward_metadata(idle)
    layer = fixture.actual_module.attn_mqa
    q = torch.empty(0, layer.tp_q_head_num, layer.v_head_dim, device=DEVICE)
    assert fixture.backend.forward(q, None, None, layer, idle).shape == (
        0,
        layer.tp_q_head_num * layer.v_head_dim,
    )


@pytest.fixture
def hybrid(monkeypatch):
    """SGLang's wrapper for different prefill and decode backends, around two of these; by name."""

    def create(runner):
        return HybridAttnBackend(
            runner, prefill_backend=create_backend(runner), decode_backend=create_backend(runner)
        )

    monkeypatch.setitem(ATTENTION_BACKENDS, "hybrid", create)
    return "hybrid"


def test_inside_a_hybrid_backend(kit, hybrid):
    for eager_case in EAGER_CASES:
        mla_attention.run_mla_attention_case(
            kit, dataclasses.replace(eager_case, backend=hybrid), **DIMENSIONS
        )
    cuda_graph_decode_runner.run_mla_cuda_graph_decode_case(
        kit, dataclasses.replace(decode_case(16), backend=hybrid), **DIMENSIONS
    )
    speculative_target_verify_runner.run_mla_eagle_verify_cuda_graph_case(
        kit, dataclasses.replace(verify_case(), backend=hybrid), topk=1, spec_kind="eagle", **DIMENSIONS
    )


def of_stock(runner):
    return ATTENTION_BACKENDS["torch_native"](runner)


@pytest.mark.newest
@pytest.mark.parametrize("eager_case", EAGER_CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_as_one_half_of_a_hybrid_backend(kit, monkeypatch, eager_case, half):
    """Beside a backend of SGLang's own: it gets the steps of its half alone, and both share the cache."""
    made = []

    def create(runner):
        makers = {"prefill": of_stock, "decode": of_stock, half: create_backend}
        made.append(HybridAttnBackend(runner, makers["prefill"](runner), makers["decode"](runner)))
        return made[-1]

    monkeypatch.setitem(ATTENTION_BACKENDS, "hybrid", create)
    mla_attention.run_mla_attention_case(kit, dataclasses.replace(eager_case, backend="hybrid"), **DIMENSIONS)
    ours = getattr(made[-1], f"{half}_backend")
    is_decode = eager_case.forward_mode.is_decode()
    assert (ours.forward_metadata is not None) is (is_decode is (half == "decode"))


# What SGLang's wrappers do not ask this backend for, and why that is right.
NOT_FORWARDED = {
    "draft_extend_metadata_captured_in_graph",  # by default SGLang calls a method that does nothing here
    "needs_cpu_seq_lens",  # instances have it
    "support_triton",  # as here, on a GPU
}


@pytest.mark.newest
@pytest.mark.parametrize(
    "wrapper, others",
    [
        (HybridAttnBackend, set()),
        (HybridLinearAttnBackend, set()),
        # Called only if SGLang plans on another stream, which this backend refuses.
        (TboAttnBackend, {"update_verify_buffers_to_fill_after_draft"}),
    ],
)
def test_wrappers_forward_what_this_backend_implements(wrapper, others):
    ours = attention_backend.SglangMLABackend
    of_base = {name for name in vars(base_attn_backend.AttentionBackend) if not name.startswith("_")}
    assert (of_base & vars(ours).keys()) - vars(wrapper).keys() == NOT_FORWARDED | others


def test_the_kit_notices_a_dropped_key(kit, monkeypatch):
    plan = decode.MLADecoder.plan

    def plan_without_last_key(self, batch):
        return plan(self, dataclasses.replace(batch, seq_lens=batch.seq_lens - 1))

    monkeypatch.setattr(decode.MLADecoder, "plan", plan_without_last_key)
    runs = [
        *(lambda c=c: mla_attention.run_mla_attention_case(kit, c, **DIMENSIONS) for c in EAGER_CASES),
        lambda: test_verify(kit, "eagle"),
        lambda: test_decode_graph_metadata(kit, 1),
        lambda: test_verify_graph_metadata(kit, "eagle"),
        lambda: test_draft_extend_graph_metadata(kit, "prod_fill", 4),
    ]
    for run in runs:
        with pytest.raises(AssertionError, match="not close"):
            run()
