"""The documentation: its examples of the library run as they stand there, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/README.md"]


def run_example(document: str, names: dict) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    exec(compile(example, document, "exec"), names)
    assert names["out"].shape == (2, 16, 512) and names["out"].isfinite().all()
    assert names["lse"].dtype is torch.float32 and names["lse"].isfinite().all()


def test_the_examples_of_the_library_run():
    names: dict = {}
    run_example("docs/library.md", names)
    run_example("docs/kernels-hopper.md", names)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
