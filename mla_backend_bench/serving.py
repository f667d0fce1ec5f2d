"""Measures whole engines, with this backend and with the engine's own, in one run.

Each backend has an engine in a separate process, where a `Meter` measures it: `EngineMeter` its prefill and
decode times, `load.ServerMeter` its server under load. Engines that run at the same time share the device's
memory, but only one of them has work at a time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from mla_backend import counters
from mla_backend.errors import InvalidInputError
from mla_backend_bench import environment
from mla_backend_bench.layer import measure as measure_layer
from mla_backend_bench.serving_engines import DRIVERS, Backend, Load, Settings, Shape
from mla_backend_bench.serving_timing import measure

TIMEOUT = 600  # seconds, for the start of an engine and for one measurement
_END_SECONDS = 10  # an engine that is done may take so long to end; then it is killed
_LOG_CHARACTERS = 4000

Row = dict[str, Any]
"""engine, what the meter says of the backend, the fields of a shape, and what was measured of it."""

OWN_FIELDS = {"serving": "prefill_ms", "layer": "kernels_per_layer", "load": "requests_per_s"}
"""What the rows of one command alone have, by the command. A file holds rows of one command."""

OnFailure = Callable[[str, str], None]
"""Called with a backend whose engine ended or hung, and with the end of its log."""


class Meter(Protocol):
    """Starts one backend's engine when it is constructed, in a process of its own, and measures it.

    Attributes:
        facts: what rows say of the backend, besides its name.
    """

    facts: Row

    def __init__(self, settings: Settings, backend: Backend, folder: Path): ...

    def measure(self, shape: Any) -> dict[str, float]:
        """What rows say of a shape in ``settings.shapes``."""


class EngineMeter:
    """Prefill and decode times of an engine, or what `layer.measure` measures."""

    def __init__(self, settings: Settings, backend: Backend, folder: Path):
        self._settings = settings
        random.seed(0)  # the same prompts for all backends
        self._engine = DRIVERS[settings.engine](settings, backend.name, folder / "traces")
        for shape in settings.shapes:  # an engine may build kernels at the first use of a shape
            assert isinstance(shape, Shape)
            measure(self._engine, shape, new_tokens=2, repeats=1)
        self.facts: Row = {"version": self._engine.version} | self._engine.setup

    def measure(self, shape: Shape) -> dict[str, float]:
        if self._settings.layers:
            return measure_layer(self._engine, shape, self._settings.layers)
        profile = self._settings.profile and torch.cuda.is_available()
        return measure(self._engine, shape, self._settings.new_tokens, profile=profile)


def run(
    settings: Settings, backends: list[str], on_failure: OnFailure, meter: type[Meter] = EngineMeter
) -> Iterator[Row]:
    """Measure all shapes with each backend, ``settings.together`` engines at a time.

    ``backends`` are written as for `serving_engines.Backend.parse`. After a failure the other engines
    continue.
    """
    for start in range(0, len(backends), settings.together):
        yield from _run_together(settings, backends[start : start + settings.together], on_failure, meter)


def load(path: Path) -> dict[str, Any]:
    """Read results that `save` wrote.

    Raises:
        InvalidInputError: the file holds something else.
    """
    try:
        results = json.loads(path.read_text())
    except ValueError:
        results = None
    if not isinstance(results, dict) or not {"runs", "rows"} <= set(results):
        raise InvalidInputError(f"{path} does not hold results of whole engines; name another file")
    return results


def check(path: Path, command: str) -> None:
    """Check that the results of ``bench command`` can be written to a file, if there is one.

    Raises:
        InvalidInputError: the file holds something else, or rows of another command.
    """
    rows = load(path)["rows"] if path.exists() else []
    for other, field in OWN_FIELDS.items():
        if other != command and any(field in row for row in rows):
            raise InvalidInputError(
                f"{path} holds results of `bench {other}`; name another file for those of `bench {command}`"
            )


def save(path: Path, rows: list[Row], command: str, commit: str | None = None) -> None:
    """Write a run's rows as JSON with their machine, versions, commit and command; keep other runs' rows."""
    results = load(path) if path.exists() else {"runs": {}, "rows": []}
    run = _run_of(rows[0])
    replaced = (run, rows[0]["engine"])  # rows that name no model are older
    results["runs"] = {name: facts for name, facts in results["runs"].items() if name not in replaced}
    results["runs"][run] = _origin(commit) | {"command": command}
    results["rows"] = [row for row in results["rows"] if _run_of(row) not in replaced] + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def _run_of(row: Row) -> str:
    """The run that a row is of: its engine and its model, which old rows do not name."""
    return " ".join(row[name] for name in ("engine", "model") if name in row)


def _origin(commit: str | None) -> dict[str, Any]:
    return environment.origin(torch.device("cuda" if torch.cuda.is_available() else "cpu"), commit)


def rows_of(path: Path, engine: str, model: str, commit: str | None) -> list[Row]:
    """The rows that a file has of a model, to which those of further starts are to be added.

    Raises:
        InvalidInputError: the file holds something else, or rows of another device, version or commit.
    """
    run = f"{engine} {model}"
    results = load(path) if path.exists() else {"runs": {}}
    if run not in results["runs"]:
        return []
    before, now = results["runs"][run], _origin(commit)
    for origin in (before, now):
        origin["device"] = origin["machine"]["device"]
    for name in ("device", "versions", "commit"):
        if before[name] != now[name]:
            raise InvalidInputError(
                f"{path} has rows of another {name}: {before[name]}, now {now[name]}; name another file"
            )
    return [row for row in results["rows"] if _run_of(row) == run]


def _run_together(
    settings: Settings, backends: list[str], on_failure: OnFailure, meter: type[Meter]
) -> Iterator[Row]:
    """Rows of backends whose engines run at the same time and measure in turn."""
    with tempfile.TemporaryDirectory() as folder:
        processes: list[_EngineProcess] = []
        try:
            for backend in backends:
                place = Path(tempfile.mkdtemp(dir=folder))
                processes.append(_EngineProcess(settings, backend, place, on_failure, meter))
            facts = [process.receive() for process in processes]
            for shape in settings.shapes:
                times: list[list[dict[str, float]]] = [[] for _ in processes]
                for _ in range(settings.rounds):
                    for process, measured in zip(processes, times, strict=True):
                        if process.running and (result := process.measure(shape)):
                            measured.append(result)
                for fact, measured in zip(facts, times, strict=True):
                    if measured:
                        yield {"engine": settings.engine} | fact | shape._asdict() | _medians(measured)
        except BaseException:  # such as Ctrl-C
            for process in processes:
                process.kill()
            raise
        finally:
            for process in processes:
                process.stop()


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(times[key] for times in rounds), 4) for key in rounds[0]}


class _EngineProcess:
    """The parent's side of `_run_engine`."""

    def __init__(
        self,
        settings: Settings,
        backend: str,
        folder: Path,
        on_failure: OnFailure,
        meter: type[Meter] = EngineMeter,
    ):
        self.running = True
        self._backend, self._folder, self._on_failure = backend, folder, on_failure
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_engine, args=(theirs, settings, backend, folder, meter))
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """The engine's next answer; None if the engine fails. The first answer says what runs."""
        with contextlib.suppress(EOFError, ConnectionError):
            if self._connection.poll(TIMEOUT):
                return self._connection.recv()
        self.running = False
        self.kill()
        log = self._folder / "log"
        self._on_failure(self._backend, log.read_text()[-_LOG_CHARACTERS:] if log.exists() else "")
        return None

    def measure(self, shape: Shape | Load) -> dict[str, float] | None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(shape)
        return self.receive()

    def stop(self) -> None:
        """End the engine. If it does not wait for work, but starts or measures, it is killed."""
        self._connection.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self.kill()
            self._process.join()

    def kill(self) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # the process has not called setsid yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def _run_engine(
    connection: Connection, settings: Settings, backend: str, folder: Path, meter: type[Meter]
) -> None:
    """Start an engine in this child process, send what runs, and measure each shape that arrives."""
    os.setsid()
    with open(folder / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ[counters.ENVIRONMENT_VARIABLE] = str(folder)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        parsed, driver = Backend.parse(backend), DRIVERS[settings.engine]
        os.environ |= driver.environment(parsed.name) | dict(os.environ) | parsed.environment
        settings = replace(settings, engine_options=settings.engine_options | parsed.options)
        engine = meter(settings, parsed, folder)
        counts = counters.read_folder(folder)
        if any(count.calls for count in counts.values()) != driver.is_ours(parsed.name):
            raise RuntimeError(
                f"the engine was to use {parsed.name}, but mla-backend's counters show {counts}"
            )
        connection.send({"backend": parsed.label} | engine.facts)
        while True:
            connection.send(engine.measure(connection.recv()))
    except EOFError:
        pass  # the parent is done
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)  # includes the engine's own processes, which may outlive this one


def _end_with_parent() -> None:
    """Wait until this process has another parent, because its own was killed; then end its group."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
