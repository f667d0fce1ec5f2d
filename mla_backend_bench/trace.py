"""The timeline of one launch of the Hopper decode kernel."""

from __future__ import annotations

from typing import Any

import torch

from mla_backend.errors import UnsupportedError
from mla_backend.kernels import hopper
from mla_backend.kernels.trace import chrome_trace
from mla_backend.spec import DecodeCall, DecoderSpec
from mla_backend_bench.cases import SOFTMAX_SCALE, Case, Inputs
from mla_backend_bench.timing import cold_cache_bytes

_LAUNCHES = 8


def record(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """A Chrome trace of one launch whose keys are not in the L2 cache, after a few launches to warm up.

    Raises:
        UnsupportedError: there is no Hopper GPU, or the kernel does not serve the case.
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("bench trace needs a Hopper GPU, and torch sees no GPU here")
    if case.lists:
        raise UnsupportedError("bench trace does not trace kernels for lists: leave out ~lists")
    device = torch.device("cuda")
    inputs = Inputs(case, device, dtype, cold_cache_bytes(device))
    spec = DecoderSpec(
        num_heads=case.heads,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.qk_rope_head_dim,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=case.page_size,
        table_kind=inputs.batch.table_kind,
        device=device,
        max_batch=case.batch,
        max_query_len=case.q_len,
        batch_invariant=False,
    )
    if why := hopper.refusal(spec, torch.cuda.get_device_capability(device)):
        raise UnsupportedError(why)
    decoder = hopper.HopperDecode(spec, profile=True)
    plan = decoder.plan(inputs.batch)
    out = torch.empty_like(inputs.q_nope)
    lse = torch.empty(inputs.q_nope.shape[:2], device=device)
    for launch in range(_LAUNCHES):
        cache = inputs.caches[launch % inputs.num_layers]
        tensors = (inputs.q_nope, inputs.q_rope, cache)
        decoder.run(DecodeCall(*tensors, SOFTMAX_SCALE, True, None, None, out, lse), plan)
    assert decoder.stamps is not None  # profile=True
    return chrome_trace(decoder.stamps)
