"""Checks of single arguments."""

import numpy as np
import pytest
import torch

from mla_backend import DecodeBatch, MLADecoder, Shard
from mla_backend.checks import check_softmax_scale
from mla_backend.errors import InvalidInputError

LOG2E = 1.4426950408889634


@pytest.mark.parametrize(
    "scale, fits",
    [
        (8.15e-39, True),
        (8.14e-39, False),
        (1e-46, False),
        (5e-324, False),
        (2.35e38, True),
        (2.36e38, False),
        (3e38, False),
        (1e300, False),
    ],
)
def test_a_softmax_scale_fits_fp32(scale, fits):
    """As kernels have it: 0 or infinity would make NaN of the scores of masked keys."""
    with np.errstate(over="ignore", under="ignore"):
        in_kernels = np.float32(scale * LOG2E)
    assert fits == (np.finfo(np.float32).tiny <= in_kernels < np.inf)
    if fits:
        check_softmax_scale(scale)
        return
    with pytest.raises(InvalidInputError, match="finite and greater than 0 in fp32 .*got"):
        check_softmax_scale(scale)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64, np.int64, int])
def test_a_softmax_scale_may_have_any_type_of_number(number):
    check_softmax_scale(number(1))
    with pytest.raises(InvalidInputError, match="finite and greater than 0"):
        check_softmax_scale(number(0))


def test_an_integer_may_be_too_large_for_any_float():
    with pytest.raises(InvalidInputError, match="finite and greater than 0"):
        check_softmax_scale(10**400)


def test_integers_of_numpy_are_as_good_as_python_s():
    one, two = np.int32(1), np.int64(2)
    sizes = dict(num_heads=two, kv_lora_rank=np.int32(8), qk_rope_head_dim=np.int32(4), page_size=two)
    decoder = MLADecoder(
        **sizes, max_batch=one, max_query_len=one, num_ctas=one, dtype=torch.float32, device="cpu"
    )
    shard = Shard(np.int32(0), two, two)
    lengths, table = torch.tensor([1]).int(), torch.zeros(1, 1).int()
    batch = DecodeBatch(lengths, table, two, max_query_len=one, shard=shard)
    integers = [*shard.as_integers, batch.page_size, batch.max_query_len, decoder.spec.num_ctas]
    integers += [getattr(decoder.spec, name) for name in (*sizes, "max_batch", "max_query_len")]
    assert {type(number) for number in integers} == {int}
    q = torch.randn(1, 2, 12)
    plan = decoder.plan(batch)
    out, _ = decoder.run(q[..., :8], q[..., 8:], torch.ones(1, 2, 12), plan, 0.1)
    torch.testing.assert_close(out, torch.ones(1, 2, 8))
