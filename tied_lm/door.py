"""Doors: the public names of a package, and its modules, each loaded when it is asked for.

So what needs no arrays (reading a config, --help) does not wait for the libraries of what it does not use.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping


def door(package: str, names: Mapping[str, str]) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        names: public names, separated by spaces, by the module below the package that has them.
    """
    module_of = {name: f"{package}.{module}" for module, of_module in names.items() for name in of_module.split()}

    def find(name: str) -> object:
        if name in module_of:
            return getattr(importlib.import_module(module_of[name]), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return sorted(module_of), find, lambda: sorted(module_of)
