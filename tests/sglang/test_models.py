"""SGLang on this backend generates the tokens of each family's own layers (`mla_backend.models`)."""

import json

import pytest

from mla_backend.models import FAMILIES, State
from tests.support.small_models import make_small_model

pytestmark = pytest.mark.newest
ELSEWHERE = ("Mistral-Small-4-119B", "Mistral-Large-3-675B", "Kimi-Linear-48B-A3B")
"""Families that test_engine.py tests, because SGLang reads them in another form than transformers."""
SERVED = [f for f in FAMILIES if f.sglang.cpu is State.TESTED and f.name not in ELSEWHERE]


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_tokens(run_engine, tmp_path, family):
    expected = make_small_model(family, tmp_path)
    result, counts = run_engine("continued", json.dumps([g.prompt for g in expected]), model=tmp_path)
    assert result["batches"] == [[g.tokens for g in expected]] * 2
    assert counts["absorbed_decode"].calls > 0
