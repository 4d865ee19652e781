"""Running modules as they are written, so that everything in them can be seen."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as module_hooks

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.spectral import STANDING_STILL


@contextmanager
def as_written() -> Iterator[None]:
    """Inside, modules run once and by their own Python code, which hooks and function modes can follow.

    - The fused inference kernels of torch's transformer layers, which go past the modules in them, are off.
    - What `torch.compile` made runs its original code.
    - Activation checkpoints keep what they would compute a second time in the backward pass, which nobody would record. A
      chunk of a batch needs little memory in any case.
    - Spectral norms stand still (`sluice.gradients.spectral`).
    - Attention masks of transformers stay where nothing is masked: whether a batch has one does not depend on its records.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    replacements = _replacements()
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    stance = _original_code()
    torch.backends.mha.set_fastpath_enabled(False)
    _put(replacements)
    try:
        yield
    finally:
        _put(own)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        if stance is not None:
            stance.__exit__(None, None, None)


def _original_code() -> Any | None:
    """From here on compiled modules and functions run their original code, until the returned context is left."""
    if not _compiler_is_loaded():
        return None
    return torch.compiler.set_stance("force_eager")


_FROM_COMPILED_CODE = (
    "The private module is called from code that torch.compile made, in which its gradients cannot be recorded. Make the "
    "compiled module private, module = torch.compile(module), and call that one; do not compile the private module in place "
    "(module.compile()), nor a function that calls it. Private steps run uncompiled."
)


def refuse_compiling() -> None:
    """Raise if this is called from compiled code."""
    if _compiler_is_loaded() and _is_compiled():
        raise UnsupportedModuleError(_FROM_COMPILED_CODE)


def _is_compiled() -> bool:
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
    return torch.compiler.is_compiling() or callback() not in (None, False)


def refuse_compiled_in_place(module: nn.Module) -> None:
    """Raise if calls of the module run compiled code before any hook can see them."""
    if module._compiled_call_impl is not None:
        raise UnsupportedModuleError(_FROM_COMPILED_CODE)


def _compiler_is_loaded() -> bool:
    """Where the compiler was never loaded nothing is compiled; loading it takes seconds."""
    return "torch._dynamo" in sys.modules


def accept_compiled(module: nn.Module) -> None:
    """Do not warn at every call that compiled modules are watched by hooks: here they run their original code."""
    if _compiler_is_loaded() and any(type(part).__name__ == "OptimizedModule" for part in module.modules()):
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")


def forget_removed_hooks() -> None:
    """Torch keeps a note of every process-wide hook that took keywords, also once it is removed."""
    noted = module_hooks._global_forward_hooks_with_kwargs
    for removed in [key for key in noted if key not in module_hooks._global_forward_hooks]:
        del noted[removed]


class _Keeping:
    """In place of the autograd function of reentrant checkpoints."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _keeping(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of what surrounds the forward pass of other checkpoints."""
    yield


def _values_are_not_read(tensor: Any = None) -> bool:
    """In place of the question whether a model is being traced, when masks must not be left out because of their values."""
    return True


#: What `torch.utils.checkpoint.checkpoint` looks up when it is called, in all versions of torch that Sluice allows.
_KEEPING: dict[str, Any] = {"CheckpointFunction": _Keeping, "_checkpoint_without_reentrant_generator": _keeping}


def _replacements() -> list[tuple[Any, str, Any]]:
    """What is replaced: where, the name, and by what."""
    found: list[tuple[Any, str, Any]] = [(torch.utils.checkpoint, name, new) for name, new in _KEEPING.items()]
    found.append(STANDING_STILL)
    masks = sys.modules.get("transformers.masking_utils")
    if masks is not None and hasattr(masks, "is_tracing"):
        found.append((masks, "is_tracing", _values_are_not_read))
    return found


def _put(functions: list[tuple[Any, str, Any]]) -> None:
    for owner, name, function in functions:
        setattr(owner, name, function)
