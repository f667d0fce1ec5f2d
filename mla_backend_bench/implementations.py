"""The implementations of decode attention that are compared, behind one interface.

Each gets its inputs in the layout that suits it best, prepared outside the timing. Planning is timed
separately, because engines plan once per step and attend once per layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_backend.batch import TableKind
from mla_backend.cache_format import E4M3, E4M3_MAX
from mla_backend.decode import MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.kernels.hopper import HopperDecode
from mla_backend.kernels.portable import PortableDecode
from mla_backend.spec import DecoderSpec
from mla_backend_bench.cases import KV_LORA_RANK, LATENT_DIM, ROPE_DIM, SOFTMAX_SCALE, Inputs
from mla_backend_bench.prepared import Implementation


class DecodeImplementation(Implementation):
    """An implementation of decode attention.

    Attributes:
        multiplies_in_fp8: rounds queries and probabilities to e4m3, and is less exact for it.
    """

    multiplies_in_fp8: ClassVar[bool] = False


class MlaBackend(DecodeImplementation):
    """Our decoder.

    Args:
        implementation: as `MLADecoder` takes it; auto is our kernel for this GPU, never plain torch.
        decoder_class: `MLADecoder`, or that of another checkout.
        options: more arguments of the decoder.
    """

    def __init__(
        self,
        inputs: Inputs,
        implementation: str | Callable[[DecoderSpec], Any] = "auto",
        decoder_class: type[MLADecoder] = MLADecoder,
        **options: Any,
    ):
        case = inputs.case
        self.inputs = inputs
        # Not for caches in the queries' dtype: a baseline may be older than these arguments.
        kv_dtype: dict[str, Any] = {"kv_dtype": case.kv_dtype} if case.kv_dtype else {}
        lists: dict[str, Any] = {"table_kind": TableKind.LIST} if case.lists else {}
        self.batch = inputs.batch
        self.lists: dict[str, Any] = {}
        if case.lists:
            self.batch = replace(inputs.batch, table=None, table_kind=TableKind.LIST)
            self.lists = {"table": inputs.batch.table}
        self.decoder = decoder_class(
            num_heads=case.heads,
            kv_lora_rank=case.kv_lora_rank,
            qk_rope_head_dim=case.qk_rope_head_dim,
            dtype=inputs.q.dtype,
            page_size=case.page_size,
            device=inputs.device,
            max_batch=case.batch,
            max_query_len=case.q_len,
            implementation=implementation,
            **kv_dtype,
            **lists,
            **options,
        )
        if implementation == "auto" and self.decoder.implementation == "torch":
            raise UnsupportedError(f"none of our kernels serves this: {self.decoder.reason}")
        self.scale = {} if inputs.kv_scale is None else {"kv_scale": inputs.kv_scale}
        self.out = torch.empty_like(inputs.q_nope)
        self.lse = torch.empty(self.out.shape[:2], device=inputs.device)

    def plan(self) -> None:
        self.state = self.decoder.plan(self.batch)

    def run(self, layer: int) -> Tensor:
        inputs = self.inputs
        return self.decoder.run(
            inputs.q_nope,
            inputs.q_rope,
            inputs.caches[layer],
            self.state,
            SOFTMAX_SCALE,
            out=self.out,
            lse=self.lse,
            **self.scale,
            **self.lists,
        )[0]


class MlaBackendFp8(MlaBackend):
    """Our decoder with products in fp8.

    Args:
        two_term_blocks: of the 9 blocks of 64 columns of a query, how many are sums of two e4m3; None is the
            decoder's choice.
    """

    multiplies_in_fp8 = True

    def __init__(self, inputs: Inputs, two_term_blocks: int | None = None):
        if inputs.case.kv_dtype != E4M3.name:
            raise UnsupportedError("products in fp8 need an e4m3 cache")
        make = functools.partial(HopperDecode, two_term_blocks=two_term_blocks)
        super().__init__(inputs, "auto" if two_term_blocks is None else make, products="fp8")


class Torch(MlaBackend):
    """Our implementation in plain torch operations, for any device."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs, "torch")


