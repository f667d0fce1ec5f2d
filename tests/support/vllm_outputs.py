"""What engines in the tests' own process generate, and the tokens that their attention layers count."""

from __future__ import annotations

from mla_backend import counters


def generate(llm, model, **options):
    from vllm import SamplingParams

    count = len(model.expected[0].tokens)
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    prompts = [{"prompt_token_ids": e.prompt} for e in model.expected]
    return llm.generate(prompts, sampling, use_tqdm=False, **options)


def assert_tokens(outputs, model):
    for output, expected in zip(outputs, model.expected, strict=True):
        assert list(output.outputs[0].token_ids) == expected.tokens


def counted_tokens(before):
    """Tokens that went through each path since the snapshot `before`."""
    return {path: count.tokens - before[path].tokens for path, count in counters.snapshot().items()}


def attended_tokens(outputs, num_layers):
    """Tokens that attention layers must have seen: all but cached prompt tokens and the last sampled one."""
    per_layer = sum(
        len(o.prompt_token_ids) - o.num_cached_tokens + len(o.outputs[0].token_ids) - 1 for o in outputs
    )
    return num_layers * per_layer


def attention_layers(llm):
    config = llm.llm_engine.vllm_config.compilation_config
    return [layer for layer in config.static_forward_context.values() if hasattr(layer, "impl")]
