"""The exceptions of mla_backend."""


class MLABackendError(Exception):
    """Base of all errors of this package."""


class InvalidInputError(MLABackendError, ValueError):
    """An argument has a wrong shape, dtype, device, page size or value.

    The message names the argument, what it is and what it should be.
    """


class UnsupportedError(MLABackendError, RuntimeError):
    """The arguments are valid, but nothing on this machine can serve them."""


class KernelBuildError(MLABackendError, RuntimeError):
    """A kernel could not be built: no compiler, a failed compilation, or building is forbidden."""
