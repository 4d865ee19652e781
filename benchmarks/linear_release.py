"""What one release of a linear model costs, beside one fused loop in C that does nothing but the arithmetic.

    python benchmarks/linear_release.py --rounds 30

Dense: 3,969 stored features in half precision (scattering coefficients of 28 x 28 images) and ten classes. Sparse: bags of
words of a vocabulary of 10,000 and two classes. The loop gathers the records of a batch, takes the two matrix products, clips,
and adds the default noise; it samples nothing, checks nothing, logs nothing, and has no optimizer. Releases are those of the
engine, with and without a gate.

All records: 50,000 x 2,048 features in half precision and sample rate 1, beside the same arithmetic by hand in PyTorch (two
matrix products and a softmax in float32 chunks of 256 rows, the fastest size here, in stored order, without clipping; torch's
own noise). Processor time, all by turns in one process, medians; only the ratios mean something.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice import ClippingBiasGate, GlobalScaling, PrivacyEngine
from sluice.data.examples import Examples, TensorExamples
from sluice.data.text import BagExamples, Sequences, bag_of_words
from sluice.data.transforms import unscaled
from sluice.gradients import native
from sluice.mechanism.gates import Gate
from sluice.models import create_model
from sluice.randomness.noise import SecureNoise, noisy_sum

RECORDS, FEATURES, CLASSES = 20_000, (81, 7, 7), 10
VOCABULARY = 10_000
ALL_RECORDS, ALL_FEATURES, HAND_ROWS = 50_000, 2_048, 256
GATE = ClippingBiasGate(beta=3.0, gate_noise=2.5, reference_noise=12.5)

_SOURCE = r"""
#include <math.h>
#include "narrow.c"

enum { BLOCK = 32 };

/* Derivatives of the softmax loss, in place, and each sample's weight for gradients of length at most 1. */
static void derivatives(int64_t classes, float *logits, int64_t label, double square) {
    float most = logits[0], sum = 0, norm = 0;
    for (int64_t o = 1; o < classes; o++) most = logits[o] > most ? logits[o] : most;
    for (int64_t o = 0; o < classes; o++) sum += logits[o] = expf(logits[o] - most);
    for (int64_t o = 0; o < classes; o++) {
        logits[o] = logits[o] / sum - (o == label);
        norm += logits[o] * logits[o];
    }
    float length = sqrtf(norm * (float)(square + 1)), weight = length > 1 ? 1 / length : 1;
    for (int64_t o = 0; o < classes; o++) logits[o] *= weight;
}

void dense(
    int64_t n, int64_t inputs, int64_t classes, const _Float16 *features, const int64_t *indices, const int64_t *labels,
    const float *weights, float *block, float *part, float *into
) {
    memset(into, 0, (size_t)(classes * inputs) * sizeof(float));
    for (int64_t first = 0; first < n; first += BLOCK) {
        int64_t rows = smaller(n - first, BLOCK);
        float logits[BLOCK * 16];
        double squares[BLOCK];
        for (int64_t r = 0; r < rows; r++) {
            const _Float16 *from = features + indices[first + r] * inputs;
            for (int64_t k = 0; k < inputs; k++) block[r * inputs + k] = (float)from[k];
        }
        narrow_forward(rows, inputs, classes, block, 4, inputs, weights, 0, logits, squares, 1);
        for (int64_t r = 0; r < rows; r++) derivatives(classes, logits + r * classes, labels[indices[first + r]], squares[r]);
        narrow_sum(rows, inputs, classes, rows, block, 4, inputs, logits, part, 1);
        for (int64_t k = 0; k < classes * inputs; k++) into[k] += part[k];
    }
}

