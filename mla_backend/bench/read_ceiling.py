"""The rate at which this GPU reads memory, with nothing to do for what it reads: the roof of decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_backend import jit
from mla_backend.bench.timing import Replay, measure_in_turn
from mla_backend.errors import KernelBuildError

# 16-byte loads, 8 of a thread in flight, from as many threads as fit. What is read goes into a checksum
# that is stored only if it takes one value out of 2^32, so that the loads cannot be removed.
_SOURCE = r"""
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

constexpr int kLoads = 8;

__global__ void __launch_bounds__(512) read_kernel(const uint4* data, int64_t count, unsigned* sink) {
  int64_t threads = int64_t(gridDim.x) * blockDim.x;
  unsigned checksum = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += kLoads * threads) {
    uint4 values[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      int64_t at = i + j * threads;
      values[j] = at < count ? __ldcs(data + at) : uint4{};
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) checksum ^= values[j].x ^ values[j].y ^ values[j].z ^ values[j].w;
  }
  if (checksum == 0x9e3779b9u) *sink = checksum;
}

void read(tvm::ffi::TensorView data, tvm::ffi::TensorView sink, int64_t blocks) {
  DLDevice device = data.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  int64_t count = data.numel() * (data.dtype().bits / 8) / int64_t(sizeof(uint4));
  read_kernel<<<blocks, 512, 0, stream>>>(static_cast<const uint4*>(data.data_ptr()), count,
                                          static_cast<unsigned*>(sink.data_ptr()));
  if (cudaError_t error = cudaGetLastError()) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(error);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, read);
"""
_BUFFER_BYTES = 4 << 30


def measure(device: torch.device) -> dict[str, float]:
    """Bytes per second of several ways to read a buffer far larger than the L2 cache, by name.

    A copy counts its reads and writes. The ceiling is the largest of them.
    """
    size = _BUFFER_BYTES if device.type == "cuda" else 64 << 20
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    data = torch.randint(-9, 9, (size // 4096 * 1024,), dtype=torch.int32, device=device)
    half = data.numel() // 2
    candidates: dict[str, tuple[Callable[[int], Any], int]] = {
        "torch copy": (lambda _: data[:half].copy_(data[half:]), data.nbytes),
        "torch max": (lambda _: data.max(), data.nbytes),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        sms = properties.multi_processor_count
        sink = torch.zeros(1, dtype=torch.int32, device=device)
        try:
            module = jit.load(jit.KernelVariant("read-ceiling", _SOURCE, jit.arch_of(device)))
            for per_sm in (1, 2, 4):
                candidates[f"16-byte loads, {per_sm} CTAs per SM"] = (
                    lambda _, blocks=per_sm * sms: module.read(data, sink, blocks),
                    data.nbytes,
                )
        except KernelBuildError:  # no compiler: torch's own kernels come close
            pass
    replays = {name: Replay(run, 1, device) for name, (run, _) in candidates.items()}
    seconds = measure_in_turn(replays, rounds=3)
    return {name: candidates[name][1] / seconds[name] for name in candidates}