def _refuse_fp8(inputs: Inputs) -> None:
    if inputs.case.kv_dtype is not None:
        raise UnsupportedError(f"it does not read {inputs.case.kv_dtype} caches")


def _deepseeks_width(inputs: Inputs) -> Inputs:
    """Inputs for an implementation that serves 512 + 64 only."""
    inputs = inputs.with_rotary_columns()
    if inputs.case.latent_dim != LATENT_DIM:
        raise UnsupportedError(f"it serves latents of {KV_LORA_RANK} + {ROPE_DIM} only")
    return inputs


class FlashMLA(DecodeImplementation):
    """DeepSeek's kernel, from the `flash_mla` package or the copy inside vLLM."""

    plan_includes_a_run = True  # the first call with new metadata plans

    def __init__(self, inputs: Inputs):
        try:
            import flash_mla as library
        except ImportError:
            import vllm.third_party.flashmla.flash_mla_interface as library
        inputs = _deepseeks_width(inputs)
        case = inputs.case
        if case.page_size != 64:
            raise UnsupportedError("it serves pages of 64 tokens only")
        self.library = library
        self.inputs = inputs
        self.q = inputs.q.view(case.batch, case.q_len, case.heads, -1)
        self.caches = inputs.caches.unsqueeze(3)

    def plan(self) -> None:
        case = self.inputs.case
        self.metadata = self.library.get_mla_metadata(self.inputs.batch.seq_lens, case.q_len * case.heads, 1)
        self.run(0)

    def run(self, layer: int) -> Tensor:
        batch = self.inputs.batch
        out, _ = self.library.flash_mla_with_kvcache(
            self.q,
            self.caches[layer],
            batch.table,
            batch.seq_lens,
            KV_LORA_RANK,
            *self.metadata,
            softmax_scale=SOFTMAX_SCALE,
            causal=True,
        )
        return out.flatten(0, 1)


class FlashMLAFp8(DecodeImplementation):
    """The version of FlashMLA for e4m3 caches, which vLLM alone has.

    It multiplies in fp8. Queries are rounded to e4m3 beforehand, outside the timing; an engine does so in
    each layer.
    """

    multiplies_in_fp8 = True

    def __init__(self, inputs: Inputs):
        from vllm.v1.attention.ops import flashmla as library

        inputs = _deepseeks_width(inputs)
        case = inputs.case
        if case.kv_dtype != E4M3.name:
            raise UnsupportedError("it reads records in sparse attention only")
        if case.page_size != 64:
            raise UnsupportedError("it serves pages of 64 tokens only")
        self.library = library
        self.inputs = inputs
        self.q_scale = (inputs.q.abs().amax().float() / E4M3_MAX).reshape(1)
        q = (inputs.q.float() / self.q_scale).to(torch.float8_e4m3fn)
        self.q = q.view(case.batch, case.q_len, case.heads, -1)
        self.caches = inputs.caches.unsqueeze(3)

    def plan(self) -> None:
        rows = self.inputs.case.q_len * self.inputs.case.heads
        self.metadata = self.library.get_mla_metadata_dense_fp8(self.inputs.batch.seq_lens, rows, 1)

    def run(self, layer: int) -> Tensor:
        batch = self.inputs.batch
        out, _ = self.library.flash_mla_with_kvcache_fp8(
            self.q,
            self.caches[layer],
            batch.table,
            batch.seq_lens,
            KV_LORA_RANK,
            *self.metadata,
            softmax_scale=SOFTMAX_SCALE,
            causal=True,
            descale_q=self.q_scale,
            descale_k=self.inputs.kv_scale,
        )
        return out.flatten(0, 1)


def flashmla(inputs: Inputs) -> DecodeImplementation:
    """FlashMLA's kernel for the format of the cache."""
    return FlashMLAFp8(inputs) if inputs.case.kv_dtype else FlashMLA(inputs)


