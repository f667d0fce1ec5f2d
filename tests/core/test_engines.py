"""The supported versions of the engines, the files that repeat them, and the start-up line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_backend import MLADecoder, Shard, TableKind, UnsupportedError, engines, jit
from mla_backend.engines import (
    SGLANG,
    VLLM,
    describe_kernels,
    describe_threshold,
    make_decoder,
    start_line,
)
from mla_backend.spec import DecoderSpec

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_extras_are_the_supported_range(engine):
    extras = re.findall(r'^\w+ = \["([^"]+)"\]$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    *head, tail = engine.last.split(".")
    beyond = ".".join([*head, str(int(tail) + 1)])
    assert f"{engine.distributions[0]}>={engine.first},<{beyond}" in extras


@pytest.mark.parametrize(
    ("engine", "doc"), [(VLLM, "docs/vllm.md"), (SGLANG, "docs/sglang.md")], ids=["vLLM", "SGLang"]
)
def test_docs_name_the_supported_range(engine, doc):
    for file in ("README.md", doc):
        assert engine.supported in (CHECKOUT / file).read_text(), file


@pytest.mark.parametrize(
    ("version", "relation"),
    [
        ("0.25.1", "older"),
        ("0.26.0rc1", None),
        ("0.26.0", None),
        ("0.33.0", None),
        ("0.33.4.post1", None),
        ("0.34.0.dev7+g1234", "newer"),
        ("1.0", "newer"),
    ],
)
def test_versions_outside_of_the_range_are_named(version, relation):
    remark = VLLM.unsupported(version)
    if relation is None:
        assert remark is None
    else:
        assert version in remark
        assert relation in remark
        assert VLLM.supported in remark


def test_a_version_that_cannot_be_read_is_named():
    assert "'dev'" in SGLANG.unsupported("dev") and SGLANG.supported in SGLANG.unsupported("dev")


def test_a_longer_release_counts_as_the_last():
    assert SGLANG.unsupported("0.5.23.post2") is None
    assert "newer" in SGLANG.unsupported("0.5.24")


def spec(device):
    return DecoderSpec(
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        page_size=64,
        table_kind=TableKind.BLOCK,
        device=torch.device(device),
        max_batch=4,
        max_query_len=1,
        batch_invariant=False,
    )


@pytest.mark.parametrize(
    ("num_missing", "state"),
    [(0, "2 kernels from the cache"), (1, "2 kernels, 1 of them built at this start")],
)
def test_kernels_from_the_cache_and_kernels_to_build(monkeypatch, num_missing, state):
    entries = iter([None] * num_missing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(jit, "find_entry", lambda variant: next(entries, Path()))
    assert describe_kernels(spec("cuda"), with_append=True) == state
    assert describe_kernels(spec("cpu")) is None


def test_plain_torch_on_a_gpu_is_refused(monkeypatch):
    plain = SimpleNamespace(implementation="torch", reason="no kernel")
    monkeypatch.setattr(engines, "MLADecoder", lambda **_: plain)
    assert make_decoder(spec("cpu"), "ours") is plain
    refusal = r"^ours has no kernel .* \(no kernel\): choose another --attention-backend"
    with pytest.raises(UnsupportedError, match=refusal):
        make_decoder(spec("cuda"), "ours")


@pytest.mark.parametrize(("version", "remark"), [("0.30.1", "supported"), ("dev", "not a supported version")])
def test_start_line(monkeypatch, version, remark):
    decoder = MLADecoder(
        num_heads=4,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        dtype=torch.float32,
        page_size=16,
        device="cpu",
        max_batch=1,
    )
    line = start_line(
        VLLM, version, decoder, kernels=None, prefill_library="torch", absorbed=describe_threshold(537)
    )
    assert f" in vLLM {version} ({remark}) on the CPU; decode kernel: {decoder.implementation} (" in line
    assert line.endswith(
        "; cache: float32, 160 bytes per token and layer; page size: 16; prefill library: torch; "
        "requests with at most 537 new tokens use absorbed attention, longer ones regular prefill"
    )
    with_kernels = start_line(
        VLLM,
        version,
        decoder,
        kernels="4 kernels from the cache",
        prefill_library="torch",
        absorbed="",
        cache_tokens=5000,
    )
    assert (
        "; 4 kernels from the cache; cache: float32, 160 bytes per token and layer, 5,000 tokens; "
        in with_kernels
    )
    shard = start_line(
        VLLM, version, decoder, kernels=None, prefill_library="", absorbed="", shard=Shard(1, 4, 64)
    )
    assert shard.endswith("this is rank 1 of 4, whose cache has one in 4 runs of 64 tokens of each request")
    assert describe_threshold(1).startswith("requests with at most 1 new token use")
    assert "MLA_BACKEND" not in line
    monkeypatch.setenv("MLA_BACKEND_CACHE_DIR", "/somewhere")
    misspelled = start_line(VLLM, version, decoder, kernels=None, prefill_library="", absorbed="")
    assert misspelled.endswith("; set, but read by nothing: MLA_BACKEND_CACHE_DIR")
