"""Reading MLAGeometry from the configs that models ship."""

import math
import types

import pytest

from mla_backend import InvalidInputError, MLAGeometry
from tests.support.configs import GLM_4_7_FLASH, KIMI_K2, MINICPM3, V2, V2_LITE, V3, YARN


@pytest.mark.parametrize(
    ("config", "heads", "latent_dim", "qk_head_dim", "v_head_dim", "q_lora_rank", "scale"),
    [
        # 0.1 * 0.707 * ln 40 + 1 = 1.2608; 1.2608² / sqrt(192)
        (V2_LITE, 16, 576, 192, 128, None, 0.114722),
        (V2, 128, 576, 192, 128, 1536, 0.114722),
        # 0.1 * ln 40 + 1 = 1.36889
        (V3, 128, 576, 192, 128, 1536, 0.135234),
        (KIMI_K2, 64, 576, 192, 128, 1536, 0.130862),
        (GLM_4_7_FLASH, 20, 576, 256, 256, 768, 0.0625),
        (MINICPM3, 40, 288, 96, 64, 768, 0.102062),
    ],
    ids=["V2-Lite", "V2", "V3", "Kimi-K2", "GLM-4.7-Flash", "MiniCPM3"],
)
def test_from_hf_config(config, heads, latent_dim, qk_head_dim, v_head_dim, q_lora_rank, scale):
    geometry = MLAGeometry.from_hf_config(config)
    assert geometry.num_heads == heads
    assert geometry.latent_dim == latent_dim
    assert geometry.qk_head_dim == qk_head_dim
    assert geometry.v_head_dim == v_head_dim
    assert geometry.q_lora_rank == q_lora_rank
    assert geometry.hidden_size == config["hidden_size"]
    assert geometry.softmax_scale == pytest.approx(scale, rel=1e-5)
    # The same from a config object, and from the text part of a multimodal model.
    assert MLAGeometry.from_hf_config(types.SimpleNamespace(**config)) == geometry
    assert MLAGeometry.from_hf_config({"model_type": "kimi_k25", "text_config": config}) == geometry
    nested = types.SimpleNamespace(text_config=types.SimpleNamespace(**config))
    assert MLAGeometry.from_hf_config(nested) == geometry
    assert MLAGeometry.from_hf_config(config | {"text_config": {}}) == geometry


def test_no_compressed_query_may_be_written_as_zero():
    assert MLAGeometry.from_hf_config(V2_LITE | {"q_lora_rank": 0}).q_lora_rank is None


def test_rope_parameters_of_transformers_5():
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, **{k: v for k, v in YARN.items() if k != "type"}}
    config = {k: v for k, v in V2_LITE.items() if k != "rope_scaling"} | {"rope_parameters": rope}
    assert MLAGeometry.from_hf_config(config) == MLAGeometry.from_hf_config(V2_LITE)


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "default", "rope_theta": 1e4},
        {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 0.5, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 40},
        YARN | {"rope_type": "default"},
        YARN | {"apply_yarn_scaling": False},
    ],
)
def test_scale_without_yarn_mscale(rope):
    geometry = MLAGeometry.from_hf_config(V2_LITE | {"rope_scaling": rope})
    assert geometry.softmax_scale == 192**-0.5


def test_real_transformers_configs():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config()
    geometry = MLAGeometry.from_hf_config(config)
    assert (geometry.num_heads, geometry.latent_dim, geometry.q_lora_rank) == (128, 576, 1536)
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    scaled = MLAGeometry.from_hf_config(transformers.DeepseekV3Config(rope_scaling=rope))
    assert scaled.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, "'llama'.*no kv_lora_rank"),
        (V2_LITE | {"qk_rope_head_dim": None}, "it has no qk_rope_head_dim"),
        (V2_LITE | {"qk_rope_head_dim": -1}, "qk_rope_head_dim must be an int of at least 0, got -1"),
        (V2_LITE | {"kv_lora_rank": 0}, "it has no kv_lora_rank"),
        ({}, "does not describe Multi-head Latent Attention"),
        (V2_LITE | {"qk_nope_head_dim": "128"}, "qk_nope_head_dim must be a positive int, got '128'"),
        (V2_LITE | {"num_attention_heads": 16.0}, "num_attention_heads must be a positive int, got 16.0"),
        (V2_LITE | {"v_head_dim": "128"}, "v_head_dim must be a positive int, got '128'"),
        (V2_LITE | {"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        (
            V2_LITE | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}},
            r"for each type of layer \(full_attention, sliding_attention\), .*directly into rope_parameters",
        ),
        (V2_LITE | {"rope_parameters": {"full_attention": YARN}}, r"for each type of layer \(full_att"),
        (V2_LITE | {"rope_parameters": [40]}, r"rope_parameters must be an object, got \[40\]"),
        (V2_LITE | {"rope_scaling": YARN | {"factor": "40"}}, "factor must be a number, got '40'"),
        (V2_LITE | {"rope_scaling": YARN | {"mscale_all_dim": [1]}}, r"mscale_all_dim must be a n.*\[1\]"),
    ],
)
def test_refuses_what_is_not_mla(config, message):
    with pytest.raises(InvalidInputError, match=message):
        MLAGeometry.from_hf_config(config)


def test_ranks_split_heads_only():
    geometry = MLAGeometry.from_hf_config(V3)
    rank = geometry.per_rank(8)
    assert rank.num_heads == 16
    assert (rank.latent_dim, rank.hidden_size, rank.softmax_scale) == (576, 7168, geometry.softmax_scale)


@pytest.mark.parametrize("tp_size", [0, 3, 256])
def test_ranks_refuse_uneven_splits(tp_size):
    with pytest.raises(InvalidInputError, match="128 heads cannot be split over"):
        MLAGeometry.from_hf_config(V3).per_rank(tp_size)


@pytest.mark.parametrize("dimension", [0, 64.0, True, "64"])
def test_refuses_dimensions_that_are_none(dimension):
    with pytest.raises(InvalidInputError, match="qk_nope_head_dim must be a positive int, got "):
        MLAGeometry(16, 512, dimension, 64, 128, 0.1, 2048)


@pytest.mark.parametrize("dimension", [-1, 64.0, True, "64"])
def test_refuses_rotary_dimensions_that_are_none(dimension):
    with pytest.raises(InvalidInputError, match="qk_rope_head_dim must be an int of at least 0, got "):
        MLAGeometry(16, 512, 128, dimension, 128, 0.1, 2048)


def test_latents_without_a_rotary_part():
    """GLM-5.3-Flash has these."""
    sizes = {"qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "rope_scaling": None}
    geometry = MLAGeometry.from_hf_config(V2_LITE | sizes)
    assert (geometry.latent_dim, geometry.qk_head_dim, geometry.softmax_scale) == (512, 256, 1 / 16)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, True, "0.1", None])
def test_refuses_scales_that_are_none(scale):
    with pytest.raises(
        InvalidInputError, match="softmax_scale must be a number, finite and greater than 0 in fp32"
    ):
        MLAGeometry(16, 512, 128, 64, 128, scale, 2048)