class Flash3:
    """FlashAttention-3's MLA mode, which takes rotary and latent keys separately, from vLLM's copy.

    Args:
        q_nope, q_rope: [T, H, d_c] and [T, H, 64].
        query_start_loc: int32 [batch + 1].
        max_query_len: query tokens of the longest request.
        seq_lens: int32 [batch].
        max_seq_len: keys of the longest request.
        page_size: tokens in a page.

    Raises:
        ImportError: vLLM is not installed.
        UnsupportedError: its copy does not run here.
    """

    def __init__(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        seq_lens: Tensor,
        max_seq_len: int,
        page_size: int,
    ):
        import vllm.vllm_flash_attn as library

        if not library.is_fa_version_supported(3):
            raise UnsupportedError(
                library.fa_version_unsupported_reason(3) or "FlashAttention-3 is not available"
            )
        self._library, self._q_nope, self._q_rope, self._page_size = library, q_nope, q_rope, page_size
        self._seq_lens = seq_lens
        self._sizes = dict(
            max_seqlen_q=max_query_len, max_seqlen_k=max_seq_len, cu_seqlens_q=query_start_loc, causal=True
        )

    def plan(self) -> None:
        self._metadata = self._library.get_scheduler_metadata(
            batch_size=len(self._seq_lens),
            num_heads_q=self._q_nope.shape[1],
            num_heads_kv=1,
            headdim=self._q_rope.shape[2],
            headdim_v=self._q_nope.shape[2],
            cache_seqlens=self._seq_lens,
            qkv_dtype=self._q_nope.dtype,
            page_size=self._page_size,
            **self._sizes,
        )

    def attend(self, cache: Tensor, table: Tensor) -> Tensor:
        """Attend to a cache [pages, page_size, d_c + 64], whose pages ``table`` names: [T, H, d_c]."""
        d_c = self._q_nope.shape[2]
        return self._library.flash_attn_varlen_func(
            q=self._q_rope,
            k=cache[..., d_c:].unsqueeze(2),
            v=cache[..., :d_c].unsqueeze(2),
            q_v=self._q_nope,
            seqused_k=self._seq_lens,
            block_table=table,
            softmax_scale=SOFTMAX_SCALE,
            fa_version=3,
            scheduler_metadata=self._metadata,
            **self._sizes,
        )


class FlashAttention3(DecodeImplementation):
    """FlashAttention-3, from vLLM's copy."""

    def __init__(self, inputs: Inputs):
        _refuse_fp8(inputs)
        case, batch = inputs.case, inputs.batch
        self.inputs = inputs = inputs.with_rotary_columns()
        self.flash3 = Flash3(
            inputs.q_nope,
            inputs.q_rope,
            inputs.query_start_loc,
            case.q_len,
            batch.seq_lens,
            max(inputs.lengths),
            case.page_size,
        )

    def plan(self) -> None:
        self.flash3.plan()

    def run(self, layer: int) -> Tensor:
        return self.flash3.attend(self.inputs.caches[layer], self.inputs.batch.table)


class FlashInfer(DecodeImplementation):
    """FlashInfer's kernels.

    Args:
        backend: "fa3" for Hopper, "fa2" for Ampere and newer GPUs.
    """

    workspace_bytes = 512 << 20

    def __init__(self, inputs: Inputs, backend: str):
        import flashinfer.mla

        if backend != "fa3" or inputs.case.kv_dtype != E4M3.name:
            _refuse_fp8(inputs)
        self.inputs = inputs = _deepseeks_width(inputs)
        scale = None if inputs.kv_scale is None else float(inputs.kv_scale)
        self.scales = {} if scale is None else {"ckv_scale": scale, "kpe_scale": scale}
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=inputs.device)
        self.wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        counts = torch.tensor([0, *map(len, inputs.pages)], dtype=torch.int32, device=inputs.device)
        self.page_start = counts.cumsum(0, dtype=torch.int32)
        self.page_ids = torch.cat(inputs.pages)
        self.out = torch.empty_like(inputs.q_nope)

    def plan(self) -> None:
        inputs, case = self.inputs, self.inputs.case
        self.wrapper.plan(
            inputs.query_start_loc,
            self.page_start,
            self.page_ids,
            inputs.batch.seq_lens,
            case.heads,
            KV_LORA_RANK,
            ROPE_DIM,
            case.page_size,
            case.q_len > 1,
            SOFTMAX_SCALE,
            inputs.q.dtype,
            inputs.caches.dtype,
        )

    def run(self, layer: int) -> Tensor:
        cache = self.inputs.caches[layer]
        return self.wrapper.run(
            self.inputs.q_nope,
            self.inputs.q_rope,
            cache[..., :KV_LORA_RANK],
            cache[..., KV_LORA_RANK:],
            out=self.out,
            **self.scales,
        )


