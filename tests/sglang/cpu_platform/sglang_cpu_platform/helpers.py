"""Replaces Triton helpers, which some versions select by the name of the attention backend, by torch."""

from . import is_selected


def register() -> None:
    if not is_selected():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.common.support_triton", lambda backend: False, HookType.REPLACE)
    HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _last_loc, HookType.AROUND)
    # For deterministic inference on a GPU, this function replaces torch's matrix products by Triton's.
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", lambda *_, **__: None, HookType.REPLACE
    )


def _last_loc(original, *args):
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)
