"""The exceptions that every part of mla_backend raises."""


class MLABackendError(Exception):
    """Base of all errors of this package."""


class InvalidInputError(MLABackendError, ValueError):
    """An argument has a wrong shape, dtype, device, page size or value.

    The message says what was given and what would be right.
    """


class UnsupportedError(MLABackendError, RuntimeError):
    """The arguments are sound, but no path on this machine serves them."""


class KernelBuildError(MLABackendError, RuntimeError):
    """A kernel could not be built: missing compiler, failed compilation, forbidden build."""
