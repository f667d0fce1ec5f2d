"""vLLM's tests/v1/attention/test_mla_backends.py on this backend, with parameters of our own. Run by run.py.

Each batch runs twice: absorbed as a whole, and with regular prefill for all but single queries. On the CPU
the CUDA functions that the test harness (not the backend) calls are replaced.
"""
# ruff: noqa: E402, F811, I001  pytest finds fixtures by the names of arguments, and vLLM's tests import vLLM

import inspect
import os
import sys
import types
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import tests.v1.attention.test_mla_backends as upstream
import torch
from tests.conftest import default_vllm_config, dist_init, workspace_init  # noqa: F401
from vllm import _custom_ops
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import mla_backend_vllm
from mla_backend import Policy, cache, counters
from mla_backend_vllm.metadata import MetadataBuilder

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from make_checkpoint import make_checkpoint

mla_backend_vllm.register()

BACKEND = AttentionBackendEnum[mla_backend_vllm.selection_name()]
upstream.BACKENDS_TO_TEST[:] = [BACKEND]
upstream.SPEC_DECODE_BACKENDS[:] = [BACKEND]
ALL_ABSORBED = 1 << 20

if current_platform.is_cpu():

    def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
        cache.append(kv_cache, kv_c, k_pe, slot_mapping)

    # The harness names the device "cpu:0", which is not equal to the device of its own tensors.
    device = torch.device
    cpu_torch = vars(torch) | {"device": lambda name: device(name.split(":")[0])}
    upstream.torch = types.SimpleNamespace(**cpu_torch)
    upstream.DEVICE_TYPE = "cpu"
    _custom_ops.concat_and_cache_mla = concat_and_cache_mla
    # vLLM sets this attribute while it loads a model's weights.
    ColumnParallelLinear.cpu_linear = staticmethod(torch.nn.functional.linear)


@pytest.fixture(autouse=True)
def seed():
    # Upstream seeds only at import, so a test's data would depend on the tests before it.
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with 128 heads. Upstream's tests use a part of them, as tensor parallelism does."""
    path = tmp_path_factory.mktemp("model")
    return str(make_checkpoint(str(path), "--heads", "128", "--layers", "1", "--experts", "0"))


@pytest.fixture(params=[ALL_ABSORBED, 1], ids=["absorbed", "vanilla"])
def threshold(request, monkeypatch):
    monkeypatch.setattr(Policy, "absorbed_query_limit", lambda self: request.param)
    # Upstream reads the threshold from the class, and compares with a reference in the same form.
    monkeypatch.setattr(MetadataBuilder, "reorder_batch_threshold", request.param)
    return request.param


DIMS = {"deepseek": (128, 128), "glm": (192, 256)}  # d_nope, d_v


def call(body, *fixtures, **arguments):
    """Call an upstream test with those of our arguments that this version of it has."""
    known = inspect.signature(body).parameters
    before = counters.snapshot()
    body(*fixtures, **{name: value for name, value in arguments.items() if name in known})
    assert any(count.calls > before[path].calls for path, count in counters.snapshot().items())


@pytest.mark.parametrize(
    "dims, heads, page_size",
    [("deepseek", 16, 16), ("glm", 8, 64), ("deepseek", 128, 64), ("deepseek", 1, 32), ("glm", 128, 16)],
)
@pytest.mark.parametrize("spec", [s for s in upstream.BATCH_SPECS if s != "chunked_context_prefill"])
def test_backend_correctness(
    default_vllm_config,
    dist_init,
    workspace_init,
    monkeypatch,
    model,
    threshold,
    dims,
    spec,
    heads,
    page_size,
):
    query_lens = upstream.BATCH_SPECS[spec].query_lens
    if threshold == 1 and max(query_lens) == 1:
        pytest.skip("a batch of single queries has no regular prefill")
    if current_platform.is_cpu() and heads == 128:
        pytest.skip("takes minutes on a CPU")
    monkeypatch.setitem(upstream.BACKEND_BLOCK_SIZES, BACKEND, page_size)
    call(
        upstream.test_backend_correctness,
        default_vllm_config,
        dist_init,
        workspace_init,
        batch_spec_name=spec,
        model=model,
        tensor_parallel_size=128 // heads,
        kv_cache_dtype="auto",
        q_scale=1.0,
        k_scale=1.0,
        prefill_backend=mla_backend_vllm.prefill_member(),
        qk_nope_head_dim=DIMS[dims][0],
        v_head_dim=DIMS[dims][1],
    )


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.skipif(
    not hasattr(upstream, "test_chunked_context_backend_correctness"), reason="not in this version of vLLM"
)
def test_chunked_context(
    default_vllm_config,
    dist_init,
    workspace_init,
    monkeypatch,
    model,
    threshold,
    dims,
):
    monkeypatch.setitem(upstream.BACKEND_BLOCK_SIZES, BACKEND, 16)
    call(
        upstream._run_backend_correctness,
        default_vllm_config,
        dist_init,
        workspace_init,
        batch_spec_name="chunked_context_prefill",
        model=model,
        tensor_parallel_size=16,
        kv_cache_dtype="auto",
        q_scale=1.0,
        k_scale=1.0,
        prefill_backend=mla_backend_vllm.prefill_member(),
        qk_nope_head_dim=DIMS[dims][0],
        v_head_dim=DIMS[dims][1],
        chunked_prefill_workspace_size=1024,
    )
