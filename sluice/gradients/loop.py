"""Per-sample gradients in an ordinary loop: ``model(x)``, ``loss.backward()``, and then `LoopCapture.collect`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sluice._base.errors import InputError
from sluice.gradients.capture import Recording
from sluice.gradients.chunk import Chunk
from sluice.gradients.eager import refuse_compiled_in_place, refuse_compiling
from sluice.gradients.engine import PerSampleGradients
from sluice.gradients.probe import Axes
from sluice.gradients.trees import Arguments, batch_size, mapped, padded


class LoopCapture:
    """Records the forward passes of a piece of a batch, whoever calls the model.

    There is usually one. Where the model is called several times for one piece (a discriminator on real and on made-up
    samples, a siamese net), row i of each call belongs to record i, and the record's gradients are added up before any norm
    is taken: however many calls there are, a record counts once.

    The model is watched by process-wide hooks that look only for it; nothing is stored on it. Calls in evaluation mode
    or under ``torch.no_grad()`` are let through untouched.

    Args:
        rows: all forward passes are filled up to this many rows, which nobody outside sees: inputs are padded on the way
            into the model and outputs cut on the way out. Only a model with an output in which no axis holds the samples
            runs on the piece as it is.

    Guarantee:
        `collect` returns the per-sample gradients of exactly the piece that `expect` announced, or raises. Using a
        piece for two steps, or another number of samples, is refused.
    """

    def __init__(self, gradients: PerSampleGradients, *, rows: int) -> None:
        self._gradients = gradients
        self.rows = rows
        self._output_axes: Axes | None = None
        self._expected: int | None = None
        self._recordings: list[Recording] = []
        self._end: Callable[..., None] | None = None
        self._preparing = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._before),  # type: ignore[arg-type]  # may return other arguments
                register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.expect(None)
        self._handles = []

    def expect(self, rows: int | None) -> None:
        """Announce a piece of this many samples, whose forward and backward passes come next; None for no piece."""
        if rows is not None:
            refuse_compiled_in_place(self._gradients.module)
        self._expected = rows
        self._recordings = []
        self._see_keywords(rows is not None)

    def _see_keywords(self, wanted: bool) -> None:
        """Torch hands keywords to a process-wide hook only where the module names it."""
        named = self._gradients.module._forward_pre_hooks_with_kwargs
        for handle in self._handles[:1]:
            if wanted:
                named[handle.id] = True
            else:
                named.pop(handle.id, None)

    def require_collected(self) -> None:
        """Raise if the piece that was announced last has not been used for a step."""
        if self._expected is not None:
            raise InputError(
                "a batch of the loader was not used: call the model, loss.backward() and optimizer.step() for each batch."
            )

    def collect(self) -> Chunk:
        """The gradients of the piece, after its backward pass."""
        recordings, rows = self._recordings, self._expected
        if rows is None:
            raise InputError(
                "optimizer.step() was called without a new batch: each batch of the loader allows one step. Take the "
                "next batch from the loader, call the model and loss.backward(), then step()."
            )
        if not recordings:
            raise InputError(
                "optimizer.step() saw no forward pass of the private module for this batch. Call the module that "
                "make_private returned (not a copy of it), in training mode and with grad enabled."
            )
        if not any(recording.reached for recording in recordings):
            raise InputError("optimizer.step() was called before loss.backward(): call backward() on the loss first.")
        self.expect(None)
        return self._gradients.chunk_of(*recordings, samples=rows)

    def _before(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if module is not self._gradients.module or self._preparing or not self._is_training_step(module):
            return None
        refuse_compiling()
        if self._expected is None:
            raise InputError(
                "the private module was called in training mode outside a step. To evaluate, call model.eval() and use "
                "torch.no_grad(); to train, call it for a batch of the loader, before optimizer.step(). To train another "
                "model through it (a generator by its discriminator), call model.eval() first, on inputs that are made "
                "without private records and whose number is fixed, such as loader.batch_size: how many records a batch "
                "has is private."
            )
        batch = Arguments.of(inputs, keywords) if keywords else inputs
        rows = batch_size(batch)
        if rows != self._expected:
            raise InputError(
                "the private module was called with another number of samples than the loader's batch has: call it with the "
                "batch that the loader gave, as a whole."
            )
        self._preparing = True
        try:
            axes = self._gradients.prepare(batch, rows=self.rows).layout.outputs
        finally:
            self._preparing = False
        fills = rows < self.rows and None not in axes
        self._output_axes = axes if fills else None
        filled = padded(batch, self.rows) if fills else batch
        recording = self._gradients.recording(batch_size(filled), samples=rows)
        self._end = self._gradients.begin(recording)
        self._recordings.append(recording)
        arranged = self._gradients.arranged(filled)
        return (arranged.positional, arranged.every_keyword) if isinstance(arranged, Arguments) else (arranged, {})

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], *keywords_and_output: Any) -> Any | None:
        *keywords, output = keywords_and_output
        raised = not keywords  # torch leaves them out then
        if module is not self._gradients.module or self._end is None:
            return None
        end, self._end = self._end, None
        self._preparing = True
        try:
            if not raised:
                output = self._gradients.record_under_way(inputs, keywords[0], output)
        finally:
            self._preparing = False
            end(hooks_stay=raised)
        if raised or self._output_axes is None or self._expected is None:
            return output
        axes, rows = iter(self._output_axes), self._expected
        return mapped(output, lambda tensor: tensor.narrow(next(axes) or 0, 0, rows))

    def _is_training_step(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()
