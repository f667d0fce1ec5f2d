"""`bench load` with a toy engine: what its server and its generator are told, and what is left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_backend.errors import InvalidInputError
from mla_backend_bench import load, tables
from mla_backend_bench.cli import app
from mla_backend_bench.serving_engines import Load

ROOT = Path(__file__).parents[2]

# Stands for vLLM. Servers and generators log their arguments; a server also its process.
SERVER = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mla_backend import counters

flags = {name: value for name, value in zip(sys.argv, sys.argv[1:]) if name.startswith("--")}
backend, model = flags["--attention-backend"], Path(flags["--model"])
with (model / "servers").open("a") as log:
    print(json.dumps([os.getpid(), backend, flags, os.environ.get("OF_BACKEND")]), file=log)
print("the server of", backend)
if backend == "BROKEN":
    sys.exit("it does not start")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/generate":
            if backend == "CUSTOM":
                counters.add("absorbed_decode", 1)
            if backend == "MORTAL":
                print("it dies", flush=True)
                os._exit(3)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""
GENERATOR = """
import json, time, urllib.request
from pathlib import Path

def add_cli_args(parser):
    parser.add_argument("--save-result", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")
    for name in ("host port model tokenizer num-prompts max-concurrency seed dataset-name random-range-ratio "
                 "temperature random-input-len random-output-len percentile-metrics metric-percentiles "
                 "result-dir result-filename").split():
        parser.add_argument(f"--{name}")

def main(args):
    with Path(args.model, "loads").open("a") as log:
        print(json.dumps(vars(args)), file=log)
    if Path(args.model, "hang").exists():
        time.sleep(600)
    try:
        urllib.request.urlopen(f"http://{args.host}:{args.port}/generate")
        completed = int(args.num_prompts) - (args.seed == "7")  # one fails at a concurrency of 7
    except OSError:
        completed = 0
    names = ["request_throughput", "output_throughput"]
    names += [f"{which}_{what}_ms" for what in ("ttft", "tpot") for which in ("median", "p99")]
    results = {name: 10.0 * int(args.max_concurrency) + i for i, name in enumerate(names)}
    Path(args.result_dir, args.result_filename).write_text(json.dumps(results | {"completed": completed}))
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with the toy engine, which is also the model's."""
    files = {
        "vllm/__init__.py": '__version__ = "1.2"',
        "vllm/entrypoints/openai/api_server.py": SERVER,
        "vllm/benchmarks/serve.py": GENERATOR,
        "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
        "config.json": '{"text_config": {"vocab_size": 1000}}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path), str(ROOT), str(ROOT / "integrations"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def logged(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_no_server_is_left(model):
    processes = [process for process, *_ in logged(model / "servers")]
    deadline = time.monotonic() + 20  # the system may take a moment to reap them
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def bench(model, *arguments):
    return CliRunner().invoke(app, ["load", "vllm", str(model), *arguments])


def test_each_backend_is_loaded_in_turn(model):
    path = model / "results.json"
    backends = [
        "--backend",
        'CUSTOM {"environment": {"OF_BACKEND": "1"}, "block_size": 32}',
        "--backend",
        "B",
    ]
    levels = ["--concurrency", "1", "--concurrency", "8", "--prompt-tokens", "100", "--new-tokens", "10"]
    size = ["--waves", "2", "--min-requests", "5", "--range-ratio", "0.2"]
    engine = ["--engine-options", '{"enforce_eager": true, "compilation_config": {"mode": 0}}']
    outcome = bench(model, *backends, *levels, *size, *engine, "--together", "2", "-o", str(path))
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(path.read_text())
    assert [(row["backend"], row["concurrency"], row["requests"]) for row in written["rows"]] == [
        ("CUSTOM OF_BACKEND=1", 1, 5),
        ("B", 1, 5),
        ("CUSTOM OF_BACKEND=1", 8, 16),
        ("B", 8, 16),
    ]
    *_, row = written["rows"]
    lengths = {"prompt_tokens": 100, "new_tokens": 10, "range_ratio": 0.2}
    assert row.items() >= {"engine": "vllm", "version": "1.2", "start": 0, "model": model.name}.items()
    assert row.items() >= lengths.items() and "options" not in row
    assert [row[name] for name in load.MEASURED] == [80, 81, 82, 83, 84, 85]
    assert written["rows"][0]["options"] == {"block_size": 32}
    assert set(written["runs"]) == {f"vllm {model.name}"}

    servers = {backend: (flags, variable) for _, backend, flags, variable in logged(model / "servers")}
    assert servers["CUSTOM"][1] == "1" and servers["B"][1] is None
    ours, theirs = servers["CUSTOM"][0], servers["B"][0]
    assert ours.pop("--port") != theirs.pop("--port") and ours.pop("--block-size") == "32"
    assert ours.items() >= {"--max-num-seqs": "8", "--max-model-len": "132", "--dtype": "bfloat16"}.items()
    assert ours["--compilation-config"] == '{"mode": 0}'
    loads = logged(model / "loads")
    # Not measured: the most requests at a time, with short texts.
    first = [(one["num_prompts"], one["random_output_len"]) for one in loads[:2]]
    assert first == [("8", "2"), ("8", "2")]
    seeds = [(one["seed"], one["max_concurrency"]) for one in loads]
    assert seeds == [("0", "8"), ("0", "8"), ("1", "1"), ("1", "1"), ("8", "8"), ("8", "8")]
    assert_no_server_is_left(model)


def starts_in(path):
    return [row["start"] for row in json.loads(path.read_text())["rows"]]


def test_starts_are_added_to_those_in_the_file(model):
    path = model / "results.json"
    arguments = ["--backend", "CUSTOM", "--concurrency", "2", "-o", str(path), "--commit", "c0ffee"]
    assert bench(model, *arguments, "--starts", "2").exit_code == 0
    outcome = bench(model, *arguments, "--add")
    assert outcome.exit_code == 0 and [row["start"] for row in json.loads(path.read_text())["rows"]] == [
        0,
        1,
        2,
    ]
    outcome = bench(model, *arguments[:-1], "decaf", "--add")
    assert outcome.exit_code == 2 and "another commit" in outcome.output
    assert bench(model, *arguments).exit_code == 0
    assert starts_in(path) == [0]


@pytest.mark.parametrize(
    "backend, last_words",
    [
        ("BROKEN", ["the server of BROKEN", "it does not start", "ended with exit status 1"]),
        ("MORTAL", ["the server of MORTAL", "it dies", "ended with exit status 3"]),
    ],
)
def test_a_server_that_dies(model, backend, last_words):
    outcome = bench(model, "--backend", backend, "--backend", "B", "--concurrency", "2", "--together", "2")
    assert outcome.exit_code == 1
    positions = [outcome.output.index(words) for words in (f"{backend} failed", *last_words)]
    assert positions == sorted(positions)
    assert "requests/s" in outcome.output, "the other backend has its row"
    assert_no_server_is_left(model)


def test_failed_requests_are_no_figure(model):
    outcome = bench(model, "--backend", "B", "--concurrency", "7")
    assert outcome.exit_code == 1 and "1 of 28 requests failed" in outcome.output
    assert "token ids" not in outcome.output


def test_a_small_vocabulary_is_named(model):
    (model / "config.json").write_text('{"vocab_size": 255}')
    outcome = bench(model, "--backend", "B", "--concurrency", "2", "--waves", "16")
    assert outcome.exit_code == 0 and "255 token ids, too few for 32 different" in outcome.output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_if_the_command_is_stopped(model, how):
    (model / "hang").touch()
    # Whoever started the tests may ignore SIGINT, as a shell does for what it runs in the background.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = f"{heed}; from mla_backend_bench.cli import app; app()"
    arguments = [sys.executable, "-c", run, "load", "vllm", str(model), "--backend", "B", "--backend", "C"]
    command = subprocess.Popen([*arguments, "--together", "2"], start_new_session=True)
    try:
        while not (model / "loads").exists():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(how)
        command.wait(120)
    finally:
        command.kill()
    assert_no_server_is_left(model)


def test_the_table_has_medians_over_starts():
    from rich.console import Console

    console = Console(width=150)
    lengths = {"prompt_tokens": 100, "new_tokens": 10, "range_ratio": 0.5}
    common = {"engine": "vllm", "concurrency": 8, "requests": 32} | lengths
    rows = [
        common | {"backend": backend, "start": start} | dict.fromkeys(load.MEASURED, value)
        for start, values in enumerate([(1.0, 7.0), (9.0, 8.0), (2.0, 9.0)])
        for backend, value in zip("AB", values, strict=True)
    ]
    # Of another load, added to the same file: `--add --range-ratio 0`.
    rows.append(rows[0] | {"start": 3, "range_ratio": 0.0} | dict.fromkeys(load.MEASURED, 5.0))
    rows.append(rows[0] | {"options": {"block_size": 32}} | dict.fromkeys(load.MEASURED, 4.0))
    with console.capture() as capture:
        tables.print_loads(console, rows)
    _, *lines = capture.get().splitlines()
    assert [line.split() for line in lines] == [
        ["A", "50-150", "5-15", "8", *["2.00"] * 6],
        ["B", "50-150", "5-15", "8", *["8.00"] * 6],
        ["A", "100", "10", "8", *["5.00"] * 6],
        ["A", '{"block_size":', "32}", "50-150", "5-15", "8", *["4.00"] * 6],
    ]


def test_options_become_flags():
    options = {"page_size": 64, "sizes": [1, 16], "config": {"a": 1}, "on": True, "off": False, "unset": None}
    written = ["--page-size", "64", "--sizes", "1", "16", "--config", '{"a": 1}', "--on"]
    assert load.flags(options, negatable=False) == written
    assert load.flags(options, negatable=True) == [*written, "--no-off"]


def test_a_texts_tokens_are_those_it_was_made_of(tmp_path):
    transformers = pytest.importorskip("transformers")
    load.save_tokenizer(tmp_path, 102400)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 102400 and not tokenizer.all_special_ids
    tokens = [0, 102399, 12, 0, 7, 99999]
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text) == tokens and len(text) == 6 * len(tokens)


def test_sglang_draws_the_same_lengths(tmp_path):
    arguments = load.ENGINES["sglang"].load(Load(8, 32, 2048, 256, 0.5), tmp_path / "file")
    flags = dict(zip(arguments, arguments[1:], strict=False))
    assert flags["--random-input-len"] == 3072 and flags["--random-output-len"] == 384
    assert 3072 * flags["--random-range-ratio"] == pytest.approx(1024)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tgi", "."], "unknown engine tgi"),
        (["vllm", "."], "config.json cannot be read"),
        (["vllm", "unnamed"], "has no vocab_size"),
        (["vllm", ".", "--backend", "CUSTOM 3"], "is not a backend"),
        (["vllm", ".", "-o", "other.json"], "does not hold results"),
        (["vllm", ".", "--concurrency", "0"], "Invalid value for '--concurrency'"),
        (["vllm", "known", *("--concurrency", "8") * 2], "8 is given more than once; --starts"),
        (["vllm", ".", "--range-ratio", "1"], "Invalid value for '--range-ratio'"),
        (["vllm", "known", "--add"], "--add needs the file"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "other.json").write_text("{}")
    for name, config in (("unnamed", {}), ("known", {"vocab_size": 8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    outcome = CliRunner().invoke(app, ["load", *arguments])
    assert outcome.exit_code == 2 and message in outcome.output


def test_a_missing_engine_is_named_before_anything_starts(tmp_path, monkeypatch):
    config = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 512}
    config |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in ("load", "layer"):
        outcome = CliRunner().invoke(app, [command, "sglang", str(tmp_path)])
        assert (outcome.exit_code, outcome.output.strip()) == (1, "sglang is not installed here")


def test_vocabularies(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load.vocabulary_of(str(tmp_path))
