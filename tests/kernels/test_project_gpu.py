"""The kernels that absorb queries and expand outputs, on a GPU, against fp64; in a graph too."""

import pytest
import torch

from mla_backend import AbsorbedWeights, MLAGeometry
from mla_backend.kernels import Projections, project

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def make(dtype, dimensions, heads=16):
    d_nope, d_c, d_v = dimensions
    geometry = MLAGeometry(
        num_heads=heads,
        kv_lora_rank=d_c,
        qk_nope_head_dim=d_nope,
        qk_rope_head_dim=64,
        v_head_dim=d_v,
        softmax_scale=1.0,
        hidden_size=256,
    )
    weight = torch.randn(heads * (d_nope + d_v), d_c, device="cuda", dtype=dtype)
    return AbsorbedWeights.from_kv_b_proj(weight, geometry)


def relative_error(actual, x, w):
    expected = torch.einsum("thi,hio->tho", x.double(), w.double())
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dimensions", project.DIMENSIONS, ids=str)
def test_products(dtype, dimensions):
    weights = make(dtype, dimensions)
    projections = Projections.of(weights)
    assert isinstance(projections, Projections)
    d_nope, d_c, d_v = dimensions
    for tokens in (1, 5, 16, 17, 32, 33, 64, 65):
        q = torch.full((tokens + 1, 16, d_nope + 64), float("nan"), device="cuda", dtype=dtype)
        q[:tokens, :, :d_nope] = torch.randn(tokens, 16, d_nope)
        q_nope = q[:tokens, :, :d_nope]
        q_latent = projections.absorb_query(q_nope)
        assert relative_error(q_latent, q_nope, weights.w_uk) < TOLERANCE[dtype]
        out = torch.full((tokens + 1, 16, d_v), float("nan"), device="cuda", dtype=dtype)
        projections.project_output(q_latent, out[:tokens])
        assert relative_error(out[:tokens], q_latent, weights.w_uv) < TOLERANCE[dtype]
        assert out[tokens:].isnan().all()


def test_a_graph_of_both_follows_its_input():
    """Launches overlap there: each product waits for what it reads, and new weights are seen."""
    weights = make(torch.bfloat16, project.DIMENSIONS[0])
    projections = Projections.of(weights)
    q = torch.randn(64, 16, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def step():
        scaled = q * 2
        latent = projections.absorb_query(scaled)
        projections.project_output(latent, out)
        return scaled, latent

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled, latent = step()
    for _ in range(20):
        q.copy_(torch.randn_like(q))
        weights.w_uk.copy_(torch.randn_like(weights.w_uk))
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(latent, scaled, weights.w_uk) < TOLERANCE[torch.bfloat16]
        assert relative_error(out, latent, weights.w_uv) < TOLERANCE[torch.bfloat16]


def test_new_latents_are_appended():
    """By the same launch: rows of wider tensors, padding, more slots than query tokens."""
    weights = make(torch.bfloat16, project.DIMENSIONS[0])
    projections = Projections.of(weights)
    q = torch.randn(40, 16, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(64, 576 + 8, device="cuda", dtype=torch.bfloat16)
    latent, rope = new[:, :512], new[:, 520:]
    slots = torch.randperm(8 * 64, device="cuda")[:64]
    slots[40::2] = -1
    latent_cache = torch.full((8, 64, 576), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert projections.can_append(40, latent, rope, slots)
    assert not projections.can_append(40, latent, new[:, 513:577], slots)
    q_latent = projections.absorb_and_append(q, latent, rope, slots, latent_cache)
    assert relative_error(q_latent, q, weights.w_uk) < TOLERANCE[torch.bfloat16]
    expected = torch.full_like(latent_cache, float("nan"))
    expected.view(-1, 576)[slots[slots >= 0]] = torch.cat([latent, rope], 1)[slots >= 0]
    torch.testing.assert_close(latent_cache, expected, rtol=0, atol=0, equal_nan=True)
