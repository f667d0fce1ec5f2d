"""Calls a function of an emulated kernel in a process of its own, which imports little.

    python call.py <library> <function> <multiprocessors> <file> <arguments>

The arguments are JSON, as for `argument`; a tensor's address is an offset in the file. Prints what the
function returns.
"""

import ctypes
import json
import mmap
import sys


class Argument(ctypes.Structure):
    """As in overlay/ffi/tvm.cuh."""

    _fields_ = [
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_double),
        ("data", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("ndim", ctypes.c_int64),
    ]


def argument(value) -> Argument:
    """A number, None, or the address, bits per element, sizes and strides of a tensor."""
    if value is None:
        return Argument()
    if not isinstance(value, (list, tuple)):
        return Argument(integer=int(value), number=float(value))
    address, bits, sizes, strides = value
    return Argument(0, 0.0, address, bits, tuple(sizes), tuple(strides), len(sizes))


def call(library: str, name: str, multiprocessors: int, values: list) -> list[int]:
    """Call a function that may launch, with arguments as for `argument`; what it returns."""
    results = (ctypes.c_int64 * 8)()
    arguments = (Argument * len(values))(*map(argument, values))
    count = getattr(ctypes.CDLL(library), f"exported_{name}")(arguments, results, multiprocessors)
    assert count >= 0, f"{name} failed, and printed why"
    return results[:count]


def main(library: str, name: str, multiprocessors: str, path: str, arguments: str) -> None:
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    values = json.loads(arguments)
    values = [[base + value[0], *value[1:]] if isinstance(value, list) else value for value in values]
    print(json.dumps(call(library, name, int(multiprocessors), values)))


if __name__ == "__main__":
    main(*sys.argv[1:])
