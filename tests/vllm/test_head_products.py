"""The products with W_UK and W_UV in launches that begin early: their steps, and when vLLM's way is kept."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from mla_backend.kernels import head_product
from mla_backend_vllm import head_products, metadata, selection_name
from mla_backend_vllm.head_products import HeadProducts, computes_the_same, has_head_products, why_not
from tests.support.vllm_outputs import assert_tokens, attention_layers, generate

NAME = selection_name()
STOCK = MLAAttention.forward_impl


class TorchProduct(head_product.HeadProduct):
    """Multiplies by torch what the kernel would multiply, of any dtype; counts products and their tokens."""

    products: list[int] = []

    def __init__(self, weights):
        self._kind, self._columns = head_product._kind(weights), weights.shape[2]

    def __call__(self, x, weights, out):
        self.products.append(len(x))
        torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))


@pytest.fixture
def on_cpu(monkeypatch):
    """The number of tokens of each product. Kernels are torch; only what a test adds speaks against them."""
    monkeypatch.setattr(head_products, "HeadProduct", TorchProduct)
    monkeypatch.setattr(head_products.jit, "load_all", lambda variants: None)
    monkeypatch.setattr(head_products, "kernels_of", lambda layers: set())
    monkeypatch.setattr(head_products, "_against_kernels", lambda layer: iter(()))
    monkeypatch.setattr(head_products, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(TorchProduct, "products", [])
    return TorchProduct.products


# ---- Engines


@pytest.fixture
def in_engines(on_cpu, monkeypatch):
    """The same in vLLM's engines for the CPU, where attention is no op."""
    against = head_products._against_layer
    monkeypatch.setattr(
        head_products,
        "_against_layer",
        lambda layer: (reason for reason in against(layer) if reason != "vLLM traces attention"),
    )
    return on_cpu


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["deepseek", "deepseek_v3"])
def test_tokens_equal_transformers(start_engine, request, in_engines, kind):
    """Prefill and steps with prefill keep vLLM's way; steps that only decode do not."""
    model = request.getfixturevalue(kind)
    llm = start_engine(model.path, attention_backend=NAME, max_num_batched_tokens=256)
    layers = attention_layers(llm)
    assert all(map(has_head_products, layers))
    in_engines.clear()
    assert_tokens(generate(llm, model), model)
    assert in_engines and max(in_engines) <= len(model.expected)
    assert len(in_engines) % (2 * len(layers)) == 0


def test_drafts_are_multiplied_with_the_tokens_before_them(start_engine, deepseek_v3, in_engines):
    mtp = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": NAME}
    llm = start_engine(deepseek_v3.path, attention_backend=NAME, speculative_config=mtp)
    in_engines.clear()
    assert_tokens(generate(llm, deepseek_v3), deepseek_v3)
    assert all(map(has_head_products, attention_layers(llm)))
    assert max(in_engines) > len(deepseek_v3.expected)


def start_line(monkeypatch, start_engine, path):
    messages = []
    monkeypatch.setattr(metadata.logger, "info_once", lambda text, *values: messages.append(text % values))
    llm = start_engine(path, attention_backend=NAME)
    return llm, messages[0]


def test_on_the_cpu_they_stay_out(start_engine, deepseek, monkeypatch):
    llm, line = start_line(monkeypatch, start_engine, deepseek.path)
    assert not any(map(has_head_products, attention_layers(llm)))
    assert "torch multiplies by W_UK and W_UV (on the CPU)" in line


@pytest.mark.parametrize("switch", ["1", "0"])
def test_the_start_line_says_whether(start_engine, deepseek, monkeypatch, in_engines, switch):
    monkeypatch.setenv("MLA_BACKEND_AROUND_ATTENTION", switch)
    llm, line = start_line(monkeypatch, start_engine, deepseek.path)
    assert [has_head_products(layer) for layer in attention_layers(llm)] == [switch == "1"] * len(
        attention_layers(llm)
    )
    said = {
        "1": "small steps multiply by W_UK and W_UV in launches that begin early",
        "0": "torch multiplies by W_UK and W_UV (MLA_BACKEND_AROUND_ATTENTION=0)",
    }
    assert said[switch] in line


def test_layouts_of_weights_are_known_before_they_are_loaded(start_engine, deepseek):
    """`mla-backend doctor MODEL` names kernels by them."""
    layer, *_ = attention_layers(start_engine(deepseek.path, attention_backend=NAME))
    for weights, known in zip(
        (layer.W_UK_T, layer.W_UV),
        head_product.weights_in_vllm(layer.impl.geometry, layer.W_UV.dtype),
        strict=True,
    ):
        assert (weights.shape, weights.stride()) == (known.shape, known.stride())


