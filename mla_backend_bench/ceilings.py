"""What this GPU reaches when it only reads memory, or only multiplies: no decode kernel can be faster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend_bench.timing import Replay, measure_in_turn

# Each thread has 8 loads of 16 bytes in flight. The checksum, which is stored for one value out of 2^32 only,
# keeps the compiler from removing the loads.
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
_PRODUCT_SIZE = 8192


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of torch's product of two random 8192 x 8192 matrices on a GPU."""
    a, b = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device) for _ in range(2))
    replay = Replay(lambda _: a @ b, 1, device)
    return 2 * _PRODUCT_SIZE**3 / measure_in_turn({"product": replay}, rounds=3)["product"].median


def read_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second, by name, of several ways to read a buffer far larger than the L2 cache.

    A copy counts the bytes that it reads and those that it writes. The read ceiling is the highest rate.
    """
    size = _BUFFER_BYTES if device.type == "cuda" else 64 << 20
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    data = torch.randint(-9, 9, (size // 4096 * 1024,), dtype=torch.int32, device=device)
    half = data.numel() // 2
    readers: dict[str, Callable[[int], Any]] = {
        "torch copy": lambda _: data[:half].copy_(data[half:]),
        "torch max": lambda _: data.max(),
    }
    if device.type == "cuda":
        # Without a compiler torch's own kernels, which come close, are enough.
        with contextlib.suppress(KernelBuildError):
            readers |= _load_kernels(data)
    replays = {name: Replay(run, 1, device) for name, run in readers.items()}
    times = measure_in_turn(replays, rounds=3)
    return {name: data.nbytes / times[name].median for name in readers}


def _load_kernels(data: Tensor) -> dict[str, Callable[[int], Any]]:
    """The kernel above at several numbers of CTAs per SM, by name."""
    module = jit.load(jit.KernelVariant("read-ceiling", _SOURCE, jit.arch_of(data.device)))
    sms = torch.cuda.get_device_properties(data.device).multi_processor_count
    sink = torch.zeros(1, dtype=torch.int32, device=data.device)

    def reader(ctas_per_sm: int) -> Callable[[int], Any]:
        return lambda _: module.read(data, sink, ctas_per_sm * sms)

    return {f"16-byte loads, {count} CTAs per SM": reader(count) for count in (1, 2, 4)}
