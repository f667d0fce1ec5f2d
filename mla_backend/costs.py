"""FLOPs and bytes of the stages of an MLA layer, from the query's input to the layer's output.

A multiplication with its addition counts as 2 FLOPs. Each stage reads its operands once and writes its result
once; an element has ``ITEMSIZE`` bytes. ``policy`` uses these costs to choose between absorbed and vanilla
attention.
"""

from __future__ import annotations

from typing import NamedTuple

from mla_backend.geometry import MLAGeometry

ITEMSIZE = 2


class Cost(NamedTuple):
    """Bytes read and written, and FLOPs."""

    bytes: float
    flops: float

    def plus(self, other: Cost) -> Cost:
        """The cost of one stage after the other."""
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def linear(tokens: float, inputs: int, outputs: int, groups: int = 1) -> Cost:
    """``groups`` products [tokens, inputs] @ [inputs, outputs], each with its own weight."""
    elements = groups * (inputs * outputs + tokens * (inputs + outputs))
    return Cost(ITEMSIZE * elements, 2.0 * groups * tokens * inputs * outputs)


def expand_keys(g: MLAGeometry, tokens: float) -> Cost:
    """``kv_b_proj``: from latents to the k_nope and v of every head."""
    return linear(tokens, g.kv_lora_rank, g.num_heads * (g.qk_nope_head_dim + g.v_head_dim))


def absorb(g: MLAGeometry, tokens: float) -> Cost:
    """q_nope·W_UK before absorbed attention and o_latent·W_UV after it."""
    query = linear(tokens, g.qk_nope_head_dim, g.kv_lora_rank, g.num_heads)
    return query.plus(linear(tokens, g.kv_lora_rank, g.v_head_dim, g.num_heads))


def vanilla_attention(g: MLAGeometry, query_len: float, kv_len: float) -> Cost:
    """Multi-head attention with expanded keys (d_nope + d_rope) and values (d_v)."""
    widths = g.num_heads * (g.qk_head_dim + g.v_head_dim)
    return Cost(ITEMSIZE * (query_len + kv_len) * widths, 2.0 * _pairs(query_len, kv_len) * widths)


def absorbed_attention(g: MLAGeometry, query_len: float, kv_len: float) -> Cost:
    """Attention on the latents: one key of d_c + d_rope for all heads, its first d_c columns the value."""
    widths = g.num_heads * (g.latent_dim + g.kv_lora_rank)
    elements = kv_len * g.latent_dim + query_len * widths
    return Cost(ITEMSIZE * elements, 2.0 * _pairs(query_len, kv_len) * widths)


def _pairs(query_len: float, kv_len: float) -> float:
    # Causal, bottom-right aligned: query token i of n sees kv_len - n + 1 + i keys. This is their sum,
    # less half a key per query token.
    return query_len * (kv_len - query_len / 2)
