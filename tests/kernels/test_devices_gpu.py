"""Threads that have not used CUDA yet, and GPUs that are not the current one."""

import threading

import pytest
import torch

from mla_backend import MLADecoder, RotaryAppend
from mla_backend.device import is_captured
from tests.support.cases import decoder_for, make_case, relative_error

pytestmark = pytest.mark.gpu

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TOLERANCE = 2.5e-3  # of bf16


def decode_on(device: str, implementation: str):
    """A case on a device, and a function that plans and runs it."""
    case = make_case([9000, 40, 333], [1] * 3, num_heads=16, page_size=64, device=device)
    decoder = decoder_for(case, implementation=implementation)

    def decode():
        plan = decoder.plan(case.batch)
        return decoder.run(case.q_nope, case.q_rope, case.cache, plan, case.scale)[0]

    return case, decode


def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_that_has_not_used_cuda(implementation):
    case, decode = decode_on("cuda", implementation)
    torch.cuda.synchronize()
    out = in_a_new_thread(decode)
    assert relative_error(out, case.expected()[0]) <= TOLERANCE


@TWO_GPUS
@pytest.mark.parametrize("side_stream", [False, True])
def test_another_gpu_is_current(implementation, side_stream):
    case, decode = decode_on("cuda:1", implementation)
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device("cuda:1"), torch.cuda.stream(stream if side_stream else None):
        torch.cuda.set_device(0)
        out = decode()
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize("cuda:1")
    assert out.device == torch.device("cuda:1")
    assert relative_error(out, case.expected()[0]) <= TOLERANCE
    out = in_a_new_thread(decode)  # where cuda:0 will be current, and has no context yet
    torch.cuda.synchronize("cuda:1")
    assert relative_error(out, case.expected()[0]) <= TOLERANCE


@TWO_GPUS
def test_append_on_another_gpu():
    append = RotaryAppend(torch.bfloat16, "cuda:1")
    generator = torch.Generator("cuda:1").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device="cuda:1").bfloat16()

    q_rope, kv_c, k_rope = random(5, 16, 64), random(5, 512), random(5, 64)
    cache = torch.full((2, 64, 576), float("nan"), device="cuda:1", dtype=torch.bfloat16)
    slots = torch.arange(100, 105, device="cuda:1")
    no_rotation = torch.cat([torch.ones(8, 32), torch.zeros(8, 32)], dim=1).to("cuda:1")
    before = q_rope.clone()
    torch.cuda.set_device(0)
    append(
        q_rope, kv_c, k_rope, cache, slots, torch.arange(5, device="cuda:1"), no_rotation, interleaved=True
    )
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(q_rope, before)
    assert torch.equal(cache.flatten(0, 1)[slots], torch.cat([kv_c, k_rope], dim=1))


@TWO_GPUS
def test_a_graph_is_that_of_its_own_gpu():
    with torch.cuda.device("cuda:1"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda:1")
        torch.cuda.set_device(0)
        captured = [is_captured(torch.device("cuda", index)) for index in range(2)]
        torch.cuda.set_device(1)
    assert captured == [False, True]


@TWO_GPUS
def test_an_unnumbered_device_is_the_current_one():
    with torch.cuda.device("cuda:1"):
        decoder = MLADecoder(
            num_heads=16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            dtype=torch.bfloat16,
            page_size=64,
            device="cuda",
            max_batch=1,
        )
    assert decoder.spec.device == torch.device("cuda:1")
