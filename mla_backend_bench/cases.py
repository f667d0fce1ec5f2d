"""The shapes of the decode benchmark and their inputs."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch
from mla_backend.cache import movable
from mla_backend.cache_format import E4M3, cache_format, dequantize, quantize
from mla_backend.errors import InvalidInputError

KV_LORA_RANK = 512
ROPE_DIM = 64
LATENT_DIM = KV_LORA_RANK + ROPE_DIM
SOFTMAX_SCALE = (128 + ROPE_DIM) ** -0.5  # DeepSeek's, without YaRN

_LOGNORMAL_SIGMA = 0.6
_E4M3_SCALE = 2**-5  # normally distributed values, up to 14, then fit e4m3 with all its bits
_QUANTIZED_TOKENS = 1 << 20  # at a time
_SHAPE = re.compile(
    r"(\d+)x(\d+)x(\d+)x(\d+)(?:@(\d+))?(~lognormal)?(?:~shard(\d+))?(?:~(\d+)\+(\d+))?(~lists)?"
)


@dataclass(frozen=True)
class Case:
    """The shape of one decode step.

    Attributes:
        batch: requests.
        seq_len: keys of each request on this GPU, new tokens included; their mean if lengths vary.
        heads: query heads on this GPU.
        q_len: query tokens of each request.
        page_size: tokens per page of the cache.
        lengths: "fixed" or "lognormal".
        shards: GPUs that divide the keys of a request, and gather their query heads. If they did not, each
            would have ``heads / shards`` heads and ``seq_len * shards`` keys.
        kv_dtype: "fp8_e4m3" or "fp8_ds_mla"; None is a cache in the queries' dtype.
        kv_lora_rank, qk_rope_head_dim: widths of a latent's two parts.
        lists: ours attends to lists of slots, as in sparse attention, which name all of a request's keys.
            Others, which have no lists, attend to the same keys in pages of a token.
    """

    batch: int
    seq_len: int
    heads: int
    q_len: int = 1
    page_size: int = 64
    lengths: str = "fixed"
    shards: int = 1
    kv_dtype: str | None = None
    kv_lora_rank: int = KV_LORA_RANK
    qk_rope_head_dim: int = ROPE_DIM
    lists: bool = False

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __str__(self) -> str:
        suffix = "" if self.lengths == "fixed" else f"~{self.lengths}"
        suffix += "" if self.shards == 1 else f"~shard{self.shards}"
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (KV_LORA_RANK, ROPE_DIM):
            suffix += f"~{self.kv_lora_rank}+{self.qk_rope_head_dim}"
        suffix += "~lists" * self.lists
        suffix += f" {self.kv_dtype}" if self.kv_dtype else ""
        whole = f"{self.batch}x{self.seq_len * self.shards}x{self.heads // self.shards}x{self.q_len}"
        return f"{whole}@{self.page_size}{suffix}"

    @staticmethod
    def parse(text: str) -> Case:
        """Read `BATCHxSEQ_LENxHEADSxQ_LEN[@PAGE_SIZE][~lognormal][~shardN][~D_C+D_ROPE][~lists]`.

        Such as 64x1024x16x1@1. D_C and D_ROPE are 512 and 64 by default. With ~lists, PAGE_SIZE and Q_LEN are
        1. With ~shardN, SEQ_LEN and HEADS are those of a GPU that does not share its requests. The case is
        the work of each of N GPUs that divide the keys: SEQ_LEN / N keys for HEADS * N heads.

        Raises:
            InvalidInputError: ``text`` is not such a shape, has more query tokens than keys, keys that N
                does not divide, or lists of larger pages or of several query tokens.
        """
        match = _SHAPE.fullmatch(text)
        if match is None or any(int(match[i] or 1) == 0 for i in (1, 2, 3, 4, 5, 7, 8)):
            raise InvalidInputError(
                f"{text!r} is not a valid shape: write BATCHxSEQ_LENxHEADSxQ_LEN[@PAGE_SIZE][~lognormal]"
                "[~shardN][~D_C+D_ROPE][~lists], such as 64x1024x16x1@1 or 128x2048x64x1@1~512+0~lists"
            )
        batch, seq_len, heads, q_len = (int(group) for group in match.groups()[:4])
        lengths, shards = "lognormal" if match[6] else "fixed", int(match[7] or 1)
        if seq_len % shards:
            raise InvalidInputError(f"{text!r}: {shards} shards do not divide {seq_len} keys")
        width = (int(match[8]), int(match[9])) if match[8] else (KV_LORA_RANK, ROPE_DIM)
        lists = match[10] is not None
        page_size = int(match[5] or (1 if lists else 64))
        if lists and (q_len, page_size) != (1, 1):
            raise InvalidInputError(
                f"{text!r}: with ~lists, write one query token and pages of one token (@1)"
            )
        per_gpu = (seq_len // shards, heads * shards)
        case = Case(batch, *per_gpu, q_len, page_size, lengths, shards, None, *width, lists)
        if case.seq_len < case.q_len:
            raise InvalidInputError(f"{text!r}: seq_len counts the new tokens, so it must be at least q_len")
        return case

    def seq_lens(self) -> list[int]:
        """The number of keys of each request; the same in every run."""
        if self.lengths == "fixed":
            return [self.seq_len] * self.batch
        generator = torch.Generator().manual_seed(self.batch * 1_000_003 + self.seq_len)
        normal = torch.randn(self.batch, generator=generator, dtype=torch.float64)
        drawn = self.seq_len * torch.exp(_LOGNORMAL_SIGMA * normal - _LOGNORMAL_SIGMA**2 / 2)
        return [max(self.q_len, round(length)) for length in drawn.tolist()]

    def num_bytes(self, itemsize: int) -> int:
        """The bytes that must move: each latent and each query is read once, the output is written once.

        Args:
            itemsize: bytes of a value of the queries, the output and a cache whose ``kv_dtype`` is None.
        """
        rows = self.batch * self.q_len * self.heads
        key_bytes = self.latent_dim * itemsize
        if self.kv_dtype is not None:
            key_bytes = cache_format(self.kv_dtype).row_bytes(self.kv_lora_rank, self.qk_rope_head_dim)
        return sum(self.seq_lens()) * key_bytes + itemsize * rows * (self.latent_dim + self.kv_lora_rank)

    def flops(self) -> int:
        """FLOPs of QK^T and PV over the visible (query, key) pairs; a multiply-add counts as 2."""
        hidden = self.q_len * (self.q_len - 1) // 2
        pairs = sum(self.q_len * length - hidden for length in self.seq_lens())
        return 2 * self.heads * pairs * (self.latent_dim + self.kv_lora_rank)


_FEW_ROWS = (
    "1x2048x16x1",
    "4x2048x16x1",
    "1x8192x16x1",
    "1x32768x16x1",
    "1x131072x16x1",
    "8x8192x16x1",
    "64x1024x16x1",
    "128x2048x16x1",
    "128x8192x16x1",
    "64x4096x16x2",
    "64x4096x16x4",
    "64x4096x20x1",
    "64x4096x40x1",
)
_MANY_ROWS = ("64x4096x96x1", "128x8192x64x1", "128x8192x128x1")
_VARIED = ("16x4096x16x1", "64x4096x16x1", "128x2048x16x1")
STANDARD_GRID = (
    *_FEW_ROWS,
    *_MANY_ROWS,
    *(f"{shape}~lognormal" for shape in _VARIED),
    *(f"{shape}@1" for shape in _FEW_ROWS),
)

QUICK_GRID = ("1x8192x16x1", "16x4096x16x1", "64x2048x16x1", "64x2048x128x1")
"""Few and many requests with the heads of DeepSeek-V2-Lite, and those of V3 on one GPU."""
QUICK_GRID_OF_CPUS = ("1x1024x16x1", "4x512x16x1")


class Inputs:
    """Random inputs of one case: queries, a page table, and one cache per layer.

    As in a model, all layers share the page table, whose pages are shuffled, and each has its own cache.
    There are enough layers for `cache_bytes` in total: if layers are called in turn, no call finds its keys
    in the L2 cache.

    Attributes:
        q: [T, H, d_c + d_rope] queries, T = batch * q_len.
        q_nope, q_rope: [T, H, d_c] and [T, H, d_rope], contiguous copies of the two parts of q.
        caches: [num_layers, num_pages, page_size, d_c + d_rope], or records of 656 bytes.
        kv_scale: of e4m3 caches, fp32 [1]; else None.
        lengths: the number of keys of each request.
        pages: int32 page numbers of each request, in order.
        query_start_loc: int32 [batch + 1], offsets of the requests' query tokens.
        batch: the `DecodeBatch` that all layers share; its table holds the lists, if there are any.
    """

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, cache_bytes: int):
        self.case = case
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        self.lengths = case.seq_lens()
        pages = [-(-length // case.page_size) for length in self.lengths]
        num_pages = sum(pages)
        self.kv_scale = None
        if case.kv_dtype == E4M3.name:
            self.kv_scale = torch.tensor([_E4M3_SCALE], device=device)
        self.caches = self._make_caches(num_pages, dtype, cache_bytes, generator)

        order = torch.randperm(num_pages, device=device, generator=generator).to(torch.int32)
        self.pages = [part.contiguous() for part in order.split(pages)]
        table = torch.zeros(case.batch, max(pages), dtype=torch.int32, device=device)
        for row, part in zip(table, self.pages, strict=True):
            row[: len(part)] = part
        tokens = case.batch * case.q_len
        shape = (tokens, case.heads, case.latent_dim)
        self.q = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        self.q_nope = self.q[..., : case.kv_lora_rank].contiguous()
        self.q_rope = self.q[..., case.kv_lora_rank :].contiguous()
        self.query_start_loc = torch.arange(case.batch + 1, device=device, dtype=torch.int32) * case.q_len
        self.batch = DecodeBatch(
            seq_lens=torch.tensor(self.lengths, device=device, dtype=torch.int32),
            table=table,
            page_size=case.page_size,
            query_start_loc=None,
            max_query_len=case.q_len,
        )

    def _make_caches(
        self, num_pages: int, dtype: torch.dtype, cache_bytes: int, generator: torch.Generator
    ) -> Tensor:
        kv_format = cache_format(self.case.kv_dtype or dtype)
        width = (self.case.kv_lora_rank, self.case.qk_rope_head_dim)
        shape = (num_pages, self.case.page_size, kv_format.row_width(*width))
        layer_bytes = math.prod(shape) * kv_format.storage.itemsize
        num_layers = max(1, math.ceil(cache_bytes / layer_bytes))
        caches = torch.empty(num_layers, *shape, device=self.device, dtype=kv_format.storage)
        if not kv_format.is_quantized:
            return caches.normal_(generator=generator)
        for cache in caches:
            for page in cache.split(-(-_QUANTIZED_TOKENS // self.case.page_size)):
                tokens = page[..., 0].numel()
                values = torch.randn(tokens, sum(width), device=self.device, generator=generator)
                kv_c, k_rope = values.split(width, dim=1)
                rows = quantize(kv_format, kv_c, k_rope, self.kv_scale)
                page.view(torch.uint8).copy_(rows.view(torch.uint8).view(page.shape))
        return caches

    @property
    def num_layers(self) -> int:
        return len(self.caches)

    def expected(self, layer: int) -> Tensor:
        """The exact output [T, H, 512] in fp64, by the definition of attention, one request at a time."""
        case, outputs = self.case, []
        for length, pages, q in zip(
            self.lengths, self.pages, self.q.view(case.batch, case.q_len, case.heads, -1), strict=True
        ):
            rows = movable(self.caches[layer])[pages.long()].view(self.caches.dtype).flatten(0, 1)[:length]
            keys = dequantize(rows, self.kv_scale, dtype=torch.float64)
            scores = q.double() @ keys.T * SOFTMAX_SCALE
            last_visible = torch.arange(length - case.q_len, length, device=self.device)
            hidden = torch.arange(length, device=self.device) > last_visible[:, None, None]
            outputs.append(scores.masked_fill_(hidden, -math.inf).softmax(-1) @ keys[:, : case.kv_lora_rank])
        return torch.cat(outputs)

    def with_rotary_columns(self) -> Inputs:
        """These inputs for implementations that need rotary columns: zeros where latents have none."""
        if self.case.qk_rope_head_dim > 0:
            return self
        padded = copy.copy(self)
        padded.case = replace(self.case, qk_rope_head_dim=ROPE_DIM)
        padded.q, padded.caches = (
            torch.nn.functional.pad(movable(x), (0, ROPE_DIM)).view(x.dtype) for x in (self.q, self.caches)
        )
        padded.q_rope = padded.q[..., self.case.kv_lora_rank :].contiguous()
        return padded