# ---- Steps


HEADS, D_C, D_NOPE, D_ROPE, D_V = 2, 64, 64, 8, 64


@pytest.fixture
def layer(on_cpu):
    """A layer with `HeadProducts`, whose method of vLLM's returns what it gets."""
    kv_b = torch.randn(HEADS, D_NOPE + D_V, D_C)
    layer = SimpleNamespace(
        num_heads=HEADS,
        kv_lora_rank=D_C,
        qk_nope_head_dim=D_NOPE,
        qk_rope_head_dim=D_ROPE,
        v_head_dim=D_V,
        W_UK_T=kv_b[:, :D_NOPE],
        W_UV=kv_b[:, D_NOPE:].transpose(1, 2),
        impl=SimpleNamespace(
            typed_cache=lambda kv_cache: kv_cache.view(torch.uint8),
            # Of a cache that is not in the dtype of its format, other values.
            forward_mqa=lambda q, kv_cache, step, layer: (
                q[0] + q[1].sum() + (len(kv_cache) if kv_cache.dtype is torch.uint8 else 1000),
                None,
            ),
        ),
        forward_impl=lambda *arguments, **options: (arguments, options),
    )
    head_products.install([layer])
    return layer


def call(layer, tokens=3, rows=4, dtype=torch.float32, step=None, **options):
    q = torch.randn(rows, HEADS, D_NOPE + D_ROPE)
    step = step or SimpleNamespace(num_actual_tokens=tokens, num_decode_tokens=tokens)
    kv_cache, output = torch.zeros(5, 4, 72, dtype=torch.float8_e4m3fn), torch.full((rows, HEADS * D_V), -1.0)
    given = (q, None, None, kv_cache, None if step == "none" else step)
    return given, output.to(dtype), layer.forward_impl(*given, output=output.to(dtype), **options)


def test_a_step_that_only_decodes(layer, on_cpu):
    (q, *_), _, result = call(layer, output_scale=None, q_dcp_replicated=None)
    q_nope, q_rope = q[:3].double().split([D_NOPE, D_ROPE], -1)
    latent = torch.einsum("thk,hkn->thn", q_nope, layer.W_UK_T.double()) + 5 + q_rope.sum()
    expected = torch.einsum("thk,hkn->thn", latent, layer.W_UV.double()).flatten(1)
    torch.testing.assert_close(result[:3].double(), expected, rtol=1e-4, atol=1e-2)
    assert (result[3] == -1).all()
    assert on_cpu == [3, 3]


STEPS = {
    "profiling": {"step": "none"},
    "prefill": {"step": SimpleNamespace(num_actual_tokens=3, num_decode_tokens=1)},
    "no token": {"tokens": 0},
    "many tokens": {"tokens": 65, "rows": 65},
    "another dtype": {"dtype": torch.float16},
    "a quantized output": {"output_scale": torch.ones(())},
    "queries of all ranks": {"q_dcp_replicated": torch.ones(3)},
}


@pytest.mark.parametrize("kind", STEPS)
def test_other_steps_keep_vllms_way(layer, on_cpu, kind):
    given, output, (arguments, options) = call(layer, **STEPS[kind])
    assert all(a is b for a, b in zip(arguments, given, strict=True))
    assert torch.equal(options.pop("output"), output)
    assert options == {
        name: value for name, value in STEPS[kind].items() if name in ("output_scale", "q_dcp_replicated")
    }
    assert on_cpu == []


@pytest.mark.parametrize("name", ["W_UK_T", "W_UV"])
def test_reloaded_weights_are_read(layer, on_cpu, name):
    """Also those in other memory; with another layout vLLM's way is kept."""
    weights = getattr(layer, name)
    torch.manual_seed(0)
    _, _, before = call(layer)
    setattr(
        layer,
        name,
        weights.transpose(1, 2).clone().transpose(1, 2) * 2 if name == "W_UV" else weights.clone() * 2,
    )
    torch.manual_seed(0)
    _, _, after = call(layer)
    assert len(on_cpu) == 4 and not torch.equal(before, after)
    setattr(
        layer,
        name,
        weights.transpose(1, 2).contiguous().transpose(1, 2) if name == "W_UK_T" else weights.contiguous(),
    )
    arguments, options = call(layer)[2]
    assert len(on_cpu) == 4 and "output" in options


