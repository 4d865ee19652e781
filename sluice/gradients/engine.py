"""Per-sample gradient norms of a batch, and weighted sums of its gradients, from one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.gradients import costs
from sluice.gradients.capture import Recording, Watch
from sluice.gradients.chunk import Chunk, as_accumulator, empty_accumulator
from sluice.gradients.eager import accept_compiled
from sluice.gradients.losses import Loss
from sluice.gradients.options import GradientOptions
from sluice.gradients.plan import plan
from sluice.gradients.preparation import Preparation, Prepared
from sluice.gradients.sharding import gathered, is_sharded
from sluice.gradients.spectral import refuse_sharded_norms
from sluice.gradients.trees import apply, batch_size, channels_last, padded, require_tensors, take
from sluice.gradients.validation import refuse_complex, refuse_mixing
from sluice.gradients.vmap import VmapRule
from sluice.mechanism.rounding_error import BLOCK_ROWS, CHUNK_ROWS

Scaling = Callable[[Tensor], Tensor]


class PerSampleGradients:
    """Per-sample gradients of a model. The model is neither wrapped nor changed.

    Args:
        module: any module that treats samples independently. Frozen parameters do not count.
        loss_reduction: what the loss functions given below return: "none" (one value per sample), "mean" (their
            average over the samples it was given) or "sum".
        options: performance only.
        expected_batch_size: the size of batches on average: public. If it is given, all chunks have one shape, chosen
            from it, the last one of a batch being filled up: the bits of a sample's gradient depend on that shape.

    Guarantee:
        For every batch the norm reported for a sample is that of the gradient which the weighted sum uses, over all
        trainable parameters taken together, up to rounding (1e-5 relative in float32); it depends on that sample
        alone as long as the module and the loss treat samples independently. Non-finite gradients: see `Chunk`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        loss_reduction: str = "none",
        options: GradientOptions | None = None,
        expected_batch_size: float | None = None,
    ) -> None:
        validate.one_of(("none", "mean", "sum"), loss_reduction=loss_reduction)
        self.module = module
        self.options = options or GradientOptions()
        self._reduction = loss_reduction
        self._expected_batch_size = expected_batch_size
        refuse_mixing(module)
        refuse_complex(module)
        refuse_sharded_norms(module)
        accept_compiled(module)
        with gathered(module):
            self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
        if not self._names:
            raise InputError("The module has no trainable parameter: set requires_grad on those to be trained.")
        self._parameters: frozenset[Tensor] = frozenset(self._names)
        with gathered(module):
            self._units = plan(module, options=self.options, fallback=VmapRule())
        parts = [p for p in module.parameters() if p.requires_grad and is_sharded(p)]
        self._watch = Watch(self._units, names=self._names, options=self.options, parts=parts)
        self._preparation = Preparation(
            module, units=self._units, watch=self._watch, names=self._names, options=self.options
        )
        self._channels_last = False
        self._is_prepared = False
        self._chunk_size = self.options.chunk_size or 64

    @property
    def sums_losses(self) -> bool:
        """Whether losses are sums, which no number of records divides."""
        return self._reduction == "sum"

    def zeros(self) -> dict[str, Tensor]:
        """Empty accumulators for `Chunk.add_weighted_sum`: parameter name to tensor, at least float32."""
        return self.completed({})

    def completed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums, with zeros for parameters that have none, in the order of the model's parameters."""
        found = {name: (sums.get(name), p) for p, name in self._names.items()}
        return {name: empty_accumulator(p) if value is None else value for name, (value, p) in found.items()}

    def as_accumulators(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter in the types of `zeros`."""
        return {name: as_accumulator(tensors[name], p) for p, name in self._names.items()}

    def chunks(
        self, x: Any, y: Any, loss: Loss, *, norms_only: bool = False, samples: int | None = None
    ) -> Iterator[Chunk]:
        """Run the batch chunk by chunk. Memory does not grow with the batch; stop whenever you have seen enough.

        Args:
            x: input of the model: a tensor, a tuple (positional arguments) or a dict (keywords), samples first.
            y: whatever the loss takes beside the output: tensors, samples first, or None.
            loss: ``loss(output, y)``, see ``loss_reduction``.
            norms_only: no weighted sum will be asked for (a hint; asking nevertheless works).
            samples: how many samples there are, if fewer than rows: the others, at the end, only fill up the last chunk.
        """
        given = batch_size((x, y))
        size = given if samples is None else samples
        if size == 0:
            return
        refuse_mixing(self.module)
        require_tensors((x, y))
        prepared = self.prepare(x)
        self._preparation.check_loss(prepared, y, loss, total=self._total, reduction=self._reduction)
        fixed = self._expected_batch_size is not None
        rows = self._chunk_size if fixed else costs.even_rows(size, most=self._chunk_size)
        for start in range(0, size, rows):
            stop = min(start + rows, size)
            part_x, part_y = x, y
            if given != rows:
                part = take((x, y), slice(start, stop if samples is None else start + rows))
                part_x, part_y = padded(part, rows) if fixed else part
            yield self._run(self.arranged(part_x), part_y, loss, samples=slice(start, stop), keep=not norms_only)

    def idle_chunk(self, x: Any, y: Any, loss: Loss) -> Chunk:
        """A chunk without samples: rows like these go through the model, as with other workers, and count for nothing."""
        self.prepare(x)
        x, y = padded(take((x, y), slice(0, 1)), self._chunk_size)
        return self._run(self.arranged(x), y, loss, samples=slice(0, 0), keep=True)

    def refuse_other_batches(self) -> None:
        """Refuse batches of another kind than those that were seen so far, whose preparation would go through the model."""
        self._preparation.is_complete = True

    def norms(self, x: Any, y: Any, loss: Loss) -> Tensor:
        """Gradient norm of each sample of the batch. An empty batch has none."""
        parts = [chunk.norms for chunk in self.chunks(x, y, loss, norms_only=True)]
        return torch.cat(parts) if parts else torch.zeros(0, device=self._device)

    def weighted_sum(self, x: Any, y: Any, loss: Loss, scaling: Scaling) -> tuple[Tensor, dict[str, Tensor]]:
        """Norms, and ``sum_i c_i * gradient_i`` with weights ``c = scaling(norms)``, for each parameter by name.

        ``scaling`` is given the norms of one chunk after the other, so a weight may depend on its own norm only.
        """
        total: dict[str, Tensor] = {}
        norms = []
        for chunk in self.chunks(x, y, loss):
            norms.append(chunk.norms)
            chunk.add_weighted_sum(scaling(chunk.norms), into=total)
            del chunk  # else its memory would be held while the next one runs
        return (torch.cat(norms) if norms else torch.zeros(0, device=self._device)), self.completed(total)

    @property
    def chunk_rows(self) -> int:
        """How many samples go through the model at once."""
        return self._chunk_size

    @property
    def is_prepared(self) -> bool:
        """Whether the model has seen a batch, on which `chunk_rows` depends."""
        return self._is_prepared

    def rows_per_sum(self, rows: int) -> int:
        """How many gradients are added up at once in chunks of so many rows: what the rounding error of sums grows with."""
        return min(CHUNK_ROWS, rows) if self._sums_in_blocks and rows <= BLOCK_ROWS else rows

    @property
    def _sums_in_blocks(self) -> bool:
        return all(unit.rule.sums_in_blocks for unit in self._units.values())

    @property
    def _device(self) -> torch.device:
        return next(iter(self._names)).device

    def arranged(self, x: Any) -> Any:
        """Images stored as 2-D convolutions run fastest on a CPU, if the model is one that takes them so."""
        return channels_last(x) if self._channels_last else x

    def prepare(self, x: Any, *, rows: int | None = None) -> Prepared:
        """Learn where samples are in such a batch, and refuse a model that mixes them: see `Preparation`.

        Args:
            rows: how many samples will go through the model at once; None for `chunk_rows`.
        """
        prepared = self._preparation.prepare(x)
        layout = prepared.layout
        self._is_prepared = True
        self._channels_last = prepared.channels_last
        self._chunk_size = self.options.chunk_size or costs.chunk_size(
            layout.bytes_per_sample,
            largest_bytes=layout.largest_bytes,
            sequential=any(isinstance(module, nn.RNNBase) for module in self._units),
            most=BLOCK_ROWS if self._sums_in_blocks else CHUNK_ROWS,
        )
        if self._expected_batch_size is not None:
            self._chunk_size = costs.fixed_rows(
                self._expected_batch_size,
                most=self._chunk_size,
                overhead=costs.overhead_rows(layout.bytes_per_sample, steps=layout.steps),
            )
            self._preparation.check_rows(prepared, rows or self._chunk_size)
        return prepared

    def _run(self, x: Any, y: Any, loss: Loss, *, samples: slice, keep: bool) -> Chunk:
        size = batch_size((x, y))
        with torch.enable_grad():
            with self._watch.record(batch_size=size, parameters=self._parameters) as recording:
                output = apply(self.module, x)
            total = self._total(loss(output, y), size)
        recording.backward(total)
        return self._chunk(recording, samples=samples, keep=keep)

    def recording(self, rows: int, *, samples: int) -> Recording:
        """An empty recording of a forward pass by the user, over this many rows, some of which are samples."""
        scale = float(samples) if self._reduction == "mean" else 1.0
        return Recording(batch_size=rows, parameters=self._parameters, by_hooks=True, scale=scale)

    def begin(self, recording: Recording) -> Callable[..., None]:
        """Start recording a forward pass; the returned function ends it: see `Watch.begin`."""
        refuse_mixing(self.module)
        return self._watch.begin(recording)

    def record_under_way(self, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        """What the model returns from a call that had begun before `begin`; recorded here if it is itself one unit."""
        return self._watch.record_under_way(self.module, inputs, keywords, output)

    def chunk_of(self, *recordings: Recording, samples: int) -> Chunk:
        """What was recorded of the same samples, in one forward pass or in several, after the backward pass."""
        return self._chunk(*recordings, samples=slice(0, samples), keep=True)

    def _chunk(self, *recordings: Recording, samples: slice, keep: bool) -> Chunk:
        return Chunk(
            *recordings,
            samples=samples,
            names=self._names,
            kept_bytes=self.options.kept_bytes,
            keep=keep,
            device=self._device,
            # Whether some sample's gradient is not finite is nobody's business while training privately.
            warn=self._expected_batch_size is None,
        )

    def _total(self, value: Tensor, size: int) -> Tensor:
        if self._reduction == "none":
            if value.shape != (size,):
                raise InputError(
                    f"The loss returned shape {tuple(value.shape)} for {size} samples; with loss_reduction='none' it "
                    "must return one value per sample. Say loss_reduction='mean' or 'sum' if it reduces."
                )
            return value.sum()
        if value.numel() != 1:
            raise InputError(
                f"The loss returned shape {tuple(value.shape)}; with loss_reduction={self._reduction!r} it must return "
                "one number. Say loss_reduction='none' if it returns one value per sample."
            )
        total = value if value.dim() == 0 else value.sum()
        return total * size if self._reduction == "mean" else total
