"""The prefill kernel on a GPU, against fp64, within 163 KB and within 99 KB of shared memory."""

import random
from functools import partial

import pytest
import torch

from mla_backend import prefill
from mla_backend import prefill_libraries as libraries
from mla_backend.kernels import prefill as kernels
from mla_backend.torch_attention import merge_states
from tests.support.prefill_cases import PrefillCase

pytestmark = pytest.mark.gpu

SIZES = pytest.mark.parametrize("within_99k", [False, True], ids=["163k", "99k"])
DIMENSIONS = [(192, 128), (96, 64), (128, 128), (256, 256), (320, 320), (512, 512), (576, 512), (576, 576)]
DIMENSIONS += [(768, 768), (1024, 1024)]


def attend(case, within_99k, causal):
    return kernels.attend(*case.arguments, causal, within_99k=within_99k)


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("d_qk, d_v", DIMENSIONS)
def test_ragged_requests(d_qk, d_v, dtype, within_99k):
    for causal in (True, False):
        lens = [0, 1, 1, 20, 300, 129], [3, 0, 1, 9, 700, 64]
        case = PrefillCase(*lens, d_qk, d_v, heads=4, kv_heads=2, dtype=dtype, device="cuda")
        case.check(partial(attend, case, within_99k), causal)


@SIZES
@pytest.mark.parametrize("seed", range(12))
def test_random_geometry(seed, within_99k):
    draw = random.Random(seed)
    d_qk, d_v = (8 * draw.randint(1, draw.choice([24, 128])) for _ in range(2))
    requests, group = draw.choice([1, 3, 20]), draw.choice([1, 4])
    query_lens = [draw.choice([0, 1, draw.randint(1, 600)]) for _ in range(requests)] + [1]
    kv_lens = [draw.choice([0, 1, draw.randint(1, 2000)]) for _ in range(requests)] + [1]
    heads = group * draw.choice([1, 3])
    case = PrefillCase(
        query_lens, kv_lens, d_qk, d_v, heads=heads, kv_heads=heads // group, device="cuda", seed=seed
    )
    case.check(partial(attend, case, within_99k), draw.random() < 0.7)


@SIZES
def test_a_request_does_not_depend_on_its_batch(within_99k):
    lens = [200, 65, 1], [500, 65, 300]
    together = PrefillCase(*lens, 192, 128, device="cuda")
    out, lse = attend(together, within_99k, True)
    alone = PrefillCase([65], [65], 192, 128, device="cuda")
    alone.q, alone.k, alone.v = together.q[200:265], together.k[500:565], together.v[500:565]
    parts = attend(alone, within_99k, True)
    assert torch.equal(parts[0], out[200:265]) and torch.equal(parts[1], lse[200:265])


def test_merging_in_one_launch():
    generator = torch.Generator("cuda").manual_seed(0)
    outs = [torch.randn(99, 16, 128, device="cuda", generator=generator).bfloat16() for _ in range(2)]
    lses = [torch.randn(16, 99, device="cuda", generator=generator).mul(4).T for _ in range(2)]
    lses[1] = lses[1].contiguous()
    for side, empty in enumerate(([0, 1], [1, 2, 3])):
        outs[side][empty], lses[side][empty] = float("nan"), -float("inf")
    out, lse = prefill.merge_states(outs[0], lses[0], outs[1], lses[1])
    expected, expected_lse = merge_states(outs[0].double(), lses[0], outs[1].double(), lses[1])
    # Where both sides nearly cancel, the rounding of their weights is left.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_flashinfer_plans_once_per_offsets():
    """FlashInfer gives what fp64 gives, lse included, also for a second set of offsets."""
    pytest.importorskip("flashinfer")
    library, plans = libraries.FlashInfer(torch.device("cuda"), "fa3"), {}
    for seed, lens in enumerate((([5, 300], [5, 700]), ([7, 100], [90, 100]))):
        case = PrefillCase(*lens, 192, 128, heads=16, device="cuda", seed=seed)
        for causal in (True, False, True):
            case.check(partial(_with_flashinfer, library, case, plans), causal)


def _with_flashinfer(library, case, plans, causal):
    tensors = [x.contiguous() for x in (case.q, case.k, case.v)]
    return library.attend(libraries.Call(*tensors, *case.arguments[3:], causal), plans)


@pytest.mark.parametrize("tokens", [2048, 2049, 3000, 6000])
@pytest.mark.parametrize("d_qk, d_v", [(192, 128), (256, 256), (160, 96), (96, 64)])
def test_one_long_request_by_cudnn(d_qk, d_v, tokens):
    """With NaN behind the request, and the lse that merging needs."""
    if torch.cuda.get_device_capability() != (9, 0) or not libraries.cudnn_serves(d_qk, d_v):
        pytest.skip("cuDNN is asked on Hopper, from 9.10 on")
    case = PrefillCase([tokens], [tokens], d_qk, d_v, heads=2, device="cuda")
    arguments = (case.q, case.k, case.v, case.starts_q, case.starts_q, tokens, tokens, case.scale)
    assert libraries.is_alone(libraries.Call(*arguments, True))
    case.check(lambda causal: libraries.by_cudnn(libraries.Call(*arguments, causal)), True)


def test_cudnn_is_prepared():
    if torch.cuda.get_device_capability() != (9, 0) or not libraries.cudnn_serves(160, 96):
        pytest.skip("cuDNN is asked on Hopper, from 9.10 on")
    assert "cuDNN for one long request" in prefill.prepare("cuda", torch.bfloat16, 160, 96)
