"""`python -m mla_backend_bench` is `mla-backend bench`, also in a checkout that is not installed."""

from mla_backend_bench.cli import app

app(prog_name="mla-backend bench")
