"""Greedy tokens of two implementations: in fp32 equal, as no choice is close; in 16 bits up to near-ties."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

CLEAR = 1e-3
"""In nats. Log-probabilities of two implementations in fp32 differ by up to 1e-4."""

NEAR_TIE = {"float16": 0.05, "bfloat16": 0.4}
"""By dtype, in nats. On the small checkpoints, log-probabilities of two implementations differ by up to 0.02
in fp16 and 0.14 in bf16, the gap between two tokens by twice as much."""


def assert_clear_choices(logits: Tensor, tokens: list[int]) -> None:
    """Assert that each token is the best by far more than what depends on a CPU's rounding.

    Args:
        logits: [tokens, vocabulary] in fp32.
    """
    best, indices = logits.topk(2)
    assert indices[:, 0].tolist() == tokens
    gap = float((best[:, 0] - best[:, 1]).min())
    assert gap > CLEAR, f"two tokens are only {gap} apart: choose another prompt or other weights"


class Sequence(NamedTuple):
    """What an engine generated. Of each token: its log-probability, and by how much the best two differ."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def mean_deviation(sequences: list[Sequence], expected: list[Sequence], what: object) -> float:
    """By how much log-probabilities of tokens differ, in nats, until the texts do. Prints it.

    Where a text leaves the other, what counts is the gap that it has overcome: wrong texts leave at once.
    """
    deviations, leave = [], 0
    for a, b in zip(sequences, expected, strict=True):
        same = [token == other for token, other in zip(a.tokens, b.tokens, strict=True)]
        step = same.index(False) if False in same else len(same)
        leave += step < len(same)
        deviations += [abs(x - y) for x, y in zip(a.logprobs[:step], b.logprobs[:step], strict=True)]
        deviations += b.gaps[step : step + 1]
    mean = sum(deviations) / max(1, len(deviations))
    print(
        f"{what}: log-probabilities differ by {mean:.4f} in the mean, up to {max(deviations, default=0):.4f}"
    )
    print(f"{what}: {leave} of {len(sequences)} texts leave")
    return mean


def assert_equal_up_to_near_ties(
    ours: list[Sequence], stock: list[Sequence], near_tie: float, what: object
) -> int:
    """The first token of a sequence that differs was nearly a tie; what follows it is another text.

    Prints the gap of each difference, and how far the log-probabilities of equal tokens lie apart.

    Returns:
        how many sequences differ.
    """
    gaps, deviation = {}, 0.0
    for index, (a, b) in enumerate(zip(ours, stock, strict=True)):
        pairs = zip(a.tokens, b.tokens, strict=True)
        step = next((i for i, (token, other) in enumerate(pairs) if token != other), len(b.tokens))
        # Of a near-tie, both tokens are almost as probable, so the one where the texts leave counts, too.
        deviation = max(
            [deviation, *(abs(x - y) for x, y in zip(a.logprobs[: step + 1], b.logprobs, strict=False))]
        )
        if step < len(b.tokens):
            gaps[index, step] = round(b.gaps[step], 4)
    print(f"{what}: {len(gaps)} of {len(stock)} leave; (sequence, token): gap {gaps}")
    print(f"{what}: log-probabilities of equal tokens differ by up to {deviation:.4f}")
    assert max(gaps.values(), default=0.0) <= near_tie and deviation <= near_tie
    return len(gaps)
