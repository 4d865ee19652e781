"""A method of one's own: DP-FTRL by tree aggregation (Kairouz et al., 2021). docs/new-method.md walks through this file.

python examples/dp_ftrl.py --quick

Algorithm: each record is in one batch of every epoch, its bin, which is drawn once, for each record by itself. An epoch
is a binary tree over its batches. The step that completes a node publishes the node's sum of clipped gradients with fresh
noise; the weights move by the change of the best estimate of the sum so far, so that most of the noise cancels.

Account, without amplification: in an epoch of B batches the record's batch lies in at most one node of each size
1, 2, 4, .., so in at most floor(log2 B) + 1 nodes, whatever is published. It adds at most C to each of them and nothing to
others. Given the past, a node is therefore one Gaussian release, and an epoch is at most so many of them, composed adaptively.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting as dpa
import torch
from torch import Tensor, nn

from sluice import Mechanism, PrivacyEngine
from sluice._base import validate
from sluice.accounting import calibrate
from sluice.data import load
from sluice.mechanism.registry import register
from sluice.mechanism.scaling import Clip
from sluice.randomness.grouped_sampling import BallsInBins
from sluice.randomness.noise import noisy_sum
from sluice.training.context import Loss, TrainingContext
from sluice.training.executor import Draft, Executor


def nodes_of_a_record(batches: int) -> int:
    """Nodes of one tree that hold a record, at most: floor(log2 B) + 1."""
    return batches.bit_length()


@dataclass(frozen=True, kw_only=True)
class TreeAggregation(Mechanism):
    """What a run promises: public, frozen, and all that an accountant reads.

    Attributes:
        batches: how many make an epoch, and a tree [B].
        expected_batch_size: what sums are divided by.
        max_grad_norm: the most that a record adds to a node [C].
        noise_multiplier: standard deviation of a node's noise over ``max_grad_norm``.
    """

    kind: ClassVar[str] = "tree aggregation"
    provable: ClassVar[bool] = True

    batches: int
    expected_batch_size: float
    max_grad_norm: float
    noise_multiplier: float
    releases: int

    def __post_init__(self) -> None:
        validate.positive_integer(batches=self.batches, releases=self.releases)
        validate.positive(expected_batch_size=self.expected_batch_size)
        validate.positive(max_grad_norm=self.max_grad_norm, noise_multiplier=self.noise_multiplier)

    def event_after(self, releases: int) -> dpa.DpEvent:
        self._require_releases(releases)
        epochs = -(-releases // self.batches)  # one that has begun is charged in full
        nodes = epochs * nodes_of_a_record(self.batches)
        return dpa.ComposedDpEvent([dpa.GaussianDpEvent(self.noise_multiplier)] * nodes)

    def theorem(self, accountant: str) -> str:
        return "Adaptive composition of the nodes that hold a record: docs/new-method.md"

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": f"one of {self.batches} bins, the same in every epoch", "rate": 1 / self.batches}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        return (("batches", f"{self.batches} in an epoch"), ("noise multiplier", f"{self.noise_multiplier:.4g}"))


@dataclass(frozen=True)
class Node:
    """So many steps in a row: their raw sum, which is sensitive, and the best public estimate of it."""

    size: int
    raw: dict[str, Tensor]
    public: dict[str, Tensor]


class TreeExecutor(Executor[dict[str, Tensor]]):
    """Makes the steps: `prepare` sums, the base class logs, `apply` adds noise and moves the weights.

    Guarantee:
        A node is published once at most. The node of a step that was lost may have been seen, so it is never published
        again: the smaller nodes in it stand in for it, and the lost gradient is in no later node.
    """

    def __init__(self, mechanism: TreeAggregation, context: TrainingContext) -> None:
        super().__init__(releases=mechanism.releases, context=context)
        self._mechanism = mechanism
        self._bins = BallsInBins(dataset_size=context.dataset_size, bins=mechanism.batches, source=context.noise)
        self._clip = Clip(max_grad_norm=mechanism.max_grad_norm)
        self._position = 0
        self._tree: list[Node] = []  # complete subtrees of the present epoch, from the largest to the smallest

    def prepare(self, loss: Loss) -> Draft[dict[str, Tensor]]:
        indices = self._bins.batch_of(self.spent)
        raw_sum = self.context.raw_sum()
        for chunk in self.context.chunks(indices, loss):
            raw_sum.add(chunk, self._clip(chunk.norms))
        return Draft(content=raw_sum.tensors(), measured=len(indices))

    def apply(self, content: dict[str, Tensor]) -> None:
        mechanism, below = self._mechanism, self._completed_below()
        raw = {name: below.raw[name] + value for name, value in content.items()}
        noisy = {name: value.clone() for name, value in raw.items()}
        noisy_sum(
            list(noisy.values()),
            noise_multiplier=mechanism.noise_multiplier,
            sensitivity=mechanism.max_grad_norm,
            noise=self.noise,
            sum_error=self.context.sum_error * mechanism.max_grad_norm,
        )
        self._append(Node(below.size, raw, noisy))
        change = {name: value - below.public[name] for name, value in noisy.items()}
        self.context.apply({name: value / mechanism.expected_batch_size for name, value in change.items()})

    def catch_up(self) -> None:
        while self._position < self.spent:
            self._append(self._completed_below())

    def _completed_below(self) -> Node:
        """The node that the next step completes, as far as it is known before: a zero for the step itself."""
        zeros = {name: value.double() for name, value in self.context.gradients.zeros().items()}
        node = Node(1, zeros, zeros)
        for last in reversed(self._tree if self._position % self._mechanism.batches else []):
            if last.size != node.size:
                break
            raw = {name: value + last.raw[name] for name, value in node.raw.items()}
            public = {name: value + last.public[name] for name, value in node.public.items()}
            node = Node(2 * node.size, raw, public)
        return node

    def _append(self, node: Node) -> None:
        larger = self._tree if self._position % self._mechanism.batches else []
        self._tree = [*(each for each in larger if each.size >= node.size), node]
        self._position += 1

    def own_state(self) -> dict[str, Any]:
        return {"bins": self._bins.state_dict(), "position": self._position, "tree": [vars(n) for n in self._tree]}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        self._bins.load_state_dict(state["bins"])
        self._position = state["position"]
        self._tree = [Node(**node) for node in state["tree"]]


register(TreeAggregation, executor=TreeExecutor)


def planned(records: int, *, batches: int, epochs: int, epsilon: float, delta: float) -> TreeAggregation:
    """The recipe: from a budget to a mechanism with the noise that meets it."""
    nodes = epochs * nodes_of_a_record(batches)
    plan = calibrate(sample_rate=1.0, releases=nodes, target_epsilon=epsilon, target_delta=delta)
    return TreeAggregation(
        batches=batches,
        expected_batch_size=records / batches,
        max_grad_norm=1.0,
        noise_multiplier=plan.noise_multiplier,
        releases=batches * epochs,
    )


if __name__ == "__main__":
    epochs = 2 if "--quick" in sys.argv else 8
    digits = load("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    engine = PrivacyEngine()
    engine.make_private_by(
        planned(len(digits.train), batches=15, epochs=epochs, epsilon=3.0, delta=1e-5),
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=digits.train,
    )
    list(engine.releases(nn.functional.cross_entropy))  # one turn for each release
    images, labels = digits.test.batch(range(len(digits.test)))
    accuracy = (model.eval()(images).argmax(1) == labels).float().mean().item()
    print(f"test accuracy {accuracy:.3f} after {engine.released} releases")
    print(f"epsilon {engine.get_certified_epsilon(1e-5):.3f} at delta 1e-5")
