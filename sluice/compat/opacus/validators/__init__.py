"""Opacus's `ModuleValidator`."""

from sluice.compat.opacus.validators.module_validator import ModuleValidator

__all__ = ["ModuleValidator"]
