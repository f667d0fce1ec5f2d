"""MLADecoder: selection, validation, and plain torch behind it."""

import dataclasses
import math
import types

import pytest
import torch

from mla_backend import DecodeBatch, DecodePlan, InvalidInputError, MLADecoder, TableKind, UnsupportedError
from tests.support.mla_oracle import assert_attention_close, paged_problem

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def kernel_dtype(device):
    """One that the kernels of a GPU serve."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def decoder(**changes):
    arguments = {
        "num_heads": 2,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "dtype": torch.float32,
        "page_size": 4,
        "device": "cpu",
        "max_batch": 4,
    }
    return MLADecoder(**arguments | changes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table_kind", [TableKind.BLOCK, TableKind.TOKEN])
@pytest.mark.parametrize("causal", [True, False])
def test_plan_once_run_every_layer(dtype, table_kind, causal):
    problem = paged_problem([9, 0, 70, 2], [1, 1, 4, 3], dtype=dtype, table_kind=table_kind)
    layer_2 = paged_problem([9, 0, 70, 2], [1, 1, 4, 3], dtype=dtype, table_kind=table_kind, gain=2.0)
    decode = decoder(dtype=dtype, table_kind=table_kind, max_query_len=4)
    plan = decode.plan(problem.batch)
    for layer in (problem, layer_2):
        # Engines hand over transposed views of absorbed queries.
        q_nope = layer.q_nope.transpose(0, 1).contiguous().transpose(0, 1)
        actual = decode.run(q_nope, layer.q_rope, layer.latent_cache, plan, layer.scale, causal=causal)
        assert actual[0].is_contiguous()
        assert_attention_close(actual, layer.expected(causal), dtype)


def test_fp64_queries_are_attended_to_in_fp64():
    problem = paged_problem([900, 3], dtype=torch.float64, gain=10.0)
    decode = decoder(dtype=torch.float64)
    out, _ = decode.run(
        problem.q_nope, problem.q_rope, problem.latent_cache, decode.plan(problem.batch), problem.scale
    )
    torch.testing.assert_close(out, problem.expected()[0], atol=1e-12, rtol=1e-12)


def test_results_have_no_gradients():
    problem = paged_problem([9, 3])
    decode = decoder()
    q_nope, q_rope = (q.clone().requires_grad_() for q in (problem.q_nope, problem.q_rope))
    plan = decode.plan(problem.batch)
    out, lse = decode.run(q_nope, q_rope, problem.latent_cache, plan, problem.scale)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_and_the_default_device_change_nothing(kv_dtype, autocast):
    problem, decode = paged_problem([90, 3], [1, 1], kv_dtype=kv_dtype), decoder(kv_dtype=kv_dtype)

    def run():
        plan = decode.plan(problem.batch)
        queries = problem.q_nope, problem.q_rope
        return decode.run(*queries, problem.latent_cache, plan, problem.scale, kv_scale=problem.kv_scale)

    expected = run()
    with torch.autocast("cpu", dtype=autocast), torch.device("meta"):
        actual = run()
    assert all(map(torch.equal, actual, expected))


def test_run_writes_to_out_and_lse():
    problem = paged_problem([9, 3])
    decode = decoder()
    out, lse = torch.full((2, 2, 16), math.nan), torch.full((2, 2), math.nan)
    actual = decode.run(
        problem.q_nope,
        problem.q_rope,
        problem.latent_cache,
        decode.plan(problem.batch),
        problem.scale,
        out=out,
        lse=lse,
    )
    assert actual[0] is out
    assert actual[1] is lse
    assert_attention_close(actual, problem.expected(), torch.float32)


def test_an_output_of_one_token_may_have_any_stride():
    problem = paged_problem([9])
    decode = decoder()
    out = torch.zeros(2, 16).as_strided((1, 2, 16), (0, 16, 1))
    plan = decode.plan(problem.batch)
    actual = decode.run(problem.q_nope, problem.q_rope, problem.latent_cache, plan, problem.scale, out=out)
    assert_attention_close(actual, problem.expected(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "dims",
    [(64, 16, 4), (7, 4, 1), (64, 0, 4)],
    ids=["usual", "rows of any alignment", "no rotary part"],
)
def test_batch_invariance(dims, dtype):
    sizes = dict(zip(("kv_lora_rank", "qk_rope_head_dim", "num_heads"), dims, strict=True))
    # Without invariance, those with one query token would be padded to the longest of them.
    problem = paged_problem([300, 400, 330, 800, 391], [1, 1, 1, 5, 1], dtype=dtype, **sizes)
    decode = decoder(dtype=dtype, batch_invariant=True, max_batch=5, max_query_len=5, **sizes)

    def run(batch, rows):
        plan = decode.plan(batch)
        q_nope, q_rope = problem.q_nope[rows], problem.q_rope[rows]
        return decode.run(q_nope, q_rope, problem.latent_cache, plan, problem.scale)

    together = run(problem.batch, slice(None))
    assert_attention_close(together, problem.expected(), dtype)
    starts = problem.batch.query_start_loc.tolist()
    for i in range(5):
        rows = slice(starts[i], starts[i + 1])
        alone = dataclasses.replace(
            problem.batch,
            seq_lens=problem.batch.seq_lens[i : i + 1],
            table=problem.batch.table[i : i + 1],
            query_start_loc=None,
            max_query_len=starts[i + 1] - starts[i],
        )
        for of_batch, of_request in zip(together, run(alone, rows), strict=True):
            assert torch.equal(of_batch[rows], of_request)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_runs_on_a_gpu(dtype):
    problem = paged_problem([9, 0, 700, 2], [1, 1, 4, 3], dtype=dtype, device="cuda")
    decode = decoder(dtype=dtype, device="cuda", max_query_len=4, implementation="torch")
    actual = decode.run(
        problem.q_nope, problem.q_rope, problem.latent_cache, decode.plan(problem.batch), problem.scale
    )
    assert_attention_close(actual, problem.expected(), dtype)


def test_selection_on_the_cpu():
    assert decoder().implementation == "torch"
    assert "'cpu'" in decoder().reason
    assert decoder(implementation="torch").reason == "chosen by name"
    with pytest.raises(UnsupportedError, match="'hopper' needs a CUDA device, got cpu"):
        decoder(implementation="hopper")


@pytest.fixture
def kernels(monkeypatch):
    """`kernels(select)` stands in for the kernels, so that the choice made of their answer needs no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda select: monkeypatch.setattr("mla_backend.kernels.select", select)


