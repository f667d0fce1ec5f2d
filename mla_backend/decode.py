"""`MLADecoder`, the entry point to absorbed attention: decode, verification of drafts, absorbed extend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_backend import kernels, torch_attention
from mla_backend.batch import DecodeBatch, TableKind, check_batch
from mla_backend.cache_format import check_scale, check_storage
from mla_backend.checks import check_operand, check_output, check_softmax_scale, check_tensor
from mla_backend.device import with_index, without_autocast
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend.grouped_batch import GroupedBatch
from mla_backend.spec import DecodeCall, DecodePlan, DecoderSpec, Implementation

IMPLEMENTATIONS = (*kernels.NAMES, "torch")


class TorchImplementation:
    """Absorbed attention in plain torch, on any device."""

    name = "torch"

    def __init__(self, spec: DecoderSpec):
        self._batch_invariant = spec.batch_invariant

    def plan(self, batch: DecodeBatch) -> DecodePlan:
        return DecodePlan(batch, GroupedBatch(batch, batch_invariant=self._batch_invariant))

    @torch.no_grad()
    def run(self, call: DecodeCall, plan: DecodePlan) -> None:
        grouped = plan.state
        if call.lists is not None:
            grouped = GroupedBatch(plan.batch.with_lists(call.lists), batch_invariant=self._batch_invariant)
        with without_autocast(call.q_nope.device):
            torch_attention.paged_attention(
                call.q_nope,
                call.q_rope,
                call.latent_cache,
                grouped,
                call.softmax_scale,
                kv_scale=call.kv_scale,
                sinks=call.sinks,
                causal=call.causal,
                compute_dtype=torch.promote_types(call.q_nope.dtype, torch.float32),
                out=call.out,
                lse=call.lse,
            )


def _select(
    spec: DecoderSpec, wanted: str | Callable[[DecoderSpec], Implementation]
) -> tuple[Implementation, str]:
    """The implementation that serves ``spec``, and one line saying why it was chosen."""
    if callable(wanted):
        return wanted(spec), "passed by the caller"
    if wanted == "torch":
        return TorchImplementation(spec), "chosen by name"
    if spec.device.type != "cuda":
        if wanted != "auto":
            raise UnsupportedError(
                f"implementation {wanted!r} needs a CUDA device, got {spec.device}: use 'auto' or 'torch'"
            )
        return TorchImplementation(spec), f"no kernels for device type {spec.device.type!r}"
    implementation, reason = kernels.select(spec, wanted)
    return implementation or TorchImplementation(spec), reason


class MLADecoder:
    """Absorbed attention over a paged latent cache: ``plan`` once per step, ``run`` once per layer.

    For inference: results have no gradients. As with any tensor of torch, a stream must wait for the stream
    on which the decoder was made before it uses the decoder. Keep a decoder as long as graphs with its plans
    or runs are replayed, and until its last run on another stream has ended: they use its buffers.

    Args:
        num_heads: query heads on this device, H.
        kv_lora_rank: d_c.
        qk_rope_head_dim: d_rope; 0 if keys have no rotary part.
        dtype: of queries and outputs.
        kv_dtype: of the latent cache; None means ``dtype``. A torch.dtype or the name of a format; for
            "fp8_ds_mla" there is only the name: see :mod:`mla_backend.cache_format`.
        page_size: tokens in a page.
        table_kind: how tables address the cache. With LIST (sparse attention) ``max_query_len`` is 1, and
            pages may have any size.
        device: where all tensors live.
        max_batch: the largest number of requests in a batch; with LIST, of query tokens.
        max_query_len: the largest number of query tokens of a request for which kernels are built now. A
            batch may have more; its kernel may then be built in ``plan``.
        implementation: "auto", or one of `IMPLEMENTATIONS` to force it: "hopper", "portable" (any GPU from
            compute capability 8.0 on) or "torch". Tests and benchmarks may also pass what makes an
            implementation from the spec.
        batch_invariant: make a request's bits independent of the rest of its batch. No m-block is split
            then, so a few long requests do not fill a GPU.
        num_ctas: the largest number of CTAs in a launch. A smaller number leaves multiprocessors to kernels
            on other streams, such as communication. None means one per multiprocessor. A launch never has
            more CTAs than its stream may use multiprocessors. On Hopper, kernels for more than 64 query rows
            (16 with an fp8 cache) may need two. Results with different numbers of CTAs may differ in their
            last bits, except with ``batch_invariant``.

    Attributes:
        spec: the arguments, as a :class:`mla_backend.spec.DecoderSpec`.
        implementation: name of the implementation in use.
        reason: one line saying why it was chosen.
        current_plan: the last plan, the only one that `run` takes; None before the first.

    Raises:
        InvalidInputError: an argument is wrong.
        UnsupportedError: the forced implementation cannot serve the arguments, torch sees no such device, or
            no CTA of the kernels fits on it.
        KernelBuildError: a kernel cannot be built or loaded.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | str | None = None,
        page_size: int,
        table_kind: TableKind = TableKind.BLOCK,
        device: torch.device | str,
        max_batch: int,
        max_query_len: int = 1,
        implementation: str | Callable[[DecoderSpec], Implementation] = "auto",
        batch_invariant: bool = False,
        num_ctas: int | None = None,
    ):
        self.spec = DecoderSpec(
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            dtype=dtype,
            kv_dtype=dtype if kv_dtype is None else kv_dtype,
            page_size=page_size,
            table_kind=table_kind,
            device=with_index(device),
            max_batch=max_batch,
            max_query_len=max_query_len,
            batch_invariant=batch_invariant,
            num_ctas=num_ctas,
        )
        self.spec.check()
        if not callable(implementation) and implementation not in ("auto", *IMPLEMENTATIONS):
            raise InvalidInputError(
                f"unknown implementation {implementation!r}: "
                f"use 'auto' or one of {', '.join(IMPLEMENTATIONS)}"
            )
        self._implementation, self.reason = _select(self.spec, implementation)
        self.current_plan: DecodePlan | None = None

    @property
    def implementation(self) -> str:
        return self._implementation.name

    def plan(self, batch: DecodeBatch) -> DecodePlan:
        """Prepare a step. CUDA implementations neither synchronize nor allocate in this call.

        A plan reads lengths and tables in stream order. Each ``run`` reads the table again, possibly before
        earlier work on its stream has ended. So do not change these tensors until the last ``run`` of the
        plan has ended. Call ``run`` on the stream of the plan, or on one that waits for it. Neither a plan
        nor a run may overlap another run of this decoder: they share its workspace, and could wait forever.
        (With MLA_BACKEND_DEBUG=1, a wait of 10 s ends with an error.)

        A plan is valid until this decoder plans again, on streams with as many multiprocessors as the current
        one. A captured graph keeps its number of CTAs, and replays with the decoder's last plan. A replay
        with a plan for another number of CTAs ends with an error. So before a replay, plan on a stream with
        as many multiprocessors as the one on which the graph was captured, with the table that its runs were
        captured with, for no more requests and the same ``max_query_len``.

        If the call of ``plan`` is captured too, each replay makes the plan, and only runs in that graph may
        use it. Such a replay replaces the decoder's last plan, but does not change ``current_plan``: plan
        again before other runs, which otherwise end with an error. CUDA reports both errors as an
        "unspecified launch failure", after which a process can launch nothing more; the decoder's next call
        says what was wrong.

        The first plan of a request with more query tokens than ``max_query_len`` may load or build a kernel.

        Raises:
            InvalidInputError: the batch is malformed, or not one that this decoder was made for; or an
                earlier launch of this decoder has ended with an error.
            KernelBuildError: a kernel for so many query tokens cannot be built or loaded.
            UnsupportedError: plain torch cannot plan while a CUDA graph is captured; or too few CTAs of the
                kernel for so many query tokens can be resident at once.
            ValueError: the kernel for so many query rows needs two CTAs, and there may be only one.
        """
        check_batch(batch)
        spec = self.spec
        if batch.page_size != spec.page_size or batch.table_kind is not spec.table_kind:
            raise InvalidInputError(
                f"the batch has page_size {batch.page_size} and a {batch.table_kind.name} table, "
                f"this decoder was made for page_size {spec.page_size} and {spec.table_kind.name} tables"
            )
        if batch.batch_size > spec.max_batch:
            raise InvalidInputError(
                f"the batch has {batch.batch_size} requests, max_batch is {spec.max_batch}: split the batch, "
                f"or make the decoder with max_batch={batch.batch_size}"
            )
        if batch.seq_lens.device != spec.device:
            raise InvalidInputError(f"the batch is on {batch.seq_lens.device}, this decoder on {spec.device}")
        self.current_plan = None  # also if planning fails half-way
        self.current_plan = self._implementation.plan(batch)
        return self.current_plan

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        plan: DecodePlan,
        softmax_scale: float,
        *,
        kv_scale: Tensor | None = None,
        causal: bool = True,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        table: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend in one layer.

        On a GPU, the rows of queries and cache must begin at multiples of 16 bytes, those of ``out`` at
        multiples of 8.

        Args:
            q_nope: [T, H, d_c], absorbed queries; may be strided, the last dimension contiguous. If the batch
                has ``query_start_loc``, tokens after its last offset are padding; ``out`` and ``lse`` are not
                written for them. Otherwise T is the number of query tokens of the batch.
            q_rope: [T, H, d_rope], rotated queries, likewise.
            latent_cache: [num_pages, page_size, d_c + d_rope]; records are 656 wide. Its dtype is that of
                the decoder's format.
            plan: this decoder's last one.
            softmax_scale: factor on the scores, finite and greater than 0 in fp32. Pass the scale of vanilla
                attention, :attr:`MLAGeometry.softmax_scale`, which does not depend on d_c.
            kv_scale: fp32 tensor of one element, the factor that turns an fp8_e4m3 cache's elements into
                values; None for other formats. Read on the device: a captured graph sees its changes.
            causal: causal mask among a request's query tokens, bottom-right aligned.
            out: [T, H, d_c] in ``dtype``; allocated if None.
            lse: fp32 [T, H]; allocated if None.
            table: with TableKind.LIST, and only then: int32 [T or more, width], this layer's lists of slots.
                On a GPU it is read in stream order, so an earlier kernel of the layer may write it.
            sinks: fp32 [H], contiguous, read on the device. A head's sink counts as a key that each of its
                query rows sees, with this score (after scaling) and without values; -inf is no sink. The LSE
                counts it too. If a batch is a shard, only that of rank 0 counts it, so merged shards count it
                once. If all scores of a row are lower by more than 87, the kernels' LSE may be too low.

        Returns:
            out, and lse (natural logarithm). Query rows that see no key are 0 and -inf, or the sink.

        Whatever tables, lists and lengths hold, nothing outside of the tensors is read or written, and
        entries outside of the cache stand for no key: see :class:`DecodeBatch`.

        Raises:
            InvalidInputError: a tensor's shape, dtype, device or layout does not fit the decoder or the plan;
                the plan is not this decoder's last one, or was captured while the run is not; the scale is
                not finite and greater than 0; or an earlier launch of this decoder has ended with an error.
            ValueError: rows are not aligned as above, or the current stream has a different number of
                multiprocessors from the stream on which the plan was made.
        """
        self._check_run(q_nope, q_rope, latent_cache, plan, softmax_scale, kv_scale, table)
        out_shape = (q_nope.shape[0], self.spec.num_heads, self.spec.kv_lora_rank)
        if sinks is not None:
            check_operand("sinks", sinks, out_shape[1:2], torch.float32, self.spec.device)
        if out is None:
            out = q_nope.new_empty(out_shape)
        else:
            check_output("out", out, out_shape, self.spec.dtype, self.spec.device)
        if lse is None:
            lse = q_nope.new_empty(out_shape[:2], dtype=torch.float32)
        else:
            check_output("lse", lse, out_shape[:2], torch.float32, self.spec.device)
        scale = float(softmax_scale)
        sinks = sinks if plan.batch.shard.rank == 0 else None
        call = DecodeCall(q_nope, q_rope, latent_cache, scale, causal, kv_scale, table, out, lse, sinks)
        self._implementation.run(call, plan)
        return out, lse

    def _check_run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        plan: DecodePlan,
        softmax_scale: float,
        kv_scale: Tensor | None,
        table: Tensor | None,
    ) -> None:
        """Raises InvalidInputError if arguments of `run` do not fit the decoder or the plan."""
        if plan is None or plan is not self.current_plan:
            raise InvalidInputError(
                "this plan is not the decoder's last one: plan each step before its runs; steps that "
                "alternate need a decoder each"
            )
        check_softmax_scale(softmax_scale)
        check_tensor("q_nope", q_nope)
        spec, device = self.spec, self.spec.device
        if (table is not None) != (spec.table_kind is TableKind.LIST):
            raise InvalidInputError(
                "with lists (TableKind.LIST) run needs the layer's own: run(..., table=slots)"
                if table is None
                else "the plan has a table already: only a decoder with TableKind.LIST takes one in run"
            )
        if table is not None:
            plan.batch.with_lists(table)  # checks it
        tokens = q_nope.shape[0] if q_nope.ndim == 3 else "tokens"
        check_operand("q_nope", q_nope, (tokens, spec.num_heads, spec.kv_lora_rank), spec.dtype, device)
        if plan.batch.query_start_loc is None and tokens != plan.batch.num_uniform_tokens:
            raise InvalidInputError(
                f"q_nope has {tokens} tokens, the plan is for {plan.batch.num_uniform_tokens}: "
                f"{plan.batch.batch_size} requests with {plan.batch.max_query_len} query tokens each"
            )
        check_operand("q_rope", q_rope, (tokens, spec.num_heads, spec.qk_rope_head_dim), spec.dtype, device)
        kv_format = spec.kv_format
        width = kv_format.row_width(spec.kv_lora_rank, spec.qk_rope_head_dim)
        cache_shape = ("num_pages", spec.page_size, width)
        check_storage(kv_format, latent_cache)
        check_operand("latent_cache", latent_cache, cache_shape, kv_format.storage, device)
        check_scale(kv_format, kv_scale, device)
