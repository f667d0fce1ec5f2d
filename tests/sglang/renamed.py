"""Renames an identifier everywhere in SGLang, as a future release may do.

The processes of an engine import this before SGLang. ``RENAMED_IN_SGLANG`` holds the identifier.
"""

import importlib.machinery
import os
import re


def install(name: str) -> None:
    """Rename an identifier in the source of every SGLang module that is imported from now on."""
    word = re.compile(rf"\b{name}\b")
    get_code = importlib.machinery.SourceFileLoader.get_code

    def get_renamed_code(loader, module_name):
        if module_name.startswith("sglang."):
            source = loader.get_data(loader.path).decode()
            if word.search(source):
                return loader.source_to_code(word.sub(f"{name}_elsewhere", source), loader.path)
        return get_code(loader, module_name)

    importlib.machinery.SourceFileLoader.get_code = get_renamed_code


if "RENAMED_IN_SGLANG" in os.environ:
    install(os.environ["RENAMED_IN_SGLANG"])
