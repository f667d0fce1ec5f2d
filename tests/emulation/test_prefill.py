"""The prefill kernel and the merging of states, run on the CPU, against fp64."""

import random

import pytest
import torch

from mla_backend.kernels import merge
from mla_backend.kernels.base import ELEMENT_NAMES
from mla_backend.kernels.prefill import prefill_config
from mla_backend.torch_attention import merge_states
from tests.emulation.emulator import sources
from tests.support.prefill_cases import PrefillCase
from tests.support.seeds import seeds

# One for each way to divide the work among warps, within 163 KB and within 99 KB.
KERNELS = [
    (192, 128, False),
    (256, 256, False),
    (256, 128, True),
    (320, 320, False),
    (576, 512, True),
    (576, 576, True),
    (1024, 1024, True),
]


def variant(d_qk, d_v, small, dtype=torch.bfloat16):
    return prefill_config(dtype, d_qk, d_v, "80", small).variant()


@pytest.mark.smoke(d_qk=192)
@pytest.mark.smoke(d_qk=576, d_v=512)
@pytest.mark.parametrize("d_qk, d_v, small", KERNELS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_ragged_requests(modules, d_qk, d_v, small, causal):
    """No tokens or no keys, single ones, fewer keys than queries, several query blocks and tiles."""
    case = PrefillCase([0, 1, 1, 20, 70], [3, 0, 1, 9, 140], d_qk, d_v, heads=1)
    module = modules(variant(d_qk, d_v, small))
    case.check(lambda causal: case.run(module, causal), causal)


@pytest.mark.parametrize("seed", seeds(2))
def test_random_dimensions(modules, seed):
    draw = random.Random(seed)
    d_qk, d_v = (8 * draw.randint(1, 40) for _ in range(2))
    query_lens = [draw.randint(0, 40) for _ in range(3)]
    kv_lens = [draw.randint(0, 100) for _ in range(3)]
    dtype = draw.choice([torch.bfloat16, torch.float16])
    case = PrefillCase([1, *query_lens], [2, *kv_lens], d_qk, d_v, dtype=dtype, seed=seed)
    module = modules(variant(d_qk, d_v, draw.random() < 0.5, dtype))
    case.check(lambda causal: case.run(module, causal), draw.random() < 0.7)


@pytest.mark.parametrize("tensor, earlier", [("q", 24), ("k", 139), ("v", 139)], ids=["q", "k", "v"])
def test_tokens_beyond_2_31_elements(modules, tensor, earlier):
    """Those of the second request. Nothing touches the memory between tokens, which therefore costs none."""
    case = PrefillCase([24, 3], [139, 10], 96, 64, heads=1)
    tokens = getattr(case, tensor)
    step = (2**31 // earlier // 64 + 1) * 64
    memory = torch.empty(step * len(tokens), dtype=tokens.dtype)
    setattr(case, tensor, memory.as_strided(tokens.shape, (step, tokens.shape[2], 1)).copy_(tokens))
    case.check(lambda causal: case.run(modules(variant(96, 64, False)), causal), True)


def test_more_ctas_than_a_launch_may_have(modules, capfd):
    case = PrefillCase([1], [1], 192, 128, heads=128)
    case.max_q = 2**31 - 1
    with pytest.raises(AssertionError):
        case.run(modules(variant(192, 128, False)), True)
    assert "need 2147483648 CTAs, more than" in capfd.readouterr().err


@pytest.mark.parametrize("d, kv_heads, head_group", [(96, 1, 1), (96, 2, 3), (96, 4, 4), (256, 2, 1)])
def test_heads_share_keys(modules, d, kv_heads, head_group):
    """Every head of every block is computed once, whatever the order."""
    case = PrefillCase([150, 3], [250, 40], d, d, heads=4, kv_heads=kv_heads)
    module = modules(variant(d, d, False))
    case.check(lambda causal: case.run(module, causal, head_group), True)


@pytest.mark.parametrize("d_qk, d_v, small", [(192, 128, False), (576, 512, True)])
def test_large_scores(modules, d_qk, d_v, small):
    """Scores far apart: the running maximum moves by more than any bound, and most probabilities vanish."""
    case = PrefillCase([40], [300], d_qk, d_v, heads=1, scale=10.0)
    module = modules(variant(d_qk, d_v, small))
    case.check(lambda causal: case.run(module, causal), True)


@pytest.mark.faults
@pytest.mark.parametrize(
    "file, before, after",
    [
        ("config.cuh", "first_row + row + 1)", "first_row + row)"),
        ("loader.cuh", "exists = first_row + row < rows &&", "exists ="),
    ],
    ids=["a key less is seen", "what lies behind a request is read"],
)
def test_faults_are_seen(modules, tmp_path, file, before, after):
    root = sources(tmp_path / "csrc", [(f"prefill/{file}", before, after)])
    module = modules(variant(96, 64, False), root)
    case = PrefillCase([5, 40], [5, 150], 96, 64, heads=1, scale=1.0)
    with pytest.raises(AssertionError):
        case.check(lambda causal: case.run(module, causal), True)


def test_nan_is_no_lack_of_keys(modules):
    """A NaN in a key of the context shows in what is merged of context and new tokens."""
    case = PrefillCase([5], [40], 96, 64, heads=2, scale=0.1)
    case.k[20, 1, 3] = float("nan")
    out, lse = case.run(modules(variant(96, 64, False)), causal=False)
    assert lse[:, 1].isnan().all() and lse[:, 0].isfinite().all()
    states = out, lse, torch.ones_like(out), torch.zeros_like(lse)
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    modules(merge.variant("80")).bf16(*states, merged, merged_lse)
    for of_kernel, of_torch in zip((merged, merged_lse), merge_states(*states), strict=True):
        assert of_kernel[:, 1].isnan().all() and of_torch[:, 1].isnan().all()
        assert of_kernel[:, 0].isfinite().all() and of_torch[:, 0].isfinite().all()


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_merged_states(modules, dtype):
    """Outputs and lse with different strides; sides without keys, whose outputs are NaN."""
    module = modules(merge.variant("80"))
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(9, 3, 40 + 8 * i, generator=generator).to(dtype)[..., :40] for i in range(2)]
    lses = [torch.randn(3, 9, generator=generator).mul(4).T for _ in range(2)]
    side = 0 if dtype is torch.bfloat16 else 1
    lses[side] = lses[side].contiguous()
    for side, empty in enumerate(([0, 1], [1, 2, 3])):
        outs[side][empty], lses[side][empty] = float("nan"), -float("inf")
    out, lse = torch.full((9, 3, 40), float("nan"), dtype=dtype), torch.full((9, 3), float("nan"))
    getattr(module, ELEMENT_NAMES[dtype])(outs[0], lses[0], outs[1], lses[1], out, lse)
    expected, expected_lse = merge_states(outs[0].double(), lses[0], outs[1].double(), lses[1])
    torch.testing.assert_close(
        out.double(), expected, rtol=2**-8 if dtype is torch.bfloat16 else 2**-11, atol=0
    )
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
