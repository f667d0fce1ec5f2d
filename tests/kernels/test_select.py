"""Which kernels are taken for which GPU, and what the portable ones are built as."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mla_backend import jit, kernels
from mla_backend.batch import TableKind
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend.errors import UnsupportedError
from mla_backend.kernels import hopper, portable
from mla_backend.kernels.base import DIMENSIONS
from mla_backend.spec import DecoderSpec

SPEC = DecoderSpec(
    num_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=64,
    table_kind=TableKind.BLOCK,
    device=torch.device("cuda"),
    max_batch=1,
    max_query_len=1,
    batch_invariant=False,
)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU of some capability; what is made is the name of the implementation."""

    def pretend(capability):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        families = {
            name: family._replace(make=lambda spec, name=name: name)
            for name, family in kernels._FAMILIES.items()
        }
        monkeypatch.setattr(kernels, "_FAMILIES", families)

    return pretend


@pytest.mark.parametrize(
    ("capability", "page_size", "taken", "why"),
    [
        ((9, 0), 64, "hopper", "compute capability 9.0"),
        ((9, 0), 4, "hopper", "compute capability 9.0"),
        ((9, 0), 12, "portable", "Hopper kernels need a page_size of 1, 2, 4 or a multiple of 8, not 12"),
        ((8, 0), 64, "portable", "Hopper kernels need compute capability 9.x, not 8.0"),
        ((8, 9), 1, "portable", "9.x, not 8.9"),
        ((10, 0), 64, "portable", "9.x, not 10.0"),
        ((12, 0), 64, "portable", "9.x, not 12.0"),
    ],
)
def test_automatic_choice(gpu, capability, page_size, taken, why):
    gpu(capability)
    implementation, reason = kernels.select(replace(SPEC, page_size=page_size), "auto")
    assert implementation == taken
    assert why in reason


@pytest.mark.parametrize(
    ("capability", "taken"), [((9, 0), "hopper"), ((8, 0), "portable"), ((8, 6), "portable")]
)
def test_e4m3_caches_have_kernels(gpu, capability, taken):
    gpu(capability)
    for num_heads in (16, 128):
        spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn, num_heads=num_heads)
        assert kernels.select(spec, "auto")[0] == taken
        (variant,) = kernels.variants_of(spec, capability)
        assert variant.name.startswith(f"{taken}_") and "-bf16-e4m3-d512_64-" in variant.name


@pytest.mark.parametrize("page_size", [1, 12, 64])
def test_lists_are_served_by_hopper_kernels_whatever_the_page_size(gpu, page_size):
    gpu((9, 0))
    spec = replace(SPEC, page_size=page_size, table_kind=TableKind.LIST)
    assert kernels.select(spec, "auto")[0] == "hopper"
    (variant,) = kernels.variants_of(spec, (9, 0))
    assert variant.name == "hopper_few_rows-bf16-d512_64-r16-lists"
    (variant,) = kernels.variants_of(spec, (8, 9))
    assert variant.name == "portable_decode-bf16-d512_64-r16-t16x4-lists"


def test_lists_in_fp8_caches(gpu):
    gpu((9, 0))
    spec = replace(SPEC, table_kind=TableKind.LIST, kv_dtype=torch.float8_e4m3fn, num_heads=32)
    (variant,) = kernels.variants_of(spec, (9, 0))
    assert variant.name == "hopper_many_rows_fp8-bf16-e4m3-d512_64-r64-lists"
    (variant,) = kernels.variants_of(spec, (8, 0))
    assert variant.name == "portable_decode-bf16-e4m3-d512_64-r32-t32x4-lists"
    (variant,) = kernels.variants_of(replace(spec, kv_dtype="fp8_ds_mla"), (9, 0))
    assert variant.name == "hopper_many_rows_fp8-bf16-rec656-d512_64-r64-lists"


def test_choice_by_name(gpu):
    gpu((9, 0))
    assert kernels.select(SPEC, "portable") == ("portable", "compute capability 9.0")


@pytest.mark.parametrize(
    ("capability", "changes", "why"),
    [
        ((7, 5), {}, "compute capability 8.0 or newer, not 7.5"),
        ((8, 0), {"dtype": torch.float32}, "dtype torch.float32"),
        ((8, 0), {"kv_dtype": "fp8_ds_mla", "dtype": torch.float16}, "use bfloat16, or an fp8_e4m3 cache"),
        ((8, 0), {"kv_dtype": torch.float16}, "a float16 cache with torch.bfloat16 queries"),
        ((8, 0), {"kv_lora_rank": 384}, "kernels exist for"),
    ],
)
def test_refusals(gpu, capability, changes, why):
    gpu(capability)
    implementation, reason = kernels.select(replace(SPEC, **changes), "auto")
    assert implementation is None and why in reason
    with pytest.raises(UnsupportedError, match=why):
        kernels.select(replace(SPEC, **changes), "portable")


def test_records_have_rotary_parts_in_bfloat16(gpu):
    gpu((9, 0))
    spec = replace(SPEC, kv_dtype="fp8_ds_mla", dtype=torch.float16)
    assert "an fp8_ds_mla cache with torch.float16 queries: use bfloat16" in kernels.select(spec, "auto")[1]
    assert kernels.select(replace(spec, dtype=torch.bfloat16), "auto")[0] == "hopper"


