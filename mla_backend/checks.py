"""Checks of arguments that many functions share. They read no values of tensors."""

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


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Check that the last dimension is contiguous. The stride of a single element may be anything.

    Raises:
        InvalidInputError: names the strides.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidInputError(
            f"the last dimension of {name} must be contiguous, got strides {tensor.stride()}: "
            "pass a contiguous copy (for a CUDA graph, one that has the same address in each step)"
        )


def check_operand(
    name: str, tensor: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Check one tensor. Its last dimension must be contiguous.

    Args:
        shape: the sizes; a word, such as "num_pages", stands for any size.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    check_tensor(name, tensor)
    if not _has_shape(tensor, shape) or tensor.dtype != dtype or tensor.device != device:
        raise InvalidInputError(
            f"{name} must be {dtype} [{', '.join(map(str, shape))}] on {device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    check_contiguous(name, tensor)


def check_output(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Check a tensor that is written, as :func:`check_operand`; its elements must not share memory.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    check_operand(name, tensor, shape, dtype, device)
    check_not_expanded(name, tensor)


def check_not_expanded(name: str, tensor: Tensor) -> None:
    """Check that no two elements of a tensor share memory.

    Raises:
        InvalidInputError: names the strides.
    """
    strides = tensor.stride()
    if 0 in strides and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=True)
    ):
        raise InvalidInputError(
            f"{name} is expanded, so that its elements share memory (strides {strides}): "
            "pass a tensor with memory of its own"
        )


def _has_shape(tensor: Tensor, shape: tuple[int | str, ...]) -> bool:
    if tensor.shape == shape:
        return True
    return tensor.ndim == len(shape) and all(
        isinstance(expected, str) or size == expected
        for size, expected in zip(tensor.shape, shape, strict=True)
    )


def check_int(name: str, value: object, least: int = 1) -> None:
    """Check that an argument is an integer of at least ``least``.

    Raises:
        InvalidInputError: says what it is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "a positive int" if least == 1 else f"an int of at least {least}"
        raise InvalidInputError(f"{name} must be {expected}, got {value!r}")


def convert_integers(owner: object, *names: str) -> None:
    """Convert attributes of a frozen dataclass that are integers of another type, such as numpy's, to int:
    numpy's overflow in products. Others stay, for a check to refuse."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            object.__setattr__(owner, name, int(value))


def check_positive(owner: object, *names: str) -> None:
    """Check attributes that must be integers of at least 1.

    Raises:
        InvalidInputError: says which one is not.
    """
    for name in names:
        check_int(name, getattr(owner, name))


def is_number(x: object) -> bool:
    """Whether something is a real number, of Python's or numpy's types, and no bool."""
    # numbers.Real includes float, but the check for float itself is faster.
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
    """Convert a number to Python's float, because numpy's small floats do not compare with every float."""
    try:
        return float(number)
    except OverflowError:  # an int
        return math.inf
