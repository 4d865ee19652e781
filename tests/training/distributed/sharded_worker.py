"""What one worker of `test_sharded.py` does: ``sharded_worker.py JOB RANK SIZE STORE``; prints a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice._base.errors import SluiceError
from sluice.audit import Canaries
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.sharding import let_go
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.training.options import TrainingOptions

WORDS, LENGTH, WIDTH, CLASSES, RECORDS = 40, 6, 16, 3, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.attention(self.before(x)).view(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y.mean(1))


def transformer(*, sharded: bool, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    module = Transformer(blocks)
    if sharded:
        fully_shard(module.words)
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    return module


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (RECORDS, LENGTH), generator=generator)
    return TensorDataset(x, x.sum(1) % CLASSES)


def mechanism(*, rate: float, gate: bool, releases: int) -> SelectiveRelease:
    chosen = ClippingBiasGate(beta=0.5, gate_noise=1.0, reference_noise=5.0, small_norm=0.5, large_norm=2.0)
    return SelectiveRelease(
        expected_batch_size=rate * RECORDS,
        sample_rate=rate,
        scaling=GlobalScaling(bound=20.0, max_grad_norm=1.0),
        noise_multiplier=0.5,
        gate=chosen if gate else None,
        releases=releases,
    )


def trained(
    *,
    sharded: bool,
    rate: float = 0.25,
    releases: int = 4,
    gate: bool = True,
    seed: int | None = 3,
    blocks: int = 2,
    watch: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda module, optimizer: None,
) -> tuple[PrivacyEngine, nn.Module]:
    module = transformer(sharded=sharded, blocks=blocks)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    engine = PrivacyEngine(seed=seed)
    options = TrainingOptions(gradient_options=GradientOptions(chunk_size=4))
    engine.make_private_by(
        mechanism(rate=rate, gate=gate, releases=releases),
        module=module,
        optimizer=optimizer,
        data_loader=data(),
        options=options,
    )
    watch(module, optimizer)
    for _ in engine.releases(F.cross_entropy):
        pass
    engine.close()
    return engine, module


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    let_go(module)
    named = module.named_parameters()
    return {name: p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for name, p in named}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).norm() / (1e-9 + other[name].norm())) for name in one)


class Memory:
    """The most bytes of parameters and of the optimizer's state, looked at whenever something has been gathered."""

    def __init__(self) -> None:
        self.peak = 0

    def __call__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        blocks = [part for part in module.modules() if isinstance(part, FSDPModule)]
        for block in blocks:
            block.unshard()
        whole = list(module.parameters())
        let_go(module)
        own = list(module.parameters())
        original = FSDPParamGroup.wait_for_unshard

        def looked_at(group: Any) -> None:
            original(group)
            held = [p.to_local() for p in own]
            held += [
                t.to_local() for state in optimizer.state.values() for t in state.values() if hasattr(t, "to_local")
            ]
            gathered = sum(p.untyped_storage().size() for p in whole)
            self.peak = max(self.peak, gathered + sum(t.untyped_storage().size() for t in held))

        FSDPParamGroup.wait_for_unshard = looked_at  # type: ignore[method-assign]


def same_weights(*, rate: float, gate: bool, blocks: int = 2, releases: int = 3) -> dict[str, Any]:
    """Of a run in one process and of one with the model on all workers, both from a seed."""
    kind: dict[str, Any] = {"rate": rate, "gate": gate, "blocks": blocks, "releases": releases}
    alone, expected = trained_alone(kind)
    memory = Memory()
    engine, module = trained(sharded=True, **kind, watch=memory)
    parameters = sum(p.numel() for p in alone[1].parameters())
    return {
        "difference": difference(whole_weights(module), expected),
        "attempts": [list(alone[0]._executor.trace.attempts), list(engine._executor.trace.attempts)],
        "own": sum(p.to_local().numel() for p in module.parameters()) / parameters,
        "peak": memory.peak / (3 * 4 * parameters),
        "moved": difference(whole_weights(transformer(sharded=False, blocks=blocks)), expected),
    }


def trained_alone(kind: dict[str, Any]) -> tuple[tuple[PrivacyEngine, nn.Module], dict[str, Tensor]]:
    group, dist.group.WORLD = dist.group.WORLD, None  # an engine that finds no group trains alone
    try:
        found = trained(sharded=False, **kind)
    finally:
        dist.group.WORLD = group
    return found, whole_weights(found[1])


