// Tensors as emulator.py passes them, and exported functions as it calls them.
#pragma once
#include <driver_types.h>

#include <iostream>
#include <sstream>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

namespace emulation {

// An argument of an exported function: an integer, a number or a tensor, whose `data` is null if it is None.
struct Argument {
    int64_t integer;
    double number;
    void* data;
    int64_t bits, sizes[4], strides[4];
    int64_t ndim;
};

struct Error {
    std::ostringstream text;
    ~Error() noexcept(false) { throw std::runtime_error(text.str()); }
    template <typename T>
    Error& operator<<(const T& part) {
        text << part;
        return *this;
    }
};

inline int multiprocessors;  // of the stream

}  // namespace emulation

#define TVM_FFI_THROW(kind) emulation::Error() << #kind << ": "

namespace mla::ffi {

class TensorView {
    const emulation::Argument* tensor_;

  public:
    struct Device {
        int device_type, device_id;
    };
    struct Type {
        int64_t bits;
    };
    explicit TensorView(const emulation::Argument& tensor) : tensor_(&tensor) {}
    void* data_ptr() const { return tensor_->data; }
    int ndim() const { return static_cast<int>(tensor_->ndim); }
    int64_t size(int i) const { return tensor_->sizes[i]; }
    int64_t stride(int i) const { return tensor_->strides[i]; }
    Type dtype() const { return {tensor_->bits}; }
    Device device() const { return {}; }
};

template <typename T>
class Optional {
    const emulation::Argument* tensor_;

  public:
    explicit Optional(const emulation::Argument& tensor) : tensor_(&tensor) {}
    bool has_value() const { return tensor_->data != nullptr; }
    T operator*() const { return T(*tensor_); }
};

using Shape = std::vector<int64_t>;

inline cudaStream_t stream_of(const TensorView&) { return nullptr; }

}  // namespace mla::ffi

namespace emulation {

template <typename T>
T converted(const Argument& argument) {
    if constexpr (std::is_floating_point_v<T>)
        return argument.number;
    else if constexpr (std::is_integral_v<T>)
        return static_cast<T>(argument.integer);
    else
        return T(argument);
}

// Returns the number of results; -1 after a message about an error.
template <typename Result, typename... Parameters, size_t... kIndices>
int call(Result (*function)(Parameters...), const Argument* arguments, int64_t* results,
         std::index_sequence<kIndices...>) {
    int count = 0;
    if constexpr (std::is_void_v<Result>)
        function(converted<Parameters>(arguments[kIndices])...);
    else if constexpr (std::is_integral_v<Result>)
        results[count++] = function(converted<Parameters>(arguments[kIndices])...);
    else
        for (int64_t result : function(converted<Parameters>(arguments[kIndices])...)) results[count++] = result;
    return count;
}
template <typename Result, typename... Parameters>
int call(Result (*function)(Parameters...), const Argument* arguments, int64_t* results) try {
    return call(function, arguments, results, std::index_sequence_for<Parameters...>());
} catch (const std::runtime_error& error) {
    std::cerr << error.what() << std::endl;
    return -1;
}

}  // namespace emulation

#define TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function)                                                             \
    extern "C" int exported_##name(const emulation::Argument* arguments, int64_t* results, int multiprocessors) { \
        emulation::multiprocessors = multiprocessors;                                                             \
        return emulation::call(function, arguments, results);                                                     \
    }
