"""NIXL, which carries caches between servers, in tests on a CPU."""

import functools


@functools.cache
def let_nixl_sleep() -> None:
    """Let NIXL's progress thread sleep between its looks at the network; in this process and its forks.

    NIXL's Python API has the thread look again at once, in every rank: servers would spend most of their time
    on that, and share few processors. Transfers then start up to a millisecond later. A GPU's servers keep
    what users have.
    """
    from nixl._api import nixlBind

    make = nixlBind.nixlAgent

    def make_with_delay(name, config):
        config.pthrDelay = 1000  # microseconds
        return make(name, config)

    nixlBind.nixlAgent = make_with_delay
