"""What tests say of the texts of two engines, or of an engine and its oracle."""

import pytest
import torch

from tests.support.greedy import Sequence, assert_clear_choices, mean_deviation

EXPECTED = Sequence(tokens=[5, 6], logprobs=[-0.5, -0.25], gaps=[3.0, 2.0])


@pytest.mark.parametrize(
    "made, mean",
    [
        (Sequence([5, 6], [-0.5, -0.5], [3.0, 2.0]), 0.125),
        (Sequence([5, 7], [-0.75, -0.5], [3.0, 2.0]), (0.25 + 2.0) / 2),
        (Sequence([8, 6], [-0.5, -0.25], [3.0, 2.0]), 3.0),
    ],
    ids=["same text", "leaves later", "another text"],
)
def test_where_a_text_leaves_its_gap_counts(made, mean):
    assert mean_deviation([made], [EXPECTED], "example") == mean


def test_an_oracle_whose_choices_are_close_is_refused():
    logits = torch.tensor([[0.0, 1.0, 5.0], [2.0, 1.9, -1.0]])
    assert_clear_choices(logits, [2, 0])
    with pytest.raises(AssertionError):
        assert_clear_choices(logits, [2, 1])
    logits[1, 1] = 1.9995
    with pytest.raises(AssertionError, match="two tokens are only 0.0"):
        assert_clear_choices(logits, [2, 0])
