"""What the examples share: their small model and whether its text is right, and which backend attended."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mla_backend import counters
from sentences import SENTENCES

HERE = Path(__file__).parent
DEFAULT_MODEL = HERE.parent / ".checkpoints" / "deepseek-v2-small"
RECIPE_FILE = "recipe"


def recipe() -> str:
    """A hash of all that the small model is made by: another recipe, another model."""
    sources = (HERE / name for name in ("make_checkpoint.py", "sentences.py", "train.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def is_trained(path: Path) -> bool:
    """Whether this folder has the small model as today's recipe makes it."""
    return (path / RECIPE_FILE).is_file() and (path / RECIPE_FILE).read_text() == recipe()


def model_path(model: str | None) -> str:
    """The model given, or else the small local one, trained at its first use."""
    if model is not None:
        return model
    if not is_trained(DEFAULT_MODEL):
        # In a process of its own: engines fork, and a process that has used torch's threads should not.
        subprocess.run([sys.executable, str(HERE / "train.py"), str(DEFAULT_MODEL)], check=True)
    return str(DEFAULT_MODEL)


def first_beginnings(count: int) -> list[str]:
    """So many prompts that the small model can continue; they repeat when it has no more."""
    return list(itertools.islice(itertools.cycle(SENTENCES), count))


def check_continuations(prompts: list[str], texts: list[str], cut: list[bool]) -> int:
    """Compare the small model's texts with what it learnt, and print how they compare.

    Args:
        cut: whether the text ended because it had as many tokens as were allowed.

    Returns:
        the exit status of the example: 1 if any text differs.
    """
    answers = [answer for answer in zip(prompts, texts, cut, strict=True) if answer[0] in SENTENCES]
    if len(answers) < len(prompts):
        beginnings = "".join(f"\n  {beginning}" for beginning in SENTENCES)
        print(f"\nThe small model can only continue:{beginnings}")
    if not answers:
        return 0
    num_right = 0
    print()
    for prompt, text, is_cut in answers:
        learnt = SENTENCES[prompt]
        if text == learnt or (is_cut and learnt.startswith(text)):
            num_right += 1
        else:
            print(f"Wrong after {prompt!r}: the small model learnt {learnt!r}.")
    verdict = f"{num_right} of {len(answers)} continuations are what the small model learnt."
    if num_right < len(answers):
        print(f"{verdict} The attention is wrong.")
        return 1
    print(verdict)
    return 0


def count_engine_calls() -> str:
    """Have every engine process that starts from here count its calls in a folder, which is returned.

    It is removed when this process ends.
    """
    folder = tempfile.mkdtemp(prefix="mla-backend-counters-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[counters.ENVIRONMENT_VARIABLE] = folder
    return folder


def report(counters_folder: str, asked_for: str, num_tokens: int, seconds: float) -> str:
    """One line: the backend that attended (by its counters, not by what was asked for) and its speed."""
    counts = counters.read_folder(counters_folder)
    work = ", ".join(f"{path} {count.tokens}" for path, count in counts.items() if count.calls)
    speed = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    if not work:
        return f"Attention backend: {asked_for} (MLA_BACKEND did not run). {speed}."
    return f"Attention backend: MLA_BACKEND. {speed}. Tokens x layers by path: {work}."