def test_a_second_builder_changes_nothing(layer):
    installed = layer.forward_impl
    head_products.install([layer])
    assert layer.forward_impl is installed and isinstance(installed, HeadProducts)


# ---- When vLLM's own way is kept


@pytest.fixture
def given(on_cpu):
    """A layer that nothing speaks against, and the configuration of its engine."""
    layer = MLAAttention.__new__(MLAAttention)
    vars(layer).update(use_direct_call=False, q_pad_num_heads=None)
    vars(layer)["impl"] = SimpleNamespace(dcp_world_size=1)
    return layer, VllmConfig()


def test_a_plain_layer_has_them(given):
    assert list(why_not(*given)) == []


def test_a_layer_with_all_tokens_beside_a_divided_cache_has_them(given, monkeypatch):
    """vLLM's configuration says what the model's layers do, which those of a draft model need not."""
    in_parallel(decode_context_parallel_size=2)(*given, monkeypatch)
    assert list(why_not(*given)) == []


class OtherAttention(MLAAttention):
    pass


def in_parallel(**changes):
    def change(layer, config, monkeypatch):
        for name, value in changes.items():
            object.__setattr__(config.parallel_config, name, value)

    return change


def in_layer(**changes):
    return lambda layer, config, monkeypatch: vars(layer).update(changes)


def without(name):
    return lambda layer, config, monkeypatch: vars(layer).pop(name)


CONDITIONS = {
    "MLA_BACKEND_AROUND_ATTENTION=0": lambda *given: given[2].setenv("MLA_BACKEND_AROUND_ATTENTION", "0"),
    "on the CPU": lambda *given: given[2].setattr(
        head_products, "current_platform", SimpleNamespace(is_cpu=lambda: True)
    ),
    "with decode context parallelism": in_layer(impl=SimpleNamespace(dcp_world_size=2)),
    "with context parallelism of prefill": in_parallel(prefill_context_parallel_size=2),
    "VLLM_BATCH_INVARIANT": lambda *given: given[2].setattr(
        head_products, "envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True)
    ),
    "the attention is a OtherAttention": lambda *given: setattr(given[0], "__class__", OtherAttention),
    "something else has replaced": in_layer(forward_impl=print),
    "vLLM traces attention": in_layer(use_direct_call=True),
    "vLLM pads the heads": in_layer(q_pad_num_heads=128),
    "a kernel's reason": lambda *given: given[2].setattr(
        head_products, "_against_kernels", lambda layer: iter(["a kernel's reason"])
    ),
    "differs from those that were tested (AttributeError": without("q_pad_num_heads"),
}


@pytest.mark.parametrize("reason", CONDITIONS)
def test_vllms_way_is_kept(given, monkeypatch, reason):
    CONDITIONS[reason](*given, monkeypatch)
    assert any(reason.split(" (")[0] in found for found in why_not(*given))


def test_kernels_speak_for_themselves(monkeypatch):
    """The first reason of the kernels for both weights on this GPU."""
    reasons = {"uk": None, "uv": "none"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(head_product, "why_not", lambda weights, capability: reasons[weights])
    layer = SimpleNamespace(W_UK_T="uk", W_UV="uv")
    assert list(head_products._against_kernels(layer)) == ["none"]


def scales_queries(layer, q, *tensors, output):
    return STOCK(layer, q * 2, *tensors, output=output)


def scales_the_output(layer, *tensors, output):
    return STOCK(layer, *tensors, output=output).mul_(0.5)


def clears_padding(layer, *tensors, output):
    result = STOCK(layer, *tensors, output=output)
    output[2:] = 0
    return result


def returns_no_padding(layer, *tensors, output):
    return STOCK(layer, *tensors, output=output)[:2]


def reads_another_attribute(layer, *tensors, output):
    return STOCK(layer, *tensors, output=output) + layer.bias


def attends_twice(layer, *tensors, output):
    STOCK(layer, *tensors, output=output)
    return STOCK(layer, *tensors, output=output)


def test_this_vllms_method_is_known():
    assert computes_the_same(STOCK)


@pytest.mark.parametrize(
    "changed", [scales_queries, scales_the_output, clears_padding, returns_no_padding, attends_twice]
)
def test_a_changed_method_is_noticed(changed):
    assert not computes_the_same(changed)


@pytest.mark.parametrize("changed", [reads_another_attribute, scales_the_output])
def test_a_changed_vllm_keeps_its_way(given, monkeypatch, changed):
    monkeypatch.setattr(MLAAttention, "forward_impl", changed)
    (reason,) = why_not(*given)
    assert "vLLM" in reason and ("differs" in reason or "computes something else" in reason)
