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
