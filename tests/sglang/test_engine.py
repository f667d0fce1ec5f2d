"""The real engine on a CPU, against HuggingFace."""

import json

import scenarios

from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, default_rates
from mla_backend_sglang.prefill import PrefillChooser, PrefillMethod

CHUNK_TOKENS = 400


def assert_tokens(oracle, records):
    for record in records:
        expected = oracle.greedy(record["prompt"], len(record["tokens"]))
        assert record["tokens"] == expected, f"prompt of {len(record['prompt'])}, {record['cached']} cached"


def assert_all_ran(counts):
    for path, count in counts.items():
        assert count.calls > 0, f"our {path} did not run"


def test_tokens_behind_cached_prefixes_and_after_weight_updates(run_engine, oracle, checkpoint):
    result, counts = run_engine("tokens", SGLANG_MAX_KV_CHUNK_CAPACITY=str(CHUNK_TOKENS))
    assert_all_ran(counts)
    assert_tokens(oracle, result["first"] + result["second"])
    # The second batch took every method at once.
    geometry = MLAGeometry.from_hf_config(json.loads((checkpoint / "config.json").read_text()))
    chooser = PrefillChooser(Policy(geometry, default_rates("cpu")), CHUNK_TOKENS)
    assert [r["cached"] for r in result["second"]] == [6, 300, 90, 300, 0]
    assert [chooser(len(r["prompt"]) - r["cached"], r["cached"]) for r in result["second"][1:]] == [
        PrefillMethod.ABSORBED,
        PrefillMethod.ONE_SHOT,
        PrefillMethod.CHUNKED,
        PrefillMethod.VANILLA,
    ]
    for key, seed in (("updated", 1), ("updated_directly", 2)):
        oracle.replace(scenarios.updated_weights(checkpoint, seed))
        assert_tokens(oracle, result[key])
        assert [r["tokens"] for r in result[key]] != [r["tokens"] for r in result["first"]]
    oracle.replace(scenarios.original_weights(checkpoint))


def test_mixed_chunks_of_pages(run_engine, oracle):
    result, counts = run_engine("mixed")
    assert_all_ran(
        counts
    )  # absorbed_extend: only decode steps inside a prefill batch have few new tokens here
    assert_tokens(oracle, result["requests"])


def test_deterministic_inference(run_engine, oracle):
    result, counts = run_engine("deterministic")
    assert_tokens(oracle, result["alone"] + result["among"] + result["cached"])
    assert result["cached"][0]["cached"] > 0
    assert counts["vanilla_prefill"].calls == 0
    assert counts["absorbed_extend"].calls > 0
