"""A package whose own ``__init__`` runs when a name of it is first missed, not when one of its modules is imported."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_LOADING = threading.RLock()


def import_on_demand(package: str) -> None:
    """Make ``import package.module`` and ``from package import module`` cost that module alone.

    Importing a module first runs the ``__init__`` of its package, which for some packages loads far more than the module
    needs. Afterwards the package is the ordinary one to everybody: its ``__init__`` runs, in the very same module object,
    as soon as somebody asks for a name that is no module of it. Nothing is done where it is loaded or missing.
    """
    spec = None if package in sys.modules else find_spec(package)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _OnDemand
    module = sys.modules.setdefault(package, module)
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


class _OnDemand(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by the import system and by tools, and defined by hardly any ``__init__``
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if find_spec(f"{self.__name__}.{name}") is not None:
            return import_module(f"{self.__name__}.{name}")
        with _LOADING:
            if type(self) is _OnDemand:
                self.__class__ = ModuleType  # type: ignore[assignment]
                try:
                    self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
                except BaseException:
                    self.__class__ = _OnDemand
                    raise
        return getattr(self, name)