def test_python_and_the_kernels_agree_on_gpus_with_little_shared_memory():
    source = (jit.csrc_dir() / "ffi/decode.cuh").read_text()
    (definition,) = re.findall(r"kHasOnly99k = (.*);", source)
    assert sorted(re.findall(r"kArch == (\d+)", definition)) == sorted(portable._ARCHS_WITH_99K)


@pytest.mark.parametrize(
    ("arch", "within_99k"),
    [("80", False), ("86", True), ("87", False), ("89", True), ("90a", False), ("100", False), ("120", True)],
)
def test_portable_configurations(arch, within_99k):
    assert portable.has_only_99k(arch) == within_99k
    for dimensions in DIMENSIONS:
        m_blocks = {}
        for rows in range(1, 200):
            config = portable.decode_config(torch.float16, *dimensions, rows, arch, within_99k)
            assert config.rows >= min(rows, portable.MAX_ROWS) and config.stages >= 3
            m_blocks[config.rows] = config
        assert sorted(m_blocks) == [16, 24, 32, 48, 64]


# The most rows of an m-block that is not of 64, with TMA and without.
FEW_ROWS = [
    ((512, 64), None, 24, 24),
    ((512, 64), E4M3, 24, 24),
    ((512, 64), RECORD_656, 16, 16),
    ((256, 64), None, 32, 32),
    ((256, 64), E4M3, 32, 24),
    ((256, 32), None, 32, 32),
    ((512, 0), None, 24, 24),
    ((512, 0), E4M3, 24, 16),
]


@pytest.mark.parametrize("page_size, lists", [(64, False), (1, False), (64, True)])
@pytest.mark.parametrize("dimensions, kv_format, with_tma, without", FEW_ROWS)
def test_hopper_configurations(dimensions, kv_format, with_tma, without, page_size, lists):
    loads_pages = page_size == 64 and not lists
    most = with_tma if loads_pages else without
    for rows in range(1, 200):
        config = hopper.decode_config(torch.bfloat16, *dimensions, page_size, rows, kv_format, lists)
        assert config.tma is loads_pages and (loads_pages or config.range_ctas == 1)
        few_rows = isinstance(config, hopper.FewRowsConfig)
        assert rows <= config.rows or not few_rows or not config.for_one_m_block
        assert few_rows == (rows <= max(most, 32 if kv_format is not None and loads_pages else 0))
        assert not few_rows or config.rows <= most
        # Consumers of few rows take turns with the stages.
        assert config.stages >= 2 and (not few_rows or config.stages % 2 == 0)


@pytest.mark.parametrize(
    "arch, overlaps", [("80", "false"), ("89", "false"), ("90a", "true"), ("100", "true")]
)
def test_launches_overlap_from_hopper_on(arch, overlaps):
    assert f"}}, {overlaps}>" in kernels.append.variant(arch).source
    config = portable.decode_config(torch.bfloat16, 512, 64, 16, arch, within_99k=False)
    assert f".dependent_launch = {overlaps}, .lists = false}}>>;" in config.variant().source


@pytest.mark.parametrize("arch", ["87", "100", "120"])
def test_newer_gpus_can_build_ahead_of_time(arch):
    variants = kernels.shipped_variants(arch)
    assert all(variant.arch == arch for variant in variants)
    expected = ["portable_decode"] * 5 + ["append", "merge_states"] + ["prefill"] * 4
    assert [variant.name.partition("-")[0] for variant in variants] == expected
    assert kernels.shipped_variants("75") == []
    assert kernels.shipped_variants("90") == kernels.shipped_variants("90a")


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("capability", "page_size"), [((9, 0), 64), ((9, 0), 12), ((8, 9), 1), ((12, 0), 64)]
)
def test_variants_of_a_spec_are_those_that_its_decoder_loads(
    monkeypatch, capability, page_size, batch_invariant
):
    loaded = []

    def load_all(variants):
        loaded.extend(variants)
        kernel = SimpleNamespace(workspace=lambda: (192, 48, 8, 32, 514), resident=lambda device: 132)
        return [kernel for _ in loaded]

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    sms = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: sms)
    monkeypatch.setattr("mla_backend.jit.load_all", load_all)
    spec = replace(
        SPEC,
        device=torch.device("cpu"),
        page_size=page_size,
        max_query_len=5,
        batch_invariant=batch_invariant,
    )
    kernels.select(spec, "auto")
    assert (len(loaded) == 1) == batch_invariant
    assert kernels.variants_of(spec, capability) == loaded
    with_append = [*loaded, kernels.append.variant(loaded[0].arch)]
    assert kernels.variants_of(spec, capability, with_append=True) == with_append


def test_no_variants_where_no_kernel_serves():
    spec = replace(SPEC, kv_lora_rank=384)
    assert kernels.variants_of(spec, (9, 0)) == kernels.variants_of(spec, (9, 0), with_append=True) == []


def test_what_is_asked_before_a_gpu_is_chosen_creates_no_cuda_context(monkeypatch, tmp_path):
    def create():
        raise AssertionError("a CUDA context")

    monkeypatch.setattr("torch.cuda._lazy_init", create)
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    variants = kernels.variants_of(SPEC, (9, 0))
    assert "MLA_BACKEND_JIT=0" in jit.why_unavailable(variants)
