"""The tested versions of the engines stand in one place, and what repeats them agrees."""

import re
from pathlib import Path

import pytest

from mla_backend.engines import SGLANG, VLLM

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)
def test_extras_are_the_tested_range(engine):
    extras = re.findall(r'^\w+ = \["([^"]+)"\]$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    assert engine.requirement in extras


@pytest.mark.parametrize(
    ("engine", "doc"), [(VLLM, "docs/vllm.md"), (SGLANG, "docs/sglang.md")], ids=["vLLM", "SGLang"]
)
def test_docs_name_the_tested_range(engine, doc):
    for file in ("README.md", doc):
        assert engine.tested in (CHECKOUT / file).read_text(), file


@pytest.mark.parametrize(
    ("version", "relation"),
    [
        ("0.25.1", "older"),
        ("0.26.0rc1", None),
        ("0.26.0", None),
        ("0.33.0", None),
        ("0.33.4.post1", None),
        ("0.34.0.dev7+g1234", "newer"),
        ("1.0", "newer"),
    ],
)
def test_versions_outside_of_the_range_are_named(version, relation):
    remark = VLLM.untested(version)
    if relation is None:
        assert remark is None
    else:
        assert version in remark
        assert relation in remark
        assert VLLM.tested in remark


def test_a_version_that_cannot_be_read_is_named():
    assert "'dev'" in SGLANG.untested("dev") and SGLANG.tested in SGLANG.untested("dev")


def test_a_longer_release_counts_as_the_last():
    assert SGLANG.untested("0.5.23.post2") is None
    assert "newer" in SGLANG.untested("0.5.24")