void sparse(
    int64_t n, int64_t inputs, int64_t classes, const int32_t *columns, const int64_t *offsets, const int64_t *indices,
    const int64_t *labels, const float *weights, float *into
) {
    memset(into, 0, (size_t)(classes * inputs) * sizeof(float));
    for (int64_t i = 0; i < n; i++) {
        int64_t first = offsets[indices[i]], end = offsets[indices[i] + 1];
        float logits[16] = {0}, value = end > first ? 1 / sqrtf((float)(end - first)) : 0;
        for (int64_t k = first; k < end; k++)
            for (int64_t o = 0; o < classes; o++) logits[o] += value * weights[o * inputs + columns[k]];
        derivatives(classes, logits, labels[indices[i]], end > first);
        for (int64_t k = first; k < end; k++)
            for (int64_t o = 0; o < classes; o++) into[o * inputs + columns[k]] += value * logits[o];
    }
}
"""


def fused_loops() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    (folder / "loops.c").write_text(_SOURCE)
    library = folder / "loops.so"
    headers = f"-I{Path(native.__file__).parent}"
    flags = ("-O3", "-std=gnu11", "-march=native", "-fno-math-errno", "-fPIC", "-shared", headers)
    subprocess.run(["gcc", *flags, str(folder / "loops.c"), "-lm", "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def dense_data(records: int, shape: tuple[int, ...]) -> TensorExamples:
    features = torch.randn(records, *shape).half()
    return TensorExamples(features, torch.randint(0, CLASSES, (records,)), unscaled).stored()


def sparse_data() -> BagExamples:
    """Texts of 50 to 400 words whose ranks are distributed as in a natural language."""
    lengths = torch.randint(50, 400, (RECORDS,))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ranks = torch.exp(torch.rand(int(lengths.sum())) * 9.9).int() + 1
    bags = bag_of_words(Sequences(ids=ranks, offsets=offsets), VOCABULARY)
    return BagExamples(bags, torch.randint(0, 2, (RECORDS,)), sparse=True)


def releases(data: Examples, model_name: str, classes: int, batch: int, gate: Gate | None) -> Iterator[None]:
    torch.manual_seed(0)
    model = create_model(model_name, data.input_shape, classes)
    engine = PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        data_loader=data,
        noise_multiplier=2.5,
        max_grad_norm=1.0,
        releases=10**6,
        sample_rate=batch / len(data),
        scaling=GlobalScaling(bound=0.3),
        gate=gate,
    )
    for _ in engine.releases(F.cross_entropy):
        yield


def with_noise(total: Tensor) -> None:
    noisy_sum([total], noise_multiplier=2.5, sensitivity=1.0, noise=SecureNoise())


def dense_loop(data: TensorExamples, batch: int, loops: ctypes.CDLL) -> Callable[[], None]:
    inputs = data.inputs.flatten(1)
    width = inputs.shape[1]
    weights, block, part, into = (torch.zeros(rows, width) for rows in (CLASSES, 32, CLASSES, CLASSES))

    def run() -> None:
        indices = torch.randperm(RECORDS)[:batch]
        pointers = (t.data_ptr() for t in (inputs, indices, data.labels, weights, block, part, into))
        loops.dense(*map(ctypes.c_int64, (batch, width, CLASSES)), *map(ctypes.c_void_p, pointers))
        with_noise(into)

    return run


def sparse_loop(data: BagExamples, batch: int, loops: ctypes.CDLL) -> Callable[[], None]:
    bags = data.bags
    weights, into = torch.zeros(2, bags.width), torch.zeros(2, bags.width)

    def run() -> None:
        indices = torch.randperm(RECORDS)[:batch]
        pointers = (t.data_ptr() for t in (bags.columns, bags.offsets, indices, data.labels, weights, into))
        loops.sparse(*map(ctypes.c_int64, (batch, bags.width, 2)), *map(ctypes.c_void_p, pointers))
        with_noise(into)

    return run


def by_hand(data: TensorExamples) -> Callable[[], None]:
    weights = torch.zeros(ALL_FEATURES, CLASSES)

    def run() -> None:
        into = torch.zeros_like(weights)
        for x, y in zip(data.inputs.split(HAND_ROWS), data.labels.split(HAND_ROWS), strict=True):
            values = x.float()
            into.addmm_(values.T, (values @ weights).softmax(1) - F.one_hot(y, CLASSES))
        into += torch.randn_like(into)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    batch, loops = options.batch, fused_loops()
    dense, sparse, everything = dense_data(RECORDS, FEATURES), sparse_data(), dense_data(ALL_RECORDS, (ALL_FEATURES,))
    ways: dict[str, Callable[[], object]] = {
        "dense, loop": dense_loop(dense, batch, loops),
        "dense": releases(dense, "linear", CLASSES, batch, None).__next__,
        "dense, gate": releases(dense, "linear", CLASSES, batch, GATE).__next__,
        "sparse, loop": sparse_loop(sparse, batch, loops),
        "sparse": releases(sparse, "bag-of-words", 2, batch, None).__next__,
        "sparse, gate": releases(sparse, "bag-of-words", 2, batch, GATE).__next__,
        "all records, loop": by_hand(everything),
        "all records": releases(everything, "linear", CLASSES, ALL_RECORDS, None).__next__,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 5):
        for name, way in ways.items():
            began = time.process_time()
            way()
            if round_number >= 5:
                times[name].append(time.process_time() - began)
    cost = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    ratios = {name: cost[name] / cost[f"{name.split(',')[0]}, loop"] for name in cost}
    print(json.dumps({"batch": batch, "milliseconds": cost, "over the loop": ratios}, indent=1))


if __name__ == "__main__":
    main()