class TritonMLA(DecodeImplementation):
    """vLLM's Triton kernel, with the number of splits that vLLM's backend chooses."""

    def __init__(self, inputs: Inputs):
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

        case = inputs.case
        if case.q_len != 1:
            raise UnsupportedError("it serves one query token per request only")
        if case.kv_dtype == "fp8_ds_mla":
            raise UnsupportedError("it does not read records")
        self.attend = decode_attention_fwd
        self.inputs = inputs
        sms = torch.cuda.get_device_properties(inputs.device).multi_processor_count
        units = max(1, max(inputs.lengths) // 512)
        self.num_splits = min(1 << (units - 1).bit_length(), 2 * sms)
        self.d_c = case.kv_lora_rank
        self.partials = torch.empty(
            case.batch, case.heads, self.num_splits, self.d_c + 1, device=inputs.device
        )
        self.out = torch.empty_like(inputs.q_nope)
        self.lse = torch.empty(self.out.shape[:2], device=inputs.device, dtype=self.out.dtype)
        self.scale = torch.ones(1, device=inputs.device) if inputs.kv_scale is None else inputs.kv_scale

    def run(self, layer: int) -> Tensor:
        cache = self.inputs.caches[layer].unsqueeze(2)
        self.attend(
            self.inputs.q,
            cache,
            cache[..., : self.d_c],
            self.out,
            self.lse,
            self.inputs.batch.table,
            self.inputs.batch.seq_lens,
            self.partials,
            self.num_splits,
            SOFTMAX_SCALE,
            self.inputs.case.page_size,
            k_scale=self.scale,
            v_scale=self.scale,
            is_mla=True,
        )
        return self.out


IMPLEMENTATIONS: dict[str, Callable[[Inputs], DecodeImplementation]] = {
    "mla_backend": MlaBackend,
    "flashmla": flashmla,
    "fa3": FlashAttention3,
    "flashinfer-fa3": functools.partial(FlashInfer, backend="fa3"),
    "flashinfer-fa2": functools.partial(FlashInfer, backend="fa2"),
    "triton": TritonMLA,
    "torch": Torch,
    # Our kernel with products in fp8, and with the fewest and the most two-term columns of queries.
    "mla_backend_fp8": MlaBackendFp8,
    "mla_backend_fp8_one_term": functools.partial(MlaBackendFp8, two_term_blocks=0),
    "mla_backend_fp8_two_terms": functools.partial(MlaBackendFp8, two_term_blocks=9),
    # Our portable kernel, which any GPU runs, and the same within 99 KB of shared memory, as on Ada.
    "mla_backend_portable": functools.partial(MlaBackend, implementation="portable"),
    "mla_backend_portable_99k": functools.partial(
        MlaBackend, implementation=functools.partial(PortableDecode, within_99k=True)
    ),
}
BASELINE = "baseline"
"""The kernel of another checkout of this package; see `mla_backend_bench.baseline`."""
OURS = (
    "mla_backend",
    "mla_backend_fp8",
    "mla_backend_fp8_one_term",
    "mla_backend_fp8_two_terms",
    "mla_backend_portable",
    "mla_backend_portable_99k",
    BASELINE,
)
"""Kernels of this package, which are not compared as others: this GPU's, with less exact products, forced
ones, the baseline."""
DEFAULT = tuple(name for name in IMPLEMENTATIONS if name not in OURS[1:])
"""Measured by default: all but the forced kernels."""
