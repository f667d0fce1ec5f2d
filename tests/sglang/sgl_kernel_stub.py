"""An ``sgl_kernel`` for SGLang's speculative modules to import: its names exist, but cannot be called."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class _Missing:
    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__} was called, and sgl_kernel is not installed")


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Install the stub unless the real package is installed."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.meta_path.insert(0, _Finder())