def test_selection_asks_the_kernels_on_a_gpu(kernels):
    asked = []

    def select(spec, wanted):
        asked.append((spec, wanted))
        return types.SimpleNamespace(name="hopper"), "compute capability 9.0"

    kernels(select)
    decode = decoder(device="cuda", dtype=torch.bfloat16, batch_invariant=True)
    assert (decode.implementation, decode.reason) == ("hopper", "compute capability 9.0")
    assert asked == [(decode.spec, "auto")]
    assert decode.spec.kv_dtype is torch.bfloat16
    assert decode.spec.batch_invariant
    assert decode.spec.device == torch.device("cuda:0")


def test_selection_falls_back_with_the_kernels_reason(kernels):
    kernels(lambda spec, wanted: (None, "no kernel for compute capability 7.5"))
    decode = decoder(device="cuda:0", dtype=torch.bfloat16)
    assert (decode.implementation, decode.reason) == ("torch", "no kernel for compute capability 7.5")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_torch_does_not_see_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match=f"no device '{device}': torch sees 0 GPUs"):
        decoder(device=device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"implementation": "sm100"},
            "unknown implementation 'sm100': use 'auto' or one of hopper, portable, torch",
        ),
        ({"num_heads": 0}, "num_heads must be a positive int, got 0"),
        ({"num_ctas": 0}, "num_ctas must be a positive int, got 0"),
        ({"page_size": -1}, "page_size must be a positive int"),
        ({"page_size": 4.0}, "page_size must be a positive int, got 4.0"),
        ({"max_batch": 0}, "max_batch must be a positive int"),
        ({"max_query_len": 0}, "max_query_len must be a positive int"),
        ({"dtype": torch.int8}, "dtype must be one of .*got torch.int8"),
        ({"dtype": torch.float8_e4m3fn}, "dtype must be one of"),
        ({"kv_dtype": torch.uint8}, "kv_dtype must be one of .*got torch.uint8"),
        ({"kv_dtype": [1]}, r"kv_dtype must be one of .*got \[1\]"),
        ({"kv_dtype": ""}, "kv_dtype must be one of .*got ''"),
        ({"table_kind": "block"}, "table_kind must be a TableKind"),
        ({"device": None}, "device must be one of torch's, such as cuda, cuda:1 or cpu, got None"),
        ({"device": "gpu"}, "device must be one of torch's, such as cuda, cuda:1 or cpu, got 'gpu'"),
    ],
)
def test_construction_refuses(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        decoder(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 8}, "page_size 4 and a BLOCK table, this decoder was made for page_size 8 and BLOCK"),
        ({"table_kind": TableKind.TOKEN}, "made for page_size 4 and TOKEN tables"),
        ({"max_batch": 1}, "2 requests, max_batch is 1: split the batch, or make .* with max_batch=2"),
    ],
)
def test_plan_refuses(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        decoder(**changes).plan(paged_problem([9, 3]).batch)


def test_plan_refuses_a_batch_on_another_device():
    batch = paged_problem([9, 3]).batch
    elsewhere = {name: getattr(batch, name).to("meta") for name in ("seq_lens", "table", "query_start_loc")}
    with pytest.raises(InvalidInputError, match="the batch is on meta, this decoder on cpu"):
        decoder().plan(dataclasses.replace(batch, **elsewhere))


def test_plan_refuses_what_is_no_batch():
    with pytest.raises(InvalidInputError, match="batch must be a DecodeBatch, got NoneType"):
        decoder().plan(None)


def test_plan_refuses_a_malformed_batch():
    batch = dataclasses.replace(paged_problem([9, 3]).batch, seq_lens=torch.tensor([9, 3]))
    with pytest.raises(InvalidInputError, match=r"seq_lens must be torch\.int32"):
        decoder().plan(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_nope": torch.zeros(2, 3, 16)}, r"q_nope must be torch.float32 \[2, 2, 16\] on cpu"),
        ({"q_nope": torch.zeros(16)}, "q_nope must be torch.float32"),
        ({"q_nope": [0.0]}, "q_nope must be a torch.Tensor, got list"),
        ({"q_rope": None}, "q_rope must be a torch.Tensor, got NoneType"),
        ({"latent_cache": None}, "latent_cache must be a torch.Tensor, got NoneType"),
        ({"out": [1]}, "out must be a torch.Tensor, got list"),
        ({"lse": [1]}, "lse must be a torch.Tensor, got list"),
        ({"q_nope": torch.zeros(2, 2, 16).bfloat16()}, "got torch.bfloat16"),
        ({"q_nope": torch.zeros(2, 16, 2).transpose(1, 2)}, "last dimension of q_nope must be contiguous"),
        ({"q_rope": torch.zeros(3, 2, 8)}, r"q_rope must be torch.float32 \[2, 2, 8\]"),
        ({"q_rope": torch.zeros(2, 2, 8, device="meta")}, "on cpu, got .* on meta"),
        (
            {"latent_cache": torch.zeros(9, 8, 24)},
            r"latent_cache must be torch.float32 \[num_pages, 4, 24\] on cpu, got torch.float32 \[9, 8, 24\]",
        ),
        (
            {"latent_cache": torch.zeros(36, 24)},
            r"latent_cache must be torch.float32 \[num_pages, 4, 24\] on cpu, got torch.float32 \[36, 24\]",
        ),
        ({"latent_cache": torch.zeros(())}, r"latent_cache must be torch.float32 \[num_pages, 4, 24\]"),
        ({"latent_cache": torch.zeros(9, 4, 24).half()}, "got torch.float16"),
        ({"out": torch.zeros(2, 2, 8)}, r"out must be torch.float32 \[2, 2, 16\]"),
        ({"out": torch.zeros(1, 2, 16).expand(2, 2, 16)}, r"out is expanded.*\(0, 16, 1\)"),
        ({"lse": torch.zeros(2, 2, dtype=torch.float64)}, r"lse must be torch.float32 \[2, 2\]"),
        ({"lse": torch.zeros(1, 2).expand(2, 2)}, "lse is expanded, so that its elements share memory"),
    ],
)
def test_run_refuses(changes, message):
    problem = paged_problem([9, 3])
    decode = decoder()
    tensors = {name: getattr(problem, name) for name in ("q_nope", "q_rope", "latent_cache")}
    with pytest.raises(InvalidInputError, match=message):
        decode.run(plan=decode.plan(problem.batch), softmax_scale=1.0, **tensors | changes)


