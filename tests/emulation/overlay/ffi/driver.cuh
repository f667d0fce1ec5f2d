#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>

#include "../ptx/tma.cuh"
#include "tvm.cuh"

namespace mla::ffi {

struct DeviceScope {
    explicit DeviceScope(int) {}
};

inline int multiprocessors_of(cudaStream_t) { return emulation::multiprocessors; }

inline CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                  const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    TensorMap tensor = {static_cast<const unsigned char*>(base), {1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}};
    tensor.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    tensor.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 7 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 3 : 0;
    for (cuuint32_t i = 0; i < rank; ++i) {
        tensor.sizes[i] = sizes[i], tensor.box[i] = box[i];
        if (i > 0) tensor.strides[i - 1] = strides[i - 1];
    }
    static_assert(sizeof(tensor) <= sizeof(*map));
    std::memcpy(map, &tensor, sizeof(tensor));
    return CUDA_SUCCESS;
}
template <typename Function>
Function driver_function(const char*, unsigned) {
    return encode_tensor_map;
}

}  // namespace mla::ffi
