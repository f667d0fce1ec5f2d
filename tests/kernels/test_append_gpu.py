"""The append kernel, on a GPU: against fp64, and with decode behind it."""

import random

import pytest
import torch

from mla_backend import MLADecoder, RotaryAppend, cache
from mla_backend.batch import DecodeBatch
from mla_backend.cache_format import Scale, cache_format, dequantize
from tests.support.appends import check_appended_extremes, check_rotary_append
from tests.support.launches import assert_overlap_changes_nothing

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


KV_DTYPES = pytest.mark.parametrize(
    "kv_dtype", [None, torch.float8_e4m3fn, "fp8_ds_mla"], ids=["16_bits", "fp8_e4m3", "fp8_ds_mla"]
)


@DTYPES
@KV_DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_append(seed, interleaved, kv_dtype, dtype):
    append = RotaryAppend(dtype, "cuda")
    assert append.has_kernel
    draw = random.Random(seed)
    check_rotary_append(
        append,
        draw,
        tokens=draw.choice([1, 3, 64, 5000]),
        num_heads=draw.choice([1, 16, 20, 128]),
        dtype=dtype,
        interleaved=interleaved,
        device="cuda",
        kv_dtype=kv_dtype,
    )


def test_a_launch_without_checks_does_the_same():
    torch.manual_seed(0)
    append, like = RotaryAppend(torch.bfloat16, "cuda"), {"dtype": torch.bfloat16, "device": "cuda"}
    queries, kv = torch.randn(7, 16, 192, **like), torch.randn(7, 576, **like)
    slots, positions = torch.randperm(256, device="cuda")[:7], torch.arange(7, device="cuda")
    cos_sin, weight = torch.randn(7, 64, device="cuda"), torch.randn(512, **like)
    results = []
    for check in (True, False):
        latent_cache, q = torch.zeros(4, 64, 576, **like), queries.clone()
        outs = {"kv_c_out": torch.empty(7, 512, **like), "k_rope_out": torch.empty(7, 64, **like)}
        append(
            q[..., 128:], kv[:, :512], kv[:, 512:], latent_cache, slots, positions, cos_sin,
            interleaved=True, norm_weight=weight, norm_eps=1e-6, check=check, **outs,
        )  # fmt: skip
        results.append((latent_cache, q, *outs.values()))
    assert all(map(torch.equal, *results))
    assert not torch.equal(q, queries) and latent_cache.any(dim=2).sum() == 7


@DTYPES
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, "fp8_ds_mla"], ids=["fp8_e4m3", "fp8_ds_mla"])
def test_extremes_in_8_bits(dtype, kv_dtype):
    check_appended_extremes(RotaryAppend(dtype, "cuda"), dtype, kv_dtype, "cuda")


@pytest.mark.parametrize("page_size", [64, 1])
@pytest.mark.parametrize("captured", [False, True])
def test_decode_behind_it_reads_what_it_wrote(captured, page_size, implementation):
    """Layers in a row on one stream: each launch reads what the one before has just written."""
    torch.manual_seed(0)
    batch_size, heads, layers, length = 33, 16, 6, 700
    pages = -(-length // page_size)
    table = torch.randperm(batch_size * pages, device="cuda").view(batch_size, pages).int()
    seq_lens = torch.full((batch_size,), length, dtype=torch.int32, device="cuda")
    batch = DecodeBatch(seq_lens, table, page_size, query_start_loc=None, max_query_len=1)
    decoder = MLADecoder(
        num_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16, page_size=page_size,
        device="cuda", max_batch=batch_size, implementation=implementation,
    )  # fmt: skip
    append = RotaryAppend(torch.bfloat16, "cuda")
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    caches = torch.randn(layers, batch_size * pages, page_size, 576, **like)
    kv = torch.randn(layers, batch_size, 576, **like)
    first = torch.randn(batch_size, heads, 512, **like)
    queries = torch.empty_like(first)
    cos_sin = torch.randn(length, 64, device="cuda")
    positions = seq_lens.long() - 1
    last = length - 1
    slots = table[:, last // page_size].long() * page_size + last % page_size
    results = torch.empty(layers, batch_size, heads, 512, **like)

    def all_layers(pause=lambda: None):
        results.fill_(float("nan"))
        queries.copy_(first)
        caches.flatten(1, 2).index_fill_(1, slots, float("nan"))
        q_nope, plan = queries, decoder.plan(batch)
        for layer, out in enumerate(results):
            q_rope = q_nope[..., :64]  # of the output before: rotated right behind the kernel that writes it
            pause()
            append(
                q_rope, kv[layer, :, :512], kv[layer, :, 512:], caches[layer], slots, positions, cos_sin,
                interleaved=True,
            )  # fmt: skip
            pause()
            decoder.run(q_nope, q_rope, caches[layer], plan, 0.04, out=out)
            q_nope = out

    assert_overlap_changes_nothing(all_layers, results, captured=captured)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla"])
def test_the_plain_append_writes_the_rows_that_the_cpu_writes(kv_dtype):
    """And in one launch behind the conversion, which writes nothing if there is no slot."""
    assert cache.scatters_in_one_launch(torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(0)
    kv_format = cache_format(kv_dtype)
    dtype = torch.float32 if kv_dtype is torch.float32 else torch.bfloat16
    kv = torch.randn(6, 576).to(dtype)
    expected = torch.zeros(5, 4, kv_format.row_width(512, 64) * kv_format.storage.itemsize, dtype=torch.uint8)
    expected = expected.view(kv_format.storage)
    scale = torch.tensor([0.3]) if kv_format.takes_scale else None
    written = expected.cuda()
    for slots in ([7, -1, 19, -1, 0, 2], [-1] * 6):
        slots = torch.tensor(slots)
        cache.append(expected, kv[:, :512], kv[:, 512:], slots, scale)
        on_device = kv.cuda()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            cache.append(
                written, on_device[:, :512], on_device[:, 512:], slots.cuda(), scale and scale.cuda()
            )
            torch.cuda.synchronize()
        on_cpu = written.cpu()
        if kv_format.scale is Scale.GROUP:  # a GPU may divide by a scale of another last bit
            values = [
                dequantize(rows.view(-1, rows.shape[-1]), dtype=torch.float64) for rows in (on_cpu, expected)
            ]
            torch.testing.assert_close(*values, rtol=2**-3, atol=1e-4)
        else:
            assert torch.equal(on_cpu.view(torch.uint8), expected.view(torch.uint8))
        names = [event.key for event in profile.key_averages()]
        assert any("scatter_rows_kernel" in name for name in names)
        assert not any("index" in name for name in names), names