def launch(*arguments, **options):
    raise AssertionError("launched")


UNCHECKED = types.SimpleNamespace(plan=lambda batch: DecodePlan(batch, None), run=launch)
"""In place of an implementation: kernels check less than plain torch does."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_cache": None}, "latent_cache must be a torch.Tensor, got NoneType"),
        ({"kv_scale": torch.zeros(1)}, "kv_scale must be finite and greater than 0, got 0.0"),
        ({"kv_scale": 1.0}, r"kv_scale must be .* got 1.0: pass torch.tensor\(\[1.0\], device='cpu'\)"),
        ({"kv_scale": torch.ones(1).bfloat16()}, r"kv_scale must be torch.float32 .* got torch.bfloat16"),
        ({"kv_scale": torch.ones(1, device="meta")}, r"kv_scale must be torch.float32 .* on meta"),
        (
            {"latent_cache": torch.zeros(9, 4, 24, dtype=torch.uint8)},
            r"got torch.uint8: pass latent_cache.view\(torch.float8_e4m3fn\)",
        ),
    ],
)
def test_run_refuses_an_e4m3_cache_that(changes, message):
    problem = paged_problem([9, 3])
    decode = decoder(kv_dtype="fp8_e4m3")
    decode._implementation = UNCHECKED
    tensors = {"q_nope": problem.q_nope, "q_rope": problem.q_rope, "kv_scale": torch.ones(1)}
    tensors["latent_cache"] = problem.latent_cache.to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match=message):
        decode.run(plan=decode.plan(problem.batch), softmax_scale=1.0, **tensors | changes)


def test_the_cpu_may_have_an_index():
    problem = paged_problem([9, 3])
    tensors = problem.q_nope, problem.q_rope, problem.latent_cache
    decode = decoder(device="cpu:0")
    actual = decode.run(*tensors, decode.plan(problem.batch), problem.scale)
    assert_attention_close(actual, problem.expected(), torch.float32)


def test_run_refuses_a_plan_that_another_has_replaced():
    problem, other = paged_problem([9, 3]), paged_problem([2, 5])
    decode = decoder()
    tensors = problem.q_nope, problem.q_rope, problem.latent_cache
    with pytest.raises(InvalidInputError, match="this plan is not the decoder's last one"):
        decode.run(*tensors, None, problem.scale)
    stale, current = decode.plan(problem.batch), decode.plan(other.batch)
    assert decode.current_plan is current
    with pytest.raises(InvalidInputError, match="this plan is not the decoder's last one"):
        decode.run(*tensors, stale, problem.scale)
    with pytest.raises(InvalidInputError, match="this plan is not the decoder's last one"):
        decoder().run(*tensors, current, problem.scale)
    replanned = decode.plan(problem.batch)
    assert_attention_close(decode.run(*tensors, replanned, problem.scale), problem.expected(), torch.float32)


def test_run_refuses_a_plan_when_planning_failed_since():
    problem = paged_problem([9, 3])
    decode = decoder()
    plan = decode.plan(problem.batch)
    with pytest.raises(InvalidInputError, match="the table holds"):
        decode.plan(dataclasses.replace(problem.batch, seq_lens=problem.batch.seq_lens + 1000))
    with pytest.raises(InvalidInputError, match="this plan is not the decoder's last one"):
        decode.run(problem.q_nope, problem.q_rope, problem.latent_cache, plan, problem.scale)


@pytest.mark.parametrize("scale", [0.0, -0.1, math.nan, math.inf, None, "a", 1j, True, torch.tensor(0.1)])
def test_run_refuses_scales_that_are_not_positive_and_finite(scale):
    problem = paged_problem([9, 3])
    decode = decoder()
    plan = decode.plan(problem.batch)
    with pytest.raises(InvalidInputError, match="softmax_scale must be a number, finite and greater"):
        decode.run(problem.q_nope, problem.q_rope, problem.latent_cache, plan, scale)


@pytest.mark.parametrize("tokens", [1, 3])
def test_run_refuses_another_number_of_uniform_query_tokens(tokens):
    problem = paged_problem([9, 3])
    decode = decoder()
    plan = decode.plan(dataclasses.replace(problem.batch, query_start_loc=None))
    q_nope, q_rope = torch.zeros(tokens, 2, 16), torch.zeros(tokens, 2, 8)
    with pytest.raises(InvalidInputError, match=r"\[tokens, 2, 16\] on cpu, got torch.float32 \[\d, 16\]"):
        decode.run(q_nope[:, 0], q_rope, problem.latent_cache, plan, 1.0)
    with pytest.raises(
        InvalidInputError, match=f"q_nope has {tokens} tokens, the plan is for 2: 2 requests with 1"
    ):
        decode.run(q_nope, q_rope, problem.latent_cache, plan, problem.scale)


@DEVICES
def test_tokens_behind_the_batch_are_not_written(device, kernel_dtype):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_heads": 16}
    problem = paged_problem([9, 0, 70], [1, 2, 3], dtype=kernel_dtype, device=device, **sizes)
    decode = decoder(dtype=kernel_dtype, device=device, max_query_len=3, **sizes)
    used, padding = 6, 3
    q_nope, q_rope = (
        torch.cat([q, torch.full_like(q[:padding], math.nan)]) for q in (problem.q_nope, problem.q_rope)
    )
    out = torch.full((used + padding, 16, 512), 7.0, dtype=kernel_dtype, device=device)
    lse = torch.full((used + padding, 16), 7.0, device=device)
    decode.run(
        q_nope, q_rope, problem.latent_cache, decode.plan(problem.batch), problem.scale, out=out, lse=lse
    )
    assert_attention_close((out[:used], lse[:used]), problem.expected(), kernel_dtype)
    assert (out[used:] == 7).all() and (lse[used:] == 7).all()


@DEVICES
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("num_heads", [16, 64])
def test_a_cache_without_pages_is_a_batch_without_work(device, kernel_dtype, num_heads, page_size):
    """Of requests without keys, as the first step of a server whose cache is not there yet."""
    decode = decoder(
        dtype=kernel_dtype,
        device=device,
        page_size=page_size,
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    lengths, table = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in (3, (3, 0)))
    plan = decode.plan(DecodeBatch(lengths, table, page_size, query_start_loc=None, max_query_len=1))
    q = torch.ones(3, num_heads, 576, dtype=kernel_dtype, device=device)
    cache = torch.empty(0, page_size, 576, dtype=kernel_dtype, device=device)
    out, lse = decode.run(q[..., :512], q[..., 512:], cache, plan, 1.0)
    assert (out == 0).all() and (lse == -math.inf).all()


@DEVICES
def test_a_cache_of_one_page_may_have_any_stride(device, kernel_dtype):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_heads": 16, "page_size": 8}
    problem = paged_problem([7], dtype=kernel_dtype, device=device, **sizes)
    page = problem.latent_cache[int(problem.batch.table[0, 0]) :][:1]
    cache = page.as_strided(page.shape, (3, 576, 1), page.storage_offset())
    decode = decoder(dtype=kernel_dtype, device=device, **sizes)
    plan = decode.plan(dataclasses.replace(problem.batch, table=torch.zeros_like(problem.batch.table)))
    actual = decode.run(problem.q_nope, problem.q_rope, cache, plan, problem.scale)
    assert_attention_close(actual, problem.expected(), kernel_dtype)
