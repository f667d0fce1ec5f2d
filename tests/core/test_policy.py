"""The cost model behind the choice of absorbed or vanilla attention."""

import dataclasses
import itertools
import math

import pytest

from mla_backend import InvalidInputError, MLAGeometry, Policy, Rates, policy

DEEPSEEK = MLAGeometry(16, 512, 128, 64, 128, 0.1, 2048)
MINICPM3 = MLAGeometry(40, 256, 64, 32, 64, 0.1, 2560, 768)
GLM_4_7_FLASH = MLAGeometry(20, 512, 192, 64, 256, 0.1, 2048, 768)

# Every operation at the same rate and bytes for free: the choice is by FLOPs alone.
FLOPS_ONLY = Rates(gemm_flops=1.0, absorbed_flops=1.0, vanilla_flops=1.0, bytes_per_s=math.inf)


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


@pytest.mark.parametrize("arch", policy.DEFAULTS)
@pytest.mark.parametrize("geometry", [DEEPSEEK, MINICPM3, GLM_4_7_FLASH])
def test_default_rates_agree_with_common_sense(arch, geometry):
    chosen = Policy(geometry, policy.DEFAULTS[arch])
    assert all(chosen.absorbed(1, prefix) for prefix in (100, 1000, 100_000)), "decode is absorbed"
    assert not chosen.absorbed(4096, 0), "a long prompt is not"
    assert not chosen.absorbed(4096, 4096)
    crossovers = [chosen.crossover(prefix) for prefix in (100, 1000, 10_000, 100_000)]
    assert crossovers == sorted(crossovers), "a longer prefix favours absorption"
    assert chosen.absorbed_query_limit() == int(chosen.crossover(1 << 20))


@pytest.mark.parametrize("prefix", [64, 1000, 20_000])
def test_the_choice_follows_the_crossover(prefix):
    chosen = Policy(DEEPSEEK, policy.DEFAULTS["sm90"])
    star = chosen.crossover(prefix)
    assert 10 < star < 400
    assert chosen.absorbed(int(star), prefix)
    assert not chosen.absorbed(math.ceil(star), prefix)
    assert chosen.absorbed_seconds(star, prefix) == pytest.approx(
        chosen.vanilla_seconds(star, prefix), rel=1e-3
    )


def test_hopper_crosses_over_where_it_was_measured():
    # About 250-300 new tokens on a long prefix.
    assert 220 <= Policy(DEEPSEEK, policy.DEFAULTS["sm90"]).absorbed_query_limit() <= 320


def test_rates_move_the_crossover_the_right_way():
    base = policy.DEFAULTS["sm90"]
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


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Rates)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_rates_must_be_positive(field, value):
    with pytest.raises(InvalidInputError, match=f"Rates.{field} must be positive"):
        dataclasses.replace(FLOPS_ONLY, **{field: value})


def test_default_rates_of_the_cpu():
    assert policy.default_rates("cpu") is policy.DEFAULTS["cpu"]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((12, 0), "sm90")],
)
def test_default_rates_of_a_gpu(monkeypatch, capability, arch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    assert policy.default_rates("cuda:0") is policy.DEFAULTS[arch]


def test_costs_rise_with_every_length():
    chosen = Policy(DEEPSEEK, policy.DEFAULTS["sm80"])
    for seconds in (chosen.absorbed_seconds, chosen.vanilla_seconds):
        for a, b in itertools.pairwise((1, 10, 100, 1000)):
            assert seconds(a, 500) < seconds(b, 500)
            assert seconds(50, a) < seconds(50, b)
