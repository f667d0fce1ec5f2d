"""The products of heads with weights, run on the CPU, against fp64."""

import pytest
import torch

from mla_backend.jit import KernelVariant

SOURCE = '''#include "ffi/append_and_multiply.cuh"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuk, (mla::ffi::head_product<__nv_bfloat16, 128, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuv, (mla::ffi::head_product<__nv_bfloat16, 512, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuk192, (mla::ffi::head_product<__half, 192, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuk192k, (mla::ffi::head_product<__half, 192, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuk64, (mla::ffi::head_product<__half, 64, false, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuk64k, (mla::ffi::head_product<__half, 64, true, true>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wuv256, (mla::ffi::head_product<__half, 256, true, true>));
'''

@pytest.mark.parametrize("tokens", [1, 8, 11, 64])
@pytest.mark.parametrize("name, depth, columns, k", [("wuk",128,512,0),("wuv",512,128,1),("wuk192",192,512,0),("wuk192k",192,512,1),("wuk64",64,256,0),("wuk64k",64,256,1),("wuv256",256,64,1)])
def test_products(modules, name, depth, columns, k, tokens):
    module = modules(KernelVariant("head-product-test", SOURCE, "90a"))
    dtype = torch.bfloat16 if depth in (128, 512) else torch.float16
    heads = 2
    x = torch.randn(tokens, heads, depth + 64).to(dtype)[..., :depth]
    w = torch.randn(heads, columns, depth).to(dtype).transpose(1, 2) if k else torch.randn(heads, depth, columns).to(dtype)
    out = torch.full((tokens, heads, columns + 8), float("nan"), dtype=dtype)
    getattr(module, name)(x, w, out[..., :columns], w.transpose(1, 2) if k else w)
    exact = torch.einsum("thk,hkn->thn", x.double(), w.double())
    assert out[..., columns:].isnan().all()
    torch.testing.assert_close(out[..., :columns].double(), exact, rtol=8e-3, atol=1e-2)
