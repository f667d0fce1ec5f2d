"""The variables of the environment: what a switch may be, and that the docs list all of them."""

from pathlib import Path

import pytest

from mla_backend import settings
from mla_backend.errors import InvalidInputError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("switch", settings.SWITCHES)
def test_a_switch_is_0_or_1(monkeypatch, switch):
    for value, expected in (("0", False), ("1", True), ("", settings.SWITCHES[switch])):
        monkeypatch.setenv(switch, value)
        assert settings.is_on(switch) is expected
    monkeypatch.delenv(switch)
    assert settings.is_on(switch) is settings.SWITCHES[switch]
    for value in ("yes", "true", "off", " 1"):
        monkeypatch.setenv(switch, value)
        with pytest.raises(InvalidInputError, match=f"^{switch} must be 0 or 1, not '{value}'$"):
            settings.is_on(switch)


def test_the_docs_list_all_variables():
    table = (REPOSITORY / "docs" / "jit.md").read_text()
    assert [name for name in settings.VARIABLES if f"| `{name}" not in table] == []
