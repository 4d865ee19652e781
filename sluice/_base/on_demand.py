"""A package whose own ``__init__`` runs when a name of it is first missed, not when one of its modules is imported."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_LOADING = threading.RLock()
_CORES: dict[str, str] = {}
_RUNNING: set[str] = set()


def import_on_demand(package: str, *, core: str | None = None) -> None:
    """Make ``import package.module`` and ``from package import module`` cost that module alone.

    Importing a module first runs the ``__init__`` of its package, which for some packages loads far more than the module
    needs. Afterwards the package is the ordinary one to everybody: its ``__init__`` runs, in the very same module object,
    as soon as somebody asks for a name that is no module of it. Nothing is done where it is loaded or missing.

    Args:
        core: a module of the package that defines names of the package, those in its ``__all__``: asking for one of them
            costs that module alone. In versions of the package that have no such module they are names like any other.
    """
    spec = None if package in sys.modules else find_spec(package)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _OnDemand
    if core is not None:
        _CORES[package] = core
    module = sys.modules.setdefault(package, module)
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


class _OnDemand(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # asked for by the import system and by tools
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if _exists(f"{self.__name__}.{name}"):
            return import_module(f"{self.__name__}.{name}")
        with _LOADING:
            _take_names_of_core(self)
            if name not in vars(self):
                _run(self)
        return ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        _run(self)
        return list(ModuleType.__dir__(self))


def _take_names_of_core(package: ModuleType) -> None:
    core = _CORES.pop(package.__name__, None)
    if core is not None and _exists(f"{package.__name__}.{core}"):
        module = import_module(f"{package.__name__}.{core}")
        vars(package).update({name: getattr(module, name) for name in module.__all__})


def _run(package: ModuleType) -> None:
    """Run the ``__init__``, once. Other threads wait for it; what it imports sees it half done, as always."""
    with _LOADING:
        if type(package) is not _OnDemand or package.__name__ in _RUNNING:
            return
        _CORES.pop(package.__name__, None)
        _RUNNING.add(package.__name__)
        try:
            package.__spec__.loader.exec_module(package)  # type: ignore[union-attr]
        finally:
            _RUNNING.remove(package.__name__)
        package.__class__ = ModuleType  # type: ignore[assignment]


def _exists(module: str) -> bool:
    return find_spec(module) is not None
