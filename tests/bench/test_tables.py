"""The tables of `mla-backend bench`: on a narrow terminal, no number is cut."""

import io

import pytest
from rich.console import Console

from mla_backend_bench import decode, prefill, sparse, tables
from mla_backend_bench.cases import Case
from mla_backend_bench.timing import times_of

CASE = Case.parse("128x131072x128x4@16~lognormal")
NAMES = ("mla_backend", "mla_backend_portable_99k", "flashinfer-fa3", "flashinfer-fa2", "flashmla", "triton")


def render(width, print_table, *arguments):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_table(console, *arguments)
    return console.file.getvalue()


def decode_row(impl, time_us=123456.7, **fields):
    shape = {name: getattr(CASE, name) for name in decode.Case.__dataclass_fields__}
    row = dict(plan_us=1234.0, tb_per_s=4.567, tflops=1234.5, rel_l2=2.3e-03, sm_mhz=1980.0)
    row |= dict(p10_us=time_us - 1, p90_us=time_us + 1)
    return decode.Row(**shape, impl=impl, time_us=time_us, **row | fields)


def decode_results(*rows):
    return decode.Results({"device": "a GPU"}, {}, None, "bfloat16", {"sum": 4.5}, 4.5, rows=list(rows))


@pytest.mark.parametrize("width", [80, 150])
def test_no_number_is_cut(width):
    rows = [decode_row(name, 123456.7 + number) for number, name in enumerate(NAMES)]
    results = decode_results(*rows)
    lists = sparse.SparseCase("decode", 128, 2048, 128)
    of_lists = ("decode", 128, 2048, 128, "bf16")
    sparse_rows = [sparse.Row(*of_lists, name, 123456.7, 1234.0, 1234.5, 2.3e-3, 1.0, 2.0) for name in NAMES]
    for text in (
        render(width, tables.print_decode_case, CASE, results),
        render(width, tables.print_decode_summary, [CASE], results),
        render(width, tables.print_quick, [CASE], results),
        render(width, tables.print_sparse_case, lists, sparse_rows),
    ):
        assert "…" not in text and "..." not in text
        assert all(len(line) <= width for line in text.splitlines())
        assert "123456.7" in text
    assert "2.3e-03" in render(width, tables.print_decode_case, CASE, results)
    shape = prefill.PrefillShape.parse("48x32768@1024")
    row = prefill.PrefillRow(1024, 1024, 48, 32768, 32768, True, NAMES[1], 123456.7, 1234.5, 2e-3, 1.0, 2.0)
    done = prefill.PrefillResults({}, {}, None, "bfloat16", rows=[row])
    text = render(width, tables.print_prefill_shape, shape, done)
    assert "…" not in text and "123456.7" in text and "1.0-2.0" in text


def test_a_wide_table_has_every_time():
    results = decode_results(decode_row("mla_backend", 10.0), decode_row("triton", 30.0))
    wide = render(150, tables.print_decode_case, CASE, results)
    assert all(part in wide for part in ("1980", "1234", "1234.5", "3.00x", "9.0-11.0"))
    narrow = render(80, tables.print_decode_case, CASE, results)
    assert "1980" not in narrow and "9.0-11.0" in narrow and "3.00x" in narrow


def test_the_spread_is_that_of_the_times():
    times = times_of([float(value) for value in range(100, -1, -1)])
    assert times == (50.0, 10.0, 90.0)
    assert times_of([2.0]) == (2.0, 2.0, 2.0)


def test_times_that_vary_are_named():
    noisy, calm = decode_row("flashmla", p10_us=10.0, p90_us=12.0), decode_row("mla_backend")
    text = render(150, tables.print_decode_case, CASE, decode_results(noisy, calm))
    assert "times of flashmla vary by more than 10%" in text
    assert "vary" not in render(150, tables.print_decode_case, CASE, decode_results(calm))
    old = decode_row("flashmla", p10_us=None, p90_us=None)  # of an older file
    assert "vary" not in render(150, tables.print_decode_case, CASE, decode_results(old))


def test_the_verdict_of_a_quick_comparison():
    text = render(80, tables.print_quick, [CASE], decode_results(decode_row("mla_backend", 50.0)))
    assert "nothing else is installed here" in text
    rows = [decode_row("mla_backend", 50.0), decode_row("triton", 200.0), decode_row("flashmla", 100.0)]
    text = " ".join(render(80, tables.print_quick, [CASE], decode_results(*rows)).split())
    assert (
        "ours takes 50% of the time of the best other one (mean of 1 shapes; installed: flashmla, triton)"
        in text
    )
