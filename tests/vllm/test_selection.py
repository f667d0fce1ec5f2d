"""Who gets this backend: those who ask for it, with a reason where it cannot serve them; nobody else."""

import pickle
import re
import subprocess
import sys
import types

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import mla_backend_vllm
from mla_backend_vllm import BACKEND_NAME, BACKEND_PATH, selection_name
from mla_backend_vllm.prefill import MLAPrefill

mla_backend_vllm.register()

NAMES = sorted({"CUSTOM", selection_name()})
STOCK = {backend.get_path() for backend in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA)}


def selector_config(**changes):
    config = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    config |= {"use_mla": True} | changes
    return AttentionSelectorConfig(**config)


def select(backend, platform=current_platform, **changes):
    return platform.get_attn_backend_cls(backend, selector_config(**changes), num_heads=16)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"head_size": 288},
        {"kv_cache_dtype": "bfloat16"},
        {"use_batch_invariant": True},
        *({"block_size": size} for size in (16, 32, 64, 128)),
    ],
    ids=str,
)
def test_selected_on_the_cpu(name, changes):
    assert select(AttentionBackendEnum[name], **changes) == BACKEND_PATH


REFUSED = {
    "keeps the latent cache in the model's dtype": {"kv_cache_dtype": "fp8"},
    "kv_cache_dtype 'float16' is not implemented": {"kv_cache_dtype": "float16"},
    "block_size not supported": {"block_size": 8},
    "dtype not supported": {"dtype": torch.float64},
    "non-MLA not supported": {"use_mla": False},
    "sparse not supported": {"use_sparse": True},
    "sink": {"has_sink": True},
    "sliding window": {"has_sliding_window": True},
    "non-causal": {"use_non_causal": True},
    "context parallelism": {"use_dcp": True},
    "context parallelism (DCP, PCP)": {"use_pcp": True},
    "attention type encoder": {"attn_type": "encoder"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_with_a_reason(reason):
    changes = REFUSED[reason]
    if not changes.keys() <= set(AttentionSelectorConfig._fields):
        pytest.skip(f"this vLLM does not know {', '.join(changes)}")
    with pytest.raises(ValueError, match=re.escape(reason)):
        select(AttentionBackendEnum.CUSTOM, **changes)


@pytest.mark.parametrize("backend", [None, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.TRITON_MLA])
def test_stock_backend_for_those_who_do_not_ask(backend):
    assert select(backend) in STOCK


def test_default_on_request(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
    assert select(None) == BACKEND_PATH
    assert select(AttentionBackendEnum.CPU_MLA) in STOCK
    assert select(None, kv_cache_dtype="fp8") in STOCK, "what we refuse must fall through"
    assert select(None, use_mla=False) == AttentionBackendEnum.CPU_ATTN.get_path()


@pytest.mark.parametrize("block_size", [16, 64])
def test_cpu_without_amx_keeps_the_users_configuration(deepseek_path, monkeypatch, block_size):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def config(backend):
        return EngineArgs(
            str(deepseek_path),
            attention_backend=backend,
            block_size=block_size,
            max_model_len=1024,
            max_num_batched_tokens=96,
            enable_prefix_caching=True,
        ).create_engine_config()

    ours, stock = config("CUSTOM"), config("CPU_MLA")
    assert ours.cache_config.block_size == block_size
    assert ours.cache_config.enable_prefix_caching
    assert ours.scheduler_config.enable_chunked_prefill
    assert ours.scheduler_config.max_num_batched_tokens == 96
    assert stock.cache_config.block_size == 16
    assert not stock.cache_config.enable_prefix_caching


def test_prefill_backend_for_head_dims_that_vllm_refuses(deepseek_path, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from mla_backend_vllm import backend

    def refuse(config):
        raise ValueError("no prefill backend takes these head dims")

    config = EngineArgs(str(deepseek_path), attention_backend="CUSTOM").create_engine_config()
    backend._ensure_prefill_backend(config)
    assert config.attention_config.mla_prefill_backend is None
    monkeypatch.setattr(backend, "get_mla_prefill_backend", refuse)
    backend._ensure_prefill_backend(config)
    chosen = config.attention_config.mla_prefill_backend
    assert chosen is MLAPrefillBackendEnum.CUSTOM
    assert chosen.get_class() is MLAPrefill


def run_python(code, stdin=None):
    result = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@pytest.mark.skipif(BACKEND_NAME not in NAMES, reason="this vLLM takes no names")
def test_name_is_unpickled_before_plugins_are_loaded():
    code = "import pickle, sys; b = pickle.load(sys.stdin.buffer); print(b.name, b.get_path())"
    output = run_python(code, pickle.dumps(AttentionBackendEnum[BACKEND_NAME]))
    assert output.split() == [BACKEND_NAME, BACKEND_PATH]


def test_registering_twice_is_harmless_and_loads_no_backend():
    output = run_python(
        "import sys, mla_backend_vllm as m; m.register(); m.register()\n"
        "import torch; print('mla_backend_vllm.backend' in sys.modules, torch.cuda.is_initialized())"
    )
    assert output.splitlines()[-1] == "False False"


@pytest.fixture
def cuda_platform(monkeypatch):
    """vLLM's CUDA platform with a made-up compute capability, importable without its compiled extensions."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    def platform(major, minor):
        capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
        return type("FakeCudaPlatform", (CudaPlatformBase,), {"get_device_capability": capability})

    return platform


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_selected_on_cuda(cuda_platform, capability):
    assert select(AttentionBackendEnum.CUSTOM, cuda_platform(*capability)) == BACKEND_PATH
    with pytest.raises(ValueError, match="dtype not supported"):
        select(AttentionBackendEnum.CUSTOM, cuda_platform(*capability), dtype=torch.float64)


def test_refused_on_gpus_without_kernels(cuda_platform):
    with pytest.raises(ValueError, match="this GPU has 7.5"):
        select(AttentionBackendEnum.CUSTOM, cuda_platform(7, 5))


def test_default_on_cuda_on_request(cuda_platform, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
    mla_backend_vllm.register()
    try:
        for capability in ((8, 0), (9, 0)):
            assert select(None, cuda_platform(*capability)) == BACKEND_PATH
        refused = select(None, cuda_platform(9, 0), kv_cache_dtype="fp8")
        assert refused == AttentionBackendEnum.TRITON_MLA.get_path()
    finally:
        AttentionBackendEnum.FLASH_ATTN_MLA.clear_override()
