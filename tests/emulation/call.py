"""Calls a function of a shared library in a process of its own, which imports little.

    python call.py <library> <function> <file> <arguments>

The arguments, in JSON, are numbers (floats are doubles, others 64-bit integers), null, or [offset]: an
address in the file. Exits with what the function returns.
"""

import ctypes
import json
import mmap
import sys


def main(library: str, function: str, path: str, arguments: str) -> int:
    with open(path, "r+b") as file:
        memory = ctypes.c_char.from_buffer(mmap.mmap(file.fileno(), 0))
    converted = [
        ctypes.c_double(value)
        if isinstance(value, float)
        else ctypes.c_void_p(value and ctypes.addressof(memory) + value[0])
        if value is None or isinstance(value, list)
        else ctypes.c_int64(value)
        for value in json.loads(arguments)
    ]
    return getattr(ctypes.CDLL(library), function)(*converted)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
