"""`bench load` with an engine's real server and its own generator."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from typer.testing import CliRunner

from mla_backend_bench.cli import app


def check_a_server_under_load(
    engine: ModuleType, checkpoint: Path, backend: str, options: dict[str, Any], file: Path
) -> None:
    """Measure six requests, three at a time, and check the row in ``file``."""
    arguments = ["load", engine.__name__, str(checkpoint), "--backend", backend, "--dtype", "float32"]
    arguments += ["--engine-options", json.dumps(options), "--concurrency", "3", "--waves", "2"]
    arguments += ["--min-requests", "1", "--prompt-tokens", "80", "--new-tokens", "8", "-o", str(file)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["version"], row["requests"]) == (engine.__version__, 6)
    assert 4 <= row["output_tokens_per_s"] / row["requests_per_s"] <= 12
    assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"] and 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
