"""Checks of single arguments, which many functions share. They read no values of tensors."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from mla_backend.errors import InvalidInputError


def check_tensor(name: str, x: object) -> None:
    """Check that an argument is a tensor.

    Raises:
        InvalidInputError: says what it is.
    """
    if not isinstance(x, Tensor):
        raise InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")


def check_tensors(**tensors: object) -> None:
    """Check that arguments are tensors, as :func:`check_tensor`."""
    for name, x in tensors.items():
        check_tensor(name, x)


def check_one_device(**tensors: Tensor) -> None:
    """Check that tensors are on one device.

    Raises:
        InvalidInputError: names their devices.
    """
    devices = [x.device for x in tensors.values()]
    if len(set(devices)) != 1:
        raise InvalidInputError(
            f"{', '.join(tensors)} must be on one device, got {', '.join(map(str, devices))}"
        )


def check_int(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is an integer of at least ``least``.

    Raises:
        InvalidInputError: says what it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "a positive int" if least == 1 else f"an int of at least {least}"
        raise InvalidInputError(f"{name} must be {expected}, got {value!r}")


def check_positive(owner: object, *names: str) -> None:
    """Check attributes that must be integers of at least 1.

    Raises:
        InvalidInputError: says which one is not.
    """
    for name in names:
        check_int(name, getattr(owner, name))


def is_number(x: object) -> bool:
    """Whether something is a real number, of Python's or numpy's types, and no bool."""
    # float is among numbers.Real, but found sooner.
    return isinstance(x, (float, numbers.Real)) and not isinstance(x, bool)


# Kernels hold softmax_scale * log2(e) in fp32, as a normal number.
_LEAST_SCALE = torch.finfo(torch.float32).tiny * math.log(2)
_LARGEST_SCALE = torch.finfo(torch.float32).max * math.log(2)


def check_softmax_scale(softmax_scale: float) -> None:
    """Check the factor on the scores.

    Raises:
        InvalidInputError: it is no number, or not finite and greater than 0 in fp32.
    """
    if not is_number(softmax_scale) or not _LEAST_SCALE <= as_float(softmax_scale) <= _LARGEST_SCALE:
        raise InvalidInputError(
            "softmax_scale must be a number, finite and greater than 0 in fp32 (8.2e-39 to 2.3e38), "
            f"got {softmax_scale!r}"
        )


def as_float(number: float) -> float:
    """A number of any type as Python's, because numpy's small floats cannot be compared with every float."""
    try:
        return float(number)
    except OverflowError:  # an int
        return math.inf
