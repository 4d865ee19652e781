"""Several workers: the collective operations of ``torch.distributed`` that a run needs, and what happens if one fails."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients.sharding import is_sharded
from sluice.randomness.common import CommonNoise, CommonSeededNoise
from sluice.randomness.noise import NoiseSource, SecureNoise, SeededNoise, noisy_sum
from sluice.training.distributed.flat import Flat
from sluice.training.distributed.heartbeat import Heart
from sluice.training.distributed.workers import WorkerLostError, Workers

if TYPE_CHECKING:
    from sluice.training.state import TrainingState

T = TypeVar("T")

# How long an operation may take is for heartbeats to say, not for gloo: worker 0 may be evaluating or writing.
_FOREVER = timedelta(days=10_000)

# Workers may be this many times slower to begin than to beat: they read their data before.
_SLOWEST_START = 10

# How many groups this process has been part of; the same for all workers, who make the same calls.
_groups = count()

# What worker 0 has to tell is sent in one message if it is as short as this.
_FRAME = 1 << 12


class WorkerGroup(Workers):
    """The workers of an initialised process group.

    Args:
        timeout: seconds without a heartbeat after which a worker counts as lost.

    Guarantee:
        Every worker that an operation needs has taken part when it returns; if one is lost the others raise
        `WorkerLostError`, which names it, within about ``timeout`` seconds, and at once where the connection breaks.
        After that the group is of no more use.
    """

    def __init__(self, *, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sent = 0
        self._group: Any = None
        self._under_way: Any = None
        self._is_abandoned = False
        store = dist.distributed_c10d._get_default_store()
        patience = _SLOWEST_START * timeout
        try:
            self._heart = Heart(store, session=str(next(_groups)), rank=self.rank, size=self.size, timeout=timeout)
            missing = self._heart.missing(patience=patience)
        except RuntimeError:
            self._lose("worker 0, or whoever else keeps the store of the process group, is lost")
        if missing:
            self._lose(f"worker {missing[0]} of {self.size} has not joined in {patience:g} seconds")
        try:
            # gloo in any case: noise is made by the processor, and so is what it is added to.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        except RuntimeError as error:
            self._lose(self._heart.find_lost(str(error)))
        dist.distributed_c10d._set_pg_timeout(_FOREVER, self._group)
        atexit.register(self._take_down)
        # Whoever is connected first must not refuse and leave, or those still connecting would never learn of what.
        self.total(torch.zeros(1))

    def total(self, raw: Tensor) -> Tensor:
        result = raw.detach().cpu().clone()
        self._wait(dist.all_reduce(result, group=self._group, async_op=True), sends=result)
        return result.to(raw.device)

    def totals(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = Flat(raw, parts=self.size)
        own, _ = self._added_up(flat)
        return flat.tensors(self._gather(own))

    def noisy_totals(
        self,
        raw: dict[str, Tensor],
        *,
        noise_multiplier: float,
        sensitivity: float,
        noise: NoiseSource,
        sum_error: float,
    ) -> dict[str, Tensor]:
        """As `Workers.noisy_totals`, each worker adding the noise of its own part of the parameters.

        Guarantee:
            Parts have the grid and the standard deviation of the whole, and noise from a fresh key of each worker's own
            operating system: together they are the release that `noisy_sum` makes of the whole sum. From a seeded source
            each worker draws the noise of all parts, so that it is the same for any number of workers.
        """
        flat = Flat(raw, parts=self.size)
        own, dtype = self._added_up(flat)
        source: NoiseSource = noise
        if noise.secure:
            start = self.rank * flat.part_size
            parts, source = [own[: max(0, flat.entries - start)]], SecureNoise()
        else:
            whole = flat.tensors(self._gather(own))
            parts = list(whole.values())
        noisy_sum(
            parts,
            noise_multiplier=noise_multiplier,
            sensitivity=sensitivity,
            noise=source,
            sum_error=sum_error,
            part_of=flat.entries,
        )
        if noise.secure:
            whole = flat.tensors(self._gather(own.to(dtype)))
        return {name: tensor.to(dtype) for name, tensor in whole.items()}

    def _added_up(self, flat: Flat) -> tuple[Tensor, torch.dtype]:
        """This worker's part of the sum over all workers, added up in float64 in the order of their ranks.

        Returns:
            Also the type in which all workers hold their own sums without loss: so many digits the result may have.
        """
        is_double = bool(self.total(torch.tensor([float(flat.is_double)]))[0])
        dtype = torch.float64 if is_double else torch.float32
        sent = flat.vector(dtype)
        received = torch.empty_like(sent)
        self._wait(
            dist.all_to_all_single(received, sent, group=self._group, async_op=True), sends=sent[flat.part_size :]
        )
        own = torch.zeros(flat.part_size, dtype=torch.float64)
        for part in received.split(flat.part_size):
            own += part
        return own, dtype

    def part_of_total(self, raw: Tensor) -> Tensor:
        sent = raw.detach().cpu().reshape(self.size, -1)
        received = torch.empty_like(sent)
        others = sent[1:]  # as many as are sent away
        self._wait(dist.all_to_all_single(received, sent, group=self._group, async_op=True), sends=others)
        return received.sum(0, dtype=torch.float64)

    def _gather(self, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(dist.all_gather(parts, own, group=self._group, async_op=True), sends=own, times=self.size - 1)
        return torch.cat(parts)

    def common_noise(self, noise: NoiseSource) -> NoiseSource:
        if isinstance(noise, SeededNoise):
            return CommonSeededNoise(noise.seed, rank=self.rank, state=noise.state_dict())
        return CommonNoise(self.from_first(lambda: os.urandom(32)))

    def start_alike(self, module: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (t for t in (*module.parameters(), *module.buffers()) if not is_sharded(t)):
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                self._broadcast(flat.view(torch.uint8))  # gloo does not know every type
                if not self.is_first:
                    tensor.copy_(flat.reshape(tensor.shape))

    def from_first(self, job: Callable[[], T]) -> T:
        if not self.is_first:
            succeeded, result = self._receive()
            if not succeeded:
                raise WorkerLostError(f"worker 0 has stopped: {result}")
            given: T = result
            return given
        try:
            made = job()
        except BaseException as error:
            self._send((False, _in_words(error)))
            raise
        self._send((True, made))
        return made

    def at_first(self, job: Callable[[], T]) -> T | None:
        made: list[T] = []
        self.from_first(lambda: made.append(job()))
        return made[0] if made else None

    def in_turn(self, job: Callable[[], T]) -> T:
        made = self.at_first(job)
        return made if self.is_first else job()  # type: ignore[return-value]

    def by_first(self, *steps: Callable[[int], None] | None) -> Callable[[int], None]:
        together = super().by_first(*steps)
        return lambda number: self.from_first(lambda: together(number))

    def restored(self, state: TrainingState, job: Callable[[], T]) -> T:
        result = self.from_first(job)
        executor = state.executor
        loaded, lost = self.from_first(lambda: (state.state_dict(), executor.lost))
        if not self.is_first:
            state.restore(loaded)
            executor.begin_after(lost)
        return result

    def require_same(self, values: Mapping[str, Any]) -> None:
        own = torch.tensor([_digest(value) for value in values.values()])
        everyones = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(dist.all_gather(everyones, own, group=self._group, async_op=True), sends=own, times=self.size - 1)
        for rank, others in enumerate(everyones):
            for name, first, other in zip(values, everyones[0].tolist(), others.tolist(), strict=True):
                if first != other:
                    raise InputError(
                        f"{name} of worker {rank} differs from worker 0: all workers must run the same program with the "
                        "same arguments, data and versions, on processors of one kind with the same number of threads."
                    )

    @contextmanager
    def named_if_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            self._lose(self._heart.find_lost(str(error)))

    @contextmanager
    def announced(self) -> Iterator[None]:
        try:
            yield
        except WorkerLostError:
            raise
        except BaseException as error:
            self._heart.say("left", _in_words(error))
            raise

    def leave(self) -> None:
        self.total(torch.zeros(1))
        self._heart.leave()

    def _send(self, content: Any) -> None:
        encoded = pickle.dumps(content)
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        length = torch.tensor([len(encoded)]).view(torch.uint8)
        frame[:8] = length
        payload = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        if len(encoded) <= _FRAME - 8:
            frame[8 : 8 + len(encoded)] = payload
        self._broadcast(frame)
        if len(encoded) > _FRAME - 8:
            self._broadcast(payload)

    def _receive(self) -> Any:
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        length = int(frame[:8].view(torch.int64)[0])
        payload = frame[8 : 8 + length]
        if length > _FRAME - 8:
            payload = torch.empty(length, dtype=torch.uint8)
            self._broadcast(payload)
        return pickle.loads(payload.numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(dist.broadcast(tensor, src=0, group=self._group, async_op=True), sends=tensor)

    def _wait(self, work: Any, *, sends: Tensor, times: int = 1) -> None:
        """Wait for an operation, for as long as everybody is alive."""
        self.sent += times * sends.numel() * sends.element_size()
        self._under_way = work
        while not self._has_ended(work):
            self._require_heartbeats()
        self._under_way = None

    def _has_ended(self, work: Any) -> bool:
        """Whether an operation ends before the next heartbeat; if not well, somebody is lost."""
        try:
            work.wait(timedelta(seconds=self._heart.interval))
        except RuntimeError as error:
            if not work.is_completed():
                return False
            self._end(work, error)
        return True

    def _end(self, work: Any, error: RuntimeError) -> None:
        """An operation that ended while waiting for it did: well, or not."""
        try:
            work.wait()
        except RuntimeError:
            self._lose(self._heart.find_lost(str(error)))

    def _require_heartbeats(self) -> None:
        try:
            silent = [self._heart.name(rank) for rank in self._heart.silent(longer_than=self._heart.timeout)]
        except RuntimeError as error:
            self._lose(self._heart.find_lost(str(error)))
        if silent:
            self._lose(f"{silent[0]} is lost: not heard from for {self._heart.timeout:g} seconds")

    def _lose(self, what: str) -> NoReturn:
        self._abandon()
        raise WorkerLostError(
            f"{what}. Nothing more is released; all that was is logged and charged. The run can be resumed with any number "
            "of workers."
        )

    def _abandon(self) -> None:
        """Never take the group down: that would wait for a lost worker, when Python ends too.

        Nor is an operation that was broken off let go, so that gloo is never the last to hold its tensors: see `_take_down`.
        """
        self._is_abandoned = True
        for kept in (self._group, self._under_way):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _take_down(self) -> None:
        """End gloo's threads before Python ends.

        They drop the tensors of an operation some time after it is done, and need Python for that: if it is no longer there
        they abort the process.
        """
        if self._is_abandoned:
            return
        if self._under_way is not None:
            self._abandon()
            return
        with suppress(ValueError):  # the program has done so
            dist.destroy_process_group(self._group)
        self._group = None


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


__all__ = ["WorkerGroup"]
