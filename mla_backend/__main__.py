"""`python -m mla_backend` is the command `mla-backend`."""

from mla_backend.cli import main

main()
