"""Names under which vLLM looks for a checkpoint's scales."""

import re
from types import SimpleNamespace

import pytest
from vllm.model_executor.models.utils import WeightsMapper

from mla_backend_vllm import scales
from mla_backend_vllm.scales import load_scales_of

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    "layer, own, parameter",
    [
        ("self_attn.attn", {}, "self_attn.mla_attn.mla_attn.k_scale"),
        ("self_attn.attn", {"o_proj": None}, "self_attn.k_scale"),
        ("self_attn", {"o_proj": None}, "self_attn.k_scale"),
    ],
    ids=["layer in a wrapper", "layer with its own projections", "Kimi-K3"],
)
def test_a_scale_gets_the_name_of_its_layers_parameter(layer, own, parameter):
    ours, other = "model.layers.0.self_attn", "model.layers.1.self_attn"
    layers = {
        f"model.layers.0.{layer}": SimpleNamespace(impl="ours", **own),
        f"model.layers.1.{layer}": SimpleNamespace(impl="other"),
    }
    vllms = WeightsMapper(orig_to_new_regex={re.compile(r"\.k_proj\.k_scale$"): ".attn.k_scale"})
    quantization = SimpleNamespace(get_cache_scale_mapper=lambda: vllms)
    compilation = SimpleNamespace(static_forward_context=layers)
    model = SimpleNamespace(using_transformers_backend=lambda: False)
    config = SimpleNamespace(quant_config=quantization, compilation_config=compilation, model_config=model)
    for _ in range(2):  # by each layer
        load_scales_of(config, lambda impl: impl == "ours")
    name_of = quantization.get_cache_scale_mapper()._map_name
    assert name_of(f"{ours}.k_proj.k_scale") == f"model.layers.0.{parameter}"
    assert name_of(f"{ours}.attn.v_scale") == f"model.layers.0.{parameter.replace('k_scale', 'v_scale')}"
    assert name_of(f"{other}.k_proj.k_scale") == f"{other}.attn.k_scale"


def test_vllms_own_name_is_right_in_its_transformers_backend():
    renaming = object()
    quantization = SimpleNamespace(get_cache_scale_mapper=renaming)
    model = SimpleNamespace(using_transformers_backend=lambda: True)
    load_scales_of(SimpleNamespace(quant_config=quantization, model_config=model), lambda impl: True)
    assert quantization.get_cache_scale_mapper is renaming


def test_a_quantization_that_renames_nothing_is_warned_of(monkeypatch):
    warnings = []
    monkeypatch.setattr(scales.logger, "warning_once", lambda text, *args: warnings.append(text % args))
    model = SimpleNamespace(using_transformers_backend=lambda: False)
    for quantization in (None, SimpleNamespace()):
        config = SimpleNamespace(quant_config=quantization, model_config=model)
        load_scales_of(config, lambda impl: True)
    (warning,) = warnings
    assert "fp8 caches use 1" in warning
