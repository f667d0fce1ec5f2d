#pragma once
#include <cuda.h>

#include "mbarrier.cuh"
#include "operands.cuh"

namespace mla {

// What a CUtensorMap stands for here; strides are of all dimensions but the first, in bytes.
struct TensorMap {
    const unsigned char* base;
    int64_t sizes[5], strides[4];
    int box[5];
    int element_bytes;
    uint32_t swizzle;  // which of address bits 7 to 9 are exclusive-ored with bits 4 to 6
};

inline void prefetch_tensor_map(const CUtensorMap*) {}

struct BlockedCoordinates {
    int column, row_in_group, column_block, token_group, page;
};
struct PlainCoordinates {
    int column, row, page;
};

// Prefetches change nothing, but have to begin inside the cache.
template <typename Coordinates>
void tma_prefetch(const CUtensorMap* map, uint64_t, const Coordinates& coordinates) {
    const int64_t* size = reinterpret_cast<const TensorMap*>(map)->sizes;
    int at[sizeof(Coordinates) / sizeof(int)];
    std::memcpy(at, &coordinates, sizeof(at));
    for (int index : at)
        if (index < 0 || index >= *size++) emulation::fail("a prefetch begins outside of the cache");
}
inline void bulk_prefetch(const void* source, int bytes, uint64_t) {
    if (reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) emulation::fail("a prefetch is not aligned");
    volatile unsigned char last = static_cast<const unsigned char*>(source)[bytes - 1];
    (void)last;
}

// Done at once, to a CTA's shared memory.
template <typename Coordinates>
void load_box(emulation::Cta& cta, void* destination, const CUtensorMap* map, Barrier* barrier,
              const Coordinates& coordinates) {
    emulation::need_predecessor();
    emulation::Actor engine;
    engine.begin("TMA");
    const emulation::Acting acting(engine);
    const auto& tensor = *reinterpret_cast<const TensorMap*>(map);
    int at[5] = {};
    std::memcpy(at, &coordinates, sizeof(coordinates));
    uint64_t values = 0;
    const int together = sizeof(values) / tensor.element_bytes;  // elements, of which rows have a multiple
    uint32_t offset = smem_address(destination);
    const uint32_t begin = offset;
    const int elements = tensor.box[0] * tensor.box[1] * tensor.box[2] * tensor.box[3] * tensor.box[4];
    for (int element = 0; element < elements; element += together, offset += sizeof(values)) {
        const unsigned char* source = tensor.base;
        bool inside = true;
        for (int i = 0, rest = element; i < 5; rest /= tensor.box[i++]) {
            const int64_t index = at[i] + rest % tensor.box[i];
            inside &= index >= 0 && index < tensor.sizes[i];
            source += index * (i == 0 ? tensor.element_bytes : tensor.strides[i - 1]);
        }
        values = 0;
        if (inside) std::memcpy(&values, source, sizeof(values));
        std::memcpy(emulation::at_shared(offset ^ (offset >> 7 & tensor.swizzle) << 4, sizeof(values), cta), &values,
                    sizeof(values));
    }
    barrier->complete(offset - begin);
}
template <typename Coordinates>
void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t, const Coordinates& coordinates) {
    load_box(*emulation::current->cta, destination, map, barrier, coordinates);
}
template <typename Coordinates>
void tma_multicast(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t,
                   const Coordinates& coordinates) {
    load_box(*emulation::current->cta, destination, map, barrier, coordinates);
    auto& at_partner = emulation::at_partner(*barrier);
    load_box(*emulation::current->cta->partner, destination, map, &at_partner, coordinates);
}

inline bool elect_one() {
    emulation::meet_warp();
    return emulation::lane() == 0;
}

}  // namespace mla
