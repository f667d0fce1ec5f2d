"""The cost model behind the choice of absorbed or vanilla attention."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from mla_backend import InvalidInputError, MLAGeometry, Policy, Rates, UnsupportedError, policy

DEEPSEEK = MLAGeometry(16, 512, 128, 64, 128, 0.1, 2048)
MINICPM3 = MLAGeometry(40, 256, 64, 32, 64, 0.1, 2560, 768)
GLM_4_7_FLASH = MLAGeometry(20, 512, 192, 64, 256, 0.1, 2048, 768)

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

FLOPS_ONLY = policy.FLOPS_ALONE


@pytest.mark.parametrize(("geometry", "long_prefix"), [(DEEPSEEK, 171), (MINICPM3, 85), (GLM_4_7_FLASH, 398)])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_crossover_equals_the_closed_form(geometry, long_prefix, heads):
    geometry = dataclasses.replace(geometry, num_heads=heads)
    chosen = Policy(geometry, FLOPS_ONLY)
    expanded = geometry.qk_nope_head_dim + geometry.v_head_dim
    star = geometry.kv_lora_rank * expanded / (2 * geometry.kv_lora_rank - expanded)
    assert round(star) == long_prefix
    assert chosen.crossover(1 << 20) == pytest.approx(star, rel=1e-3)
    assert chosen.absorbed_query_limit() == int(star)
    # With a prefix P: s²/2 + s·P = P·s*.
    for prefix in (1, 100, 1000, 30000):
        expected = math.sqrt(prefix**2 + 2 * prefix * star) - prefix
        assert chosen.crossover(prefix) == pytest.approx(expected if expected >= 1 else 0, rel=1e-3)


@pytest.mark.parametrize("device", policy.SHIPPED_RATES)
@pytest.mark.parametrize("geometry", [DEEPSEEK, MINICPM3, GLM_4_7_FLASH])
def test_default_rates_agree_with_common_sense(device, geometry):
    chosen = Policy(geometry, policy.SHIPPED_RATES[device])
    assert all(chosen.absorbed(1, prefix) for prefix in (100, 1000, 100_000)), "decode is absorbed"
    assert not chosen.absorbed(4096, 0), "a long prompt is not"
    assert not chosen.absorbed(4096, 4096)
    crossovers = [chosen.crossover(prefix) for prefix in (100, 1000, 10_000, 100_000)]
    assert crossovers == sorted(crossovers), "a longer prefix favours absorption"
    assert chosen.absorbed_query_limit() == int(chosen.crossover(1 << 20))


@pytest.mark.parametrize("prefix", [64, 1000, 20_000])
def test_the_choice_follows_the_crossover(prefix):
    chosen = Policy(DEEPSEEK, policy.SHIPPED_RATES["H200"])
    star = chosen.crossover(prefix)
    assert 10 < star < 600
    assert chosen.absorbed(int(star), prefix)
    assert not chosen.absorbed(math.ceil(star), prefix)
    assert chosen.absorbed_seconds(star, prefix) == pytest.approx(
        chosen.vanilla_seconds(star, prefix), rel=1e-3
    )


def test_on_hopper_the_choice_costs_little_wherever_both_were_measured():
    measured = json.loads((RESULTS / "crossover-h200.json").read_text())
    rates = policy.SHIPPED_RATES["H200"]
    assert dataclasses.asdict(rates) == pytest.approx(measured["rates"], rel=2e-3)
    chosen = Policy(DEEPSEEK, rates)
    for row in measured["rows"]:
        absorbed, vanilla = row["absorb_us"] + row["absorbed_us"], row["expand_us"] + row["vanilla_us"]
        taken = absorbed if chosen.absorbed(row["query_len"], row["prefix_len"]) else vanilla
        assert taken <= 1.05 * min(absorbed, vanilla)
    assert chosen.absorbed_query_limit() == 537


def test_rates_move_the_crossover_the_right_way():
    base = policy.SHIPPED_RATES["H200"]
    star = Policy(DEEPSEEK, base).crossover(10_000)
    faster = {
        f.name: dataclasses.replace(base, **{f.name: 2 * getattr(base, f.name)})
        for f in dataclasses.fields(base)
    }
    moved = {name: Policy(DEEPSEEK, rates).crossover(10_000) for name, rates in faster.items()}
    assert moved["absorbed_flops"] > star
    assert moved["vanilla_flops"] < star
    assert moved["gemm_flops"] < star
    assert moved["bytes_per_s"] < star


def test_crossover_at_the_ends():
    # Without a prefix both multiply the same weights, and absorbed attention costs more FLOPs.
    assert Policy(DEEPSEEK, FLOPS_ONLY).crossover(0) == 0.0
    assert Policy(DEEPSEEK, FLOPS_ONLY).absorbed_query_limit(0) == 1
    free_absorbed = dataclasses.replace(FLOPS_ONLY, absorbed_flops=math.inf)
    assert Policy(DEEPSEEK, free_absorbed).crossover(100_000) == math.inf
    assert Policy(DEEPSEEK, free_absorbed).absorbed_query_limit() == 1 << 20


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Rates)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "1", None, True])
def test_rates_must_be_positive(field, value):
    with pytest.raises(InvalidInputError, match=f"Rates.{field} must be a positive number, got {value!r}"):
        dataclasses.replace(FLOPS_ONLY, **{field: value})


def test_rates_of_what_is_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="no device 'cuda': torch sees 0 GPUs"):
        policy.default_rates("cuda")
    with pytest.raises(InvalidInputError, match="device must be one of torch's.*got 'foo'"):
        policy.default_rates("foo")


def test_shipped_rates_of_the_cpu():
    assert policy.shipped_rates("cpu") is policy.SHIPPED_RATES["cpu"]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.delenv("MLA_BACKEND_RATES", raising=False)

    def pretend(name, capability):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        return policy.default_rates("cuda:0")

    return pretend


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA Unheard-of 3000"])
def test_hopper_gpus_have_the_rates_measured_on_an_h200(gpu, name):
    assert gpu(name, (9, 0)) is policy.SHIPPED_RATES["H200"]


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_on_gpus_that_never_ran_the_choice_is_by_flops_alone(gpu, capability):
    rates = gpu("NVIDIA Unheard-of 3000", capability)
    assert [Policy(g, rates).absorbed_query_limit() for g in (DEEPSEEK, MINICPM3, GLM_4_7_FLASH)] == [
        170,
        85,
        398,
    ]


MEASURED = {"gemm_flops": 1e14, "absorbed_flops": 2e14, "vanilla_flops": 3e14, "bytes_per_s": 4e12}


def test_a_results_file_replaces_the_shipped_rates(gpu, tmp_path, monkeypatch):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"machine": {"device": "NVIDIA H20"}, "dtype": "bfloat16", "rates": MEASURED}))
    shipped = gpu("NVIDIA H20", (9, 0))
    monkeypatch.setenv("MLA_BACKEND_RATES", str(path))
    assert policy.default_rates("cuda") == Rates(**MEASURED)
    assert policy.shipped_rates("cuda") == shipped
    assert str(path) in policy.default_rates_and_origin("cuda")[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, "No such file"),
        ("not JSON", "not a results file"),
        ("[]", "not a results file"),
        ({"rates": {"gemm_flops": 1e14}}, "not a results file"),
        ({"rates": MEASURED | {"gemm_flops": -1.0}}, "Rates.gemm_flops must be a positive number"),
        ({"rates": MEASURED | {"gemm_flops": "fast"}}, "not a results file"),
        ({"machine": {"device": "NVIDIA H200"}}, "measured on NVIDIA H200, not on NVIDIA H20"),
        ({"dtype": "float32"}, "measured in float32"),
    ],
)
def test_a_results_file_that_does_not_serve_is_refused(gpu, tmp_path, monkeypatch, change, why):
    path = tmp_path / "rates.json"
    gpu("NVIDIA H20", (9, 0))
    right = {"machine": {"device": "NVIDIA H20"}, "dtype": "bfloat16", "rates": MEASURED}
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps(right | change))
    monkeypatch.setenv("MLA_BACKEND_RATES", str(path))
    with pytest.raises(
        InvalidInputError, match=f"MLA_BACKEND_RATES={path}: .*{why}.*mla-backend bench crossover"
    ):
        policy.default_rates("cuda")


def test_costs_rise_with_every_length():
    chosen = Policy(DEEPSEEK, policy.SHIPPED_RATES["H200"])
    for seconds in (chosen.absorbed_seconds, chosen.vanilla_seconds):
        for a, b in itertools.pairwise((1, 10, 100, 1000)):
            assert seconds(a, 500) < seconds(b, 500)
            assert seconds(50, a) < seconds(50, b)
