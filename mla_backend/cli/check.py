"""`mla-backend check`: does a kernel work here, and how fast is it?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from mla_backend.cli.console import FAILED, WRONG_ARGUMENTS, end, make_console
from mla_backend.errors import InvalidInputError, KernelBuildError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from mla_backend.batch import DecodeBatch
    from mla_backend.decode import MLADecoder

_HEADS, _LATENT, _ROPE, _PAGE = 16, 512, 64, 64
_LENGTHS = (1, 64, 100, 1000, 3000)  # of the requests that are compared with fp64
_REQUESTS, _CONTEXT = 64, 4096  # that are timed
_LARGEST_ERROR = 4e-3  # relative L2, of bf16
_SCALE = 192**-0.5


def check(
    device: Annotated[
        str | None, typer.Option(help="Such as cuda:1, or cpu. Default: the GPU here, else the CPU.")
    ] = None,
) -> None:
    """Build one kernel, compare it with fp64, and time it. Takes about 20 seconds on a GPU.

    Exits with 1 if the kernel cannot run here or its results are wrong.
    """
    where = _device(device)
    console = make_console()
    begin = time.monotonic()
    try:
        decoder = _decoder(where, len(_LENGTHS))
        console.print(
            f"decode kernel: {decoder.implementation} ({decoder.reason}), ready after "
            f"{time.monotonic() - begin:.1f} s",
            highlight=False,
        )
        error = _error(decoder, where)
        console.print(f"relative L2 error against fp64: {error:.1e}", highlight=False)
        if not error < _LARGEST_ERROR:  # NaN is an error, too
            end(f"WRONG: at most {_LARGEST_ERROR:.0e} is right; please report it with `mla-backend doctor`")
        console.print(_speed(where), highlight=False)
    except (InvalidInputError, KernelBuildError, UnsupportedError) as failure:
        end(str(failure))
    console.print("ok", style="bold green")


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        end(f"{name!r} is not a device: write cuda, cuda:1 or cpu", WRONG_ARGUMENTS)
    if device.type not in ("cuda", "cpu"):
        end(f"{name!r} is not a device: write cuda, cuda:1 or cpu", WRONG_ARGUMENTS)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        end(f"there is no {device} here: torch sees {torch.cuda.device_count()} GPUs", FAILED)
    return device


def _decoder(device: torch.device, requests: int) -> MLADecoder:
    import torch

    from mla_backend.decode import MLADecoder

    return MLADecoder(
        num_heads=_HEADS,
        kv_lora_rank=_LATENT,
        qk_rope_head_dim=_ROPE,
        page_size=_PAGE,
        dtype=torch.bfloat16,
        device=device,
        max_batch=requests,
    )


def _batch(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, DecodeBatch]:
    """A cache of random latents, the table of requests whose pages are scattered over it, and their batch."""
    import torch

    from mla_backend.batch import DecodeBatch

    generator = torch.Generator().manual_seed(0)
    widest = -(-max(lengths) // _PAGE)
    pages = torch.randperm(len(lengths) * widest, generator=generator).view(len(lengths), widest)
    cache = torch.randn(pages.numel(), _PAGE, _LATENT + _ROPE, device=device).to(torch.bfloat16)
    table = pages.to(device, torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return cache, table, DecodeBatch(seq_lens, table, page_size=_PAGE)


def _error(decoder: MLADecoder, device: torch.device) -> float:
    """The relative L2 error of outputs against attention in fp64."""
    import torch

    cache, table, batch = _batch(list(_LENGTHS), device)
    q = torch.randn(len(_LENGTHS), _HEADS, _LATENT + _ROPE, device=device).to(torch.bfloat16)
    out, _ = decoder.run(q[..., :_LATENT], q[..., _LATENT:], cache, decoder.plan(batch), _SCALE)
    expected = []
    for row, (length, pages) in enumerate(zip(_LENGTHS, table.tolist(), strict=True)):
        keys = cache[pages].flatten(0, 1)[:length].double()
        weights = torch.softmax(q[row].double() @ keys.T * _SCALE, -1)
        expected.append(weights @ keys[:, :_LATENT])
    right = torch.stack(expected)
    return float((out.double() - right).norm() / right.norm())


def _speed(device: torch.device) -> str:
    """One line with the time of a layer's attention; on a GPU also how close it is to a copy's rate."""
    import torch

    requests, context = (_REQUESTS, _CONTEXT) if device.type == "cuda" else (4, 512)
    decoder = _decoder(device, requests)
    cache, _, batch = _batch([context] * requests, device)
    q = torch.randn(requests, _HEADS, _LATENT + _ROPE, device=device).to(torch.bfloat16)
    plan = decoder.plan(batch)
    seconds = _seconds(lambda: decoder.run(q[..., :_LATENT], q[..., _LATENT:], cache, plan, _SCALE), device)
    shape = f"{requests} requests of {context:,} tokens with {_HEADS} heads: {seconds * 1e6:,.0f} µs a layer"
    if device.type == "cpu":
        return shape
    rate = cache.numel() * cache.element_size() / seconds
    copied = torch.empty_like(cache)
    copy_rate = 2 * cache.numel() * cache.element_size() / _seconds(lambda: copied.copy_(cache), device)
    return f"{shape}, {rate / 1e12:.2f} TB/s (a copy in this memory: {copy_rate / 1e12:.2f} TB/s)"


def _seconds(call, device: torch.device, repeats: int = 20) -> float:
    """The median time of a call."""
    import statistics

    import torch

    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(torch.cuda.current_stream(device))
            call()
            stop.record(torch.cuda.current_stream(device))
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e-3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
