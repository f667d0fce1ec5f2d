"""What tests on GPUs say of the texts of two engines."""

import pytest

from tests.support.greedy import Sequence, mean_deviation

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