def norms_and_sums() -> dict[str, Any]:
    """Of a worker's own records, beside those of the same model that is whole, bit for bit."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(0, WORDS, (6, LENGTH), generator=generator)
    y = x.sum(1) % CLASSES
    found = []
    for sharded in (False, True):
        gradients = PerSampleGradients(transformer(sharded=sharded), loss_reduction="mean")
        found.append(gradients.weighted_sum(x, y, F.cross_entropy, lambda norms: 1 / (1 + norms)))
        units = sorted(unit.name for unit in gradients._units.values())
    (norms, sums), (own_norms, own_sums) = found
    return {
        "norms": bool(torch.equal(norms, own_norms)),
        "sums": all(torch.equal(sums[name], own_sums[name]) for name in sums),
        "by_rule": "words" in units,
    }


def secure() -> dict[str, Any]:
    """With noise that cannot be predicted: workers end with one model, which has moved."""
    before = whole_weights(transformer(sharded=False))
    _, module = trained(sharded=True, seed=None, gate=False, releases=2)
    after = whole_weights(module)
    return {"moved": difference(before, after), "sum": [float(p.double().sum()) for p in after.values()]}


def noise_alone() -> dict[str, Any]:
    """Noise of standard deviation 6 on a sum of nothing."""
    module = transformer(sharded=True)
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    selective = mechanism(rate=0.25, gate=False, releases=2)
    engine.make_private_by(selective, module=module, optimizer=optimizer, data_loader=data())
    context = engine._running().context
    found = context.noisy(context.raw_sum(), noise_multiplier=2.0, sensitivity=3.0)
    whole = torch.cat([part.full_tensor().flatten() for part in found.values()])
    own = torch.cat([part.to_local().flatten() for part in found.values()])
    return {"whole": [float(whole.std()), float(whole.mean())], "own": own[:1000].tolist(), "entries": len(whole)}


def lost() -> dict[str, Any]:
    """Worker 1 is gone in the middle of a forward pass."""

    def leaving(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        calls = []

        def leave(*arguments: Any) -> None:
            calls.append(1)
            if dist.get_rank() == 1 and len(calls) == 60:
                os.kill(os.getpid(), signal.SIGKILL)

        module.blocks[1].register_forward_hook(leave)  # type: ignore[union-attr, index, operator]

    try:
        trained(sharded=True, watch=leaving, releases=50)
    except SluiceError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "nothing was lost"}


def refused() -> dict[str, Any]:
    """What a sharded model cannot have."""
    messages = {}

    def tried(what: str, job: Callable[[], Any]) -> None:
        try:
            job()
        except SluiceError as error:
            messages[what] = str(error)

    module = transformer(sharded=True)
    optimizer = torch.optim.Adam(module.parameters())
    kept = {"module": module, "optimizer": optimizer, "data_loader": data()}
    selective = mechanism(rate=0.25, gate=False, releases=2)
    average = TrainingOptions(ema_decay=0.9)
    tried("average", lambda: PrivacyEngine(seed=1).make_private_by(selective, **kept, options=average))
    audited = TrainingOptions(canaries=Canaries(count=16))
    tried("canaries", lambda: PrivacyEngine(seed=1).make_private_by(selective, **kept, options=audited))
    engine = PrivacyEngine(seed=1)
    engine.make_private_by(selective, **kept)
    tried("loop", engine.ordinary_loop)
    tried("state", engine.state_dict)
    from sluice.methods.non_private import NonPrivate

    ordinary = NonPrivate(batch_size=8, releases=1)
    tried("method", lambda: PrivacyEngine(seed=1).make_private_by(ordinary, **kept))
    half = Transformer(2)
    fully_shard(half.blocks[0])
    kept = {"module": half, "optimizer": torch.optim.Adam(half.parameters()), "data_loader": data()}
    tried("placement", lambda: PrivacyEngine(seed=1).make_private_by(selective, **kept))
    return messages


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job for job in (same_weights, norms_and_sums, secure, noise_alone, lost, refused)
}


def main() -> None:
    orders, rank, size, store = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for name, arguments in orders:
        try:
            found = {"result": JOBS[name](**arguments)}
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), flush=True)
        if "error" in found:
            break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
