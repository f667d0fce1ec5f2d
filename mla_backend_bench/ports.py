"""Ports for servers."""

import contextlib
import random
import socket


def free_port() -> int:
    """Below those that the system gives out: another process could get such a port before the server does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 32000)))
            return int(probe.getsockname()[1])
