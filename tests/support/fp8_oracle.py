"""HuggingFace's DeepSeek models with latents as an fp8 cache keeps them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from mla_backend.cache_format import cache_format

CACHES_LATENTS = hasattr(DeepseekV2Attention, "expand_kv")
"""Whether this version of transformers caches latents; earlier ones cache keys and values per head."""


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def rounded(kv_c: Tensor, k_pe: Tensor, kv_dtype: str, kv_scale: float) -> tuple[Tensor, Tensor]:
    """Latents [..., 512] and rotary keys [..., 64], in fp32, as a cache returns them."""
    kv_format = cache_format(kv_dtype)
    if kv_format.takes_scale:
        scale = torch.tensor(kv_scale, dtype=torch.float32)
        return _e4m3(kv_c / scale) * scale, _e4m3(k_pe / scale) * scale
    groups = kv_c.unflatten(-1, (-1, kv_format.group))
    scales = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    return (_e4m3(groups / scales) * scales).flatten(-2), k_pe.to(kv_format.rope).to(k_pe.dtype)


class Fp8Latents(DynamicCache):
    """A cache for HuggingFace's DeepSeek-V2, which caches latents, that rounds them.

    Args:
        kv_dtype: "fp8_e4m3" or "fp8_ds_mla".
        kv_scale: of fp8_e4m3.

    Attributes:
        sees_rounded: whether tokens see the other tokens of their own pass as the cache returns them, as
            absorbed attention does, or unrounded, as regular prefill does.
    """

    def __init__(self, kv_dtype: str, kv_scale: float = 1.0):
        super().__init__()
        self._format = kv_dtype, kv_scale
        self.sees_rounded = True

    def update(self, kv_c: Tensor, k_pe: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        seen = super().update(*rounded(kv_c, k_pe, *self._format), layer, *args, **kwargs)
        if self.sees_rounded:
            return seen
        old = slice(0, seen[0].shape[2] - kv_c.shape[2])
        return torch.cat([seen[0][:, :, old], kv_c], 2), torch.cat([seen[1][:, :, old], k_pe], 2)


@torch.no_grad()
def assert_greedy(
    tokens: list[int],
    model,
    prompt: list[int],
    passes: list[tuple[int, bool]],
    cache: Fp8Latents,
) -> None:
    """The tokens are those of HuggingFace's model over a rounded cache, up to a near-tie.

    Rounding turns differences in the last bits of fp32 into steps of e4m3, though rarely; they move logits of
    the small checkpoints by less than 0.05.

    Args:
        passes: how the prompt was taken in: numbers of tokens, and whether by regular prefill.
    """

    def next_logits(new: Tensor) -> Tensor:
        return model(new, past_key_values=cache, use_cache=True).logits[0, -1]

    rest = torch.tensor([prompt])
    for count, is_regular in passes:
        cache.sees_rounded = not is_regular
        logits = next_logits(rest[:, :count])
        rest = rest[:, count:]
    assert not rest.numel()
    cache.sees_rounded = True
    for step, token in enumerate(tokens):
        if logits.argmax() != token:
            gap = float(logits.max() - logits[token])
            assert gap < 0.05, f"token {step} is {token}, which is {gap} behind"
            return
        logits = next_logits(torch.tensor([[token]]))
