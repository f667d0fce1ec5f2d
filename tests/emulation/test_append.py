"""The append kernel, run on the CPU, against fp64."""

import ctypes
import mmap
import os
import random
from dataclasses import replace

import pytest
import torch

from mla_backend.cache_format import CacheFormat, Scale, format_of, quantize
from mla_backend.kernels import append as append_kernel
from tests.support.appends import check_appended_extremes, check_rotary_append
from tests.support.seeds import seeds


def rotary_append(module, dtype):
    """Called as a `RotaryAppend`."""

    def append(*tensors, interleaved, norm_weight, norm_eps, kv_scale, kv_c_out=None, k_rope_out=None):
        call = getattr(module, append_kernel.function_name(dtype, format_of(tensors[3])))
        call(*tensors, interleaved, norm_weight, norm_eps or 0.0, kv_scale, kv_c_out, k_rope_out)

    return append


def check(module, seed, interleaved=True, dtype=torch.bfloat16, kv_dtype=None):
    draw = random.Random(seed)
    check_rotary_append(
        rotary_append(module, dtype),
        draw,
        tokens=draw.choice([1, 2, 7]),
        num_heads=draw.choice([1, 5, 16, 40]),
        dtype=dtype,
        interleaved=interleaved,
        device="cpu",
        kv_dtype=kv_dtype,
    )


@pytest.fixture(scope="module")
def module(modules):
    return modules(append_kernel.variant("90a"))


@pytest.mark.smoke(seed=seeds(1))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", seeds(4))
def test_append(module, seed, interleaved, dtype):
    check(module, seed, interleaved, dtype)


def test_cache_beyond_2_31_elements(module):
    """Nothing touches the elements between the new tokens, which therefore cost no memory."""
    pages, page_size = 61000, 64
    cache = torch.empty(pages, page_size, 576, dtype=torch.bfloat16)
    slots = torch.tensor([pages * page_size - 1, (pages - 1) * page_size - 6, 5])
    q_rope, latents, rope = (torch.randn(3, *row).bfloat16() for row in ((2, 64), (512,), (64,)))
    positions = torch.zeros(3, dtype=torch.int64)
    no_angle = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], dim=1)  # cosines and sines
    module.bf16_cache(q_rope, latents, rope, cache, slots, positions, no_angle, True, None, 0.0, *[None] * 3)
    assert torch.equal(cache.view(-1, 576)[slots], torch.cat([latents, rope], dim=1))


@pytest.mark.parametrize("group", [32, 64])
def test_another_format_is_a_row_of_the_table(modules, monkeypatch, group):
    dtypes = torch.uint8, torch.float8_e4m3fn, torch.bfloat16
    kv_format = CacheFormat("groups", *dtypes, Scale.GROUP, group, dimensions=(256, 32), short="groups")
    monkeypatch.setattr(append_kernel, "FORMATS", (kv_format,))
    module = modules(replace(append_kernel.variant("90a"), name=f"append-groups{group}"))
    torch.manual_seed(group)
    kv_c, k_rope = torch.randn(3, 256).bfloat16(), torch.randn(3, 32).bfloat16()
    expected = quantize(kv_format, kv_c, k_rope)
    assert expected.shape[1] == 256 + 256 // group * 4 + 64
    latents, scales, rope = kv_format.split(expected)
    values = latents.float().unflatten(1, (-1, group)) * scales[:, :, None]
    torch.testing.assert_close(values.flatten(1), kv_c.float(), rtol=1 / 16, atol=1e-2)
    assert torch.equal(rope, k_rope)

    slots, positions = torch.tensor([5, 0, 3]), torch.zeros(3, dtype=torch.int64)
    no_angle = torch.cat([torch.ones(1, 16), torch.zeros(1, 16)], dim=1)  # cosines and sines
    cache, q_rope = torch.zeros(3, 2, expected.shape[1], dtype=torch.uint8), torch.randn(3, 2, 32).bfloat16()
    module.bf16_groups(q_rope, kv_c, k_rope, cache, slots, positions, no_angle, True, None, 0.0, *[None] * 3)
    assert torch.equal(cache.flatten(0, 1)[slots], expected)


KV_DTYPES = pytest.mark.parametrize(
    "kv_dtype", [torch.float8_e4m3fn, "fp8_ds_mla"], ids=["fp8_e4m3", "fp8_ds_mla"]
)


@pytest.mark.smoke(seed=seeds(1))
@KV_DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", seeds(3))
def test_append_in_8_bits(module, seed, interleaved, kv_dtype):
    check(module, seed, interleaved, kv_dtype=kv_dtype)


@KV_DTYPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_extremes_in_8_bits(module, dtype, kv_dtype):
    check_appended_extremes(rotary_append(module, dtype), dtype, kv_dtype, "cpu")


@pytest.mark.parametrize("slots_in", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [576, 656, 24, 7])
@pytest.mark.parametrize("gap", [0, 3])
def test_rows_go_to_their_slots(module, gap, width, slots_in):
    """Also rows that are not aligned to 16 bytes; those without a slot of the cache go nowhere."""
    pages, page_size = 5, 3
    storage = torch.zeros(pages, page_size + gap, width, dtype=torch.uint8)
    rows = torch.randint(1, 256, (6, width + gap), dtype=torch.uint8)[:, :width]
    slots = torch.tensor([4, -1, 14, 15, 0, -(2**31)], dtype=slots_in)
    module.scatter_rows(rows, storage[:, :page_size], slots)
    for token, slot in ((0, 4), (2, 14), (4, 0)):
        place = storage[slot // page_size, slot % page_size]
        assert torch.equal(place, rows[token])
        place.zero_()
    assert not storage.any()


def test_without_slots_nothing_is_written(module):
    """Not even what is there already, which may change meanwhile: the cache cannot be written here."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    cache = torch.frombuffer(memory, dtype=torch.uint8)[: 4 * 576].view(2, 2, 576)
    rows, slots = torch.zeros(3, 576, dtype=torch.uint8), torch.tensor([-1, 4, -7])
    module.scatter_rows(rows, cache, slots)  # builds the kernel
    child = os.fork()
    if not child:
        status = 1
        try:
            libc = ctypes.CDLL(None)
            address, size = ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(len(memory))
            assert libc.mprotect(address, size, ctypes.c_int(mmap.PROT_READ)) == 0
            module.scatter_rows(rows, cache, slots)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
