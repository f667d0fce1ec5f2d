"""The exceptions of mla_backend."""


class MLABackendError(Exception):
    """Base of the errors of this package.

    The entry points of kernels, which check what Python cannot check at once (alignment, streams, launches),
    raise ValueError and RuntimeError.
    """


class InvalidInputError(MLABackendError, ValueError):
    """An argument has a wrong shape, dtype, device, page size or value.

    The message names the argument, and says what it is and what it should be.
    """


class UnsupportedError(MLABackendError, RuntimeError):
    """The arguments are valid, but nothing on this machine can serve them."""


class KernelBuildError(MLABackendError, RuntimeError):
    """A kernel could not be built: no compiler, a failed compilation, or building is forbidden."""
