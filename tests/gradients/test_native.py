"""Kernels in C: equal to float64, careful with bad values and shapes, and never missed where they cannot be built."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.native import gather, kernels, narrow
from sluice.gradients.native import rows as row_kernels
from sluice.gradients.native.loading import library
from sluice.gradients.native.rows import Bags


def needs_kernels(test: Callable[..., None]) -> Callable[..., None]:
    """Skip where there are none. Not known before the test runs: building them needs the cache of the tests."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        if library() is None:
            pytest.skip("no C compiler was found")
        test(*arguments, **keywords)

    return run


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """The library is looked for again inside the test, and again after it."""
    library.cache_clear()
    yield
    library.cache_clear()


def test_kernels_are_there_where_a_compiler_is() -> None:
    """Everything else here would be skipped if they could not be built, or failed their check."""
    found = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert (library() is not None) or not found or os.environ.get("SLUICE_NATIVE") == "0"


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    positions=st.integers(0, 40),
    inputs=st.integers(1, 21),
    outputs=st.integers(1, 35),
    split=st.none() | st.integers(0, 20),
    keep=st.booleans(),
    threads=st.integers(1, 3),
)
@needs_kernels
def test_products_equal_float64(
    n: int, positions: int, inputs: int, outputs: int, split: int | None, keep: bool, threads: int
) -> None:
    split = None if split is None or split >= inputs else split
    a, b = torch.randn(n, positions, inputs), torch.randn(positions, n, outputs).transpose(0, 1)
    into = torch.full((n, inputs, outputs), float("nan")) if keep else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        squares = kernels.products(a, b, into=into, split=split)
    finally:
        torch.set_num_threads(before)
    expected = torch.einsum("ntc,nto->nco", a.double(), b.double())
    parts = [expected] if split is None else [expected[:, :split], expected[:, split:]]
    wanted = torch.stack([part.square().sum((1, 2)) for part in parts])
    torch.testing.assert_close(squares.double(), wanted, rtol=2e-6, atol=1e-9)
    if into is not None:
        torch.testing.assert_close(into.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_neighbours_do_not_change_a_bit() -> None:
    a, b = torch.randn(9, 30, 20), torch.randn(9, 30, 40)
    alone = torch.cat([kernels.products(a[i : i + 1], b[i : i + 1]) for i in range(9)], 1)
    assert torch.equal(kernels.products(a, b), alone)
    net, x = nn.LSTM(3, 5, batch_first=True, bidirectional=True), torch.randn(9, 6, 3)
    assert torch.equal(_states(net, x)[1], torch.cat([_states(net, x[i : i + 1])[1] for i in range(9)]))


@needs_kernels
def test_threads_do_not_change_a_bit(threads: None) -> None:
    a, b = torch.randn(50, 30, 20), torch.randn(50, 30, 40)
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        into = torch.empty(50, 20, 40)
        found.append((kernels.products(a, b, into=into), into))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class Wrapped(nn.Module):
    """A module on its own, whose output may be a tuple; a loss of all of its output's entries."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found = self.module(x)
        return found[0] if isinstance(found, tuple) else found


LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "depthwise": (nn.Conv2d(19, 19, 3, padding=1, groups=19), torch.randn(9, 19, 7, 6)),
    "groups": (nn.Conv2d(8, 24, 3, stride=2, groups=2), torch.randn(9, 8, 7, 6)),
    "layer norm": (nn.LayerNorm(21), torch.randn(9, 40, 21)),
    "group norm": (nn.GroupNorm(3, 21), torch.randn(9, 21, 50)),
    "group norm, channels last": (
        nn.GroupNorm(3, 21),
        torch.randn(9, 21, 7, 6).contiguous(memory_format=torch.channels_last),
    ),
    "gru": (nn.GRU(5, 11, num_layers=2, bidirectional=True, batch_first=True), torch.randn(9, 6, 5)),
}


def _gradients(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    engine = PerSampleGradients(Wrapped(module), options=GradientOptions(verify=False))
    return engine.weighted_sum(x, None, lambda out, _: out.square().flatten(1).sum(1), lambda norms: 1 / norms)


@pytest.mark.parametrize("name", LAYERS)
@needs_kernels
def test_layers_give_each_sample_the_same_bits_in_any_company(name: str, threads: None) -> None:
    module, x = LAYERS[name]
    torch.set_num_threads(1)
    norms, sums = _gradients(module, x)
    torch.set_num_threads(2)
    again, sums_again = _gradients(module, x)
    assert torch.equal(norms, again)
    assert all(torch.equal(sums[key], sums_again[key]) for key in sums)
    changed = x.clone(memory_format=torch.preserve_format)
    changed[4] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        found, rest = _gradients(module, changed)
    others = [i for i in range(9) if i != 4]
    assert torch.equal(found[others], norms[others])
    _, expected = _gradients(module, x[others])
    torch.testing.assert_close(rest, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 50), width=st.integers(1, 20), table=st.integers(1, 9), threads=st.integers(1, 3))
@needs_kernels
def test_rows_are_added_in_any_number_of_threads(count: int, width: int, table: int, threads: int) -> None:
    rows, weights = torch.randn(count, width), torch.randn(4)
    tokens, samples = torch.randint(0, table, (count,)), torch.randint(0, 4, (count,))
    into = torch.randn(table, width)
    expected = into.double().index_add(0, tokens, rows.double() * weights[samples].double().unsqueeze(1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        row_kernels.add_rows(rows, tokens, weights[samples], into=into)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(into.double(), expected, rtol=1e-5, atol=1e-5)


def _in_threads(count: int, run: Callable[[], Any]) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 30),
    inputs=st.integers(1, 1100),
    outputs=st.integers(1, 16),
    block=st.integers(1, 40),
    threads=st.integers(1, 3),
    kind=st.sampled_from([torch.float32, torch.float16]),
)
@needs_kernels
def test_few_outputs(n: int, inputs: int, outputs: int, block: int, threads: int, kind: torch.dtype) -> None:
    a, weight, bias, b = (
        torch.randn(*shape) for shape in ((n, inputs + 3), (outputs, inputs), (outputs,), (n, outputs))
    )
    a = a.to(kind)[:, :inputs]
    if not narrow.reads(a):
        pytest.skip("the compiler does not know half precision")

    def run() -> tuple[Tensor, ...]:
        return *narrow.forward(a, weight, bias), narrow.weight_gradient(a, b, block=block)

    found = _in_threads(threads, run)
    exact = a.double()
    torch.testing.assert_close(found[0].double(), exact @ weight.double().t() + bias.double(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found[1], exact.square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[2].double(), b.double().t() @ exact, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(one, other) for one, other in zip(found, _in_threads(1, run), strict=True))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@needs_kernels
def test_the_bits_of_few_outputs_do_not_depend_on_the_place(kind: torch.dtype) -> None:
    a = torch.randn(1, 777).to(kind).repeat(11, 1)
    if not narrow.reads(a):
        pytest.skip("the compiler does not know half precision")
    for values in narrow.forward(a, torch.randn(7, 777), None):
        assert bool((values == values[0]).all())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), width=st.integers(1, 20), table=st.integers(1, 9), threads=st.integers(1, 3))
@needs_kernels
def test_bags(data: st.DataObject, width: int, table: int, threads: int) -> None:
    lists = data.draw(st.lists(st.lists(st.integers(0, table - 1), max_size=6), max_size=5))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.tensor([i for each in lists for i in each], dtype=kind)
    offsets = torch.tensor([0, *torch.tensor([len(each) for each in lists]).cumsum(0).tolist()] if lists else [0])
    longest = 7
    matrix = torch.tensor([[*each, *[-1] * (longest - len(each))] for each in lists], dtype=kind).view(-1, longest)
    factors = torch.randn(matrix.shape) if data.draw(st.booleans()) else None
    scales = torch.randn(len(lists)) if data.draw(st.booleans()) else None
    bias = torch.randn(width) if data.draw(st.booleans()) else None
    rows = torch.randn(table, width)
    stored = data.draw(st.sampled_from([rows, rows.t().contiguous().t()]))
    derivatives = torch.randn(len(ids), width)

    def run() -> tuple[Tensor, ...]:
        bags = Bags.of(matrix, padding=-1, factors=factors)
        sums = row_kernels.bag_forward(stored, bags, bias=bias, scales=scales)
        return *sums, row_kernels.row_norms(derivatives, ids, offsets, table_rows=table)

    output, squares, norms = _in_threads(threads, run)
    for i in range(len(lists)):
        span = slice(int(offsets[i]), int(offsets[i + 1]))
        used = torch.ones(len(lists[i])) if factors is None else factors[i, : len(lists[i])]
        uses = torch.zeros(table, dtype=torch.float64).index_add_(0, ids[span], used.double())
        uses *= 1.0 if scales is None else scales[i].double()
        exact = uses @ rows.double() + (0 if bias is None else bias.double())
        torch.testing.assert_close(output[i].double(), exact, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(squares[i], uses.square().sum(), rtol=1e-6, atol=1e-12)
        gradient = torch.zeros(table, width, dtype=torch.float64).index_add_(0, ids[span], derivatives[span].double())
        torch.testing.assert_close(norms[i], gradient.square().sum(), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip((output, squares, norms), _in_threads(1, run), strict=True))


@pytest.mark.parametrize("wrong", [-1, 4])
@needs_kernels
def test_a_bag_with_an_id_outside_the_table_is_an_error(wrong: int) -> None:
    with pytest.raises(IndexError, match="table of 4 rows"):
        row_kernels.bag_forward(
            torch.ones(4, 2), Bags.of(torch.tensor([[0], [wrong]]), padding=None), bias=None, scales=None
        )
    with pytest.raises(AssertionError, match="compiled kernel"):
        row_kernels.row_norms(torch.ones(2, 2), torch.tensor([0, wrong]), torch.tensor([0, 2]), table_rows=4)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), kind=st.sampled_from([torch.int32, torch.int64]), padding=st.sampled_from([None, -1, 2]))
@needs_kernels
def test_entries_of_a_matrix_and_back(data: st.DataObject, kind: torch.dtype, padding: int | None) -> None:
    n, columns = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6))
    matrix = torch.randint(-1, 4, (n, columns)).to(kind)
    values, offsets = row_kernels.list_entries(matrix, padding=padding)
    kept = [[value for value in row if value != padding] for row in matrix.tolist()]
    assert values.dtype is kind
    assert values.tolist() == [value for row in kept for value in row]
    assert offsets.diff().tolist() == [len(row) for row in kept]
    indices = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=4)) if n else [], dtype=torch.int64)
    bags = Bags.of(matrix, padding=padding, factors=matrix.float())
    assert bags.counts.tolist() == [len(row) for row in kept]
    assert [row[: len(each)] for row, each in zip(bags.ids.tolist(), kept, strict=True)] == kept
    assert bags.factors is not None
    assert torch.equal(bags.factors, bags.ids.float())
    padded = row_kernels.pad_lists(values.int(), offsets, indices, length=columns)
    assert padded.tolist() == [kept[i] + [-1] * (columns - len(kept[i])) for i in indices.tolist()]


@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("fresh", [True, False])
@needs_kernels
def test_a_row_that_everybody_uses_is_rounded_once(width: int, fresh: bool) -> None:
    """In single precision 100,000 additions would lose three digits; 64 bits lose none that a float shows."""
    rows = torch.full((1, width), 1 / 3)
    into = torch.full((2000, width), 0.25)
    ids, sources = torch.full((100_000,), 1234), torch.zeros(100_000, dtype=torch.int64)
    row_kernels.add_rows(rows, ids, None, into=into, sources=sources, fresh=fresh)
    exact = 100_000 * rows.double()[0] + (0 if fresh else 0.25)
    assert torch.equal(into[1234], exact.float())
    assert into[0, 0] == (0 if fresh else 0.25)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("table", [50, 70_000])
@needs_kernels
def test_bags_are_added_as_their_lookups_one_by_one(kind: torch.dtype, width: int, table: int) -> None:
    """In tables of both sizes, between which the kernel distinguishes."""
    counts = torch.randint(0, 7, (40,))
    matrix, each, scales = torch.randint(0, table, (40, 7)), torch.randn(40, 7), torch.rand(40)
    rows, weights = torch.randn(40, width), torch.rand(40)
    named, sources = torch.arange(7) < counts.unsqueeze(1), torch.repeat_interleave(counts)
    ids = matrix[named]
    matrix[~named] = -5  # neither these nor what stands beside them is looked at
    for factors, by in itertools.product((None, each), (None, scales)):
        bags = Bags(matrix.to(kind), counts, factors)
        found, expected = torch.ones(2, width, table), torch.ones(table, width)
        row_kernels.add_bags(rows, bags, scales=by, weights=weights, into=found[1].t())
        scaled = (rows if by is None else rows * by.unsqueeze(1)) * weights.unsqueeze(1)
        of_lookups = None if factors is None else factors[named]
        row_kernels.add_rows(scaled, ids, of_lookups, into=expected, sources=sources)
        assert torch.equal(found[1].t(), expected)
        terms = scaled[sources].double() * (1 if of_lookups is None else of_lookups.double().unsqueeze(1))
        exact = torch.ones(table, width, dtype=torch.float64).index_add_(0, ids, terms)
        torch.testing.assert_close(expected.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("token", "count"), [(3, 1), (-1, 1), (0, -1), (0, 2)])
@needs_kernels
def test_bags_elsewhere_are_refused(token: int, count: int) -> None:
    bags = Bags(torch.tensor([[token]]), torch.tensor([count]))
    with pytest.raises(AssertionError, match="compiled kernel"):
        row_kernels.add_bags(torch.ones(1, 2), bags, scales=None, weights=torch.ones(1), into=torch.ones(3, 2))
    with pytest.raises(IndexError, match="table of 3 rows"):
        row_kernels.bag_forward(torch.ones(3, 2), bags, bias=None, scales=None)


@needs_kernels
def test_rows_without_weight_are_not_looked_at() -> None:
    """As rows that fill up a chunk; 0 times infinity would not be 0."""
    a, b = torch.randn(23, 600), torch.randn(23, 7)
    b[9:] = 0
    exact = b.double().t() @ a.double()
    a[12:] = torch.inf
    found = narrow.weight_gradient(a, b, block=8)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wrong", [-1, 3])
@needs_kernels
def test_lists_and_records_elsewhere_are_refused(wrong: int) -> None:
    indices = torch.tensor([0, wrong])
    with pytest.raises(AssertionError, match="compiled kernel"):
        row_kernels.pad_lists(torch.arange(6).int(), torch.tensor([0, 2, 4, 6]), indices, length=2)
    with pytest.raises(AssertionError, match="compiled kernel"):
        gather.gather_rows(torch.ones(3, 5), indices, into=torch.empty(2, 5))


@pytest.mark.parametrize("offsets", [[0, 3, 4, 6], [0, 2, 1, 6], [-1, 1, 3, 5], [0, 2, 4, 7]])
@needs_kernels
def test_lists_that_are_not_there_are_refused(offsets: list[int]) -> None:
    with pytest.raises(AssertionError, match="compiled kernel"):
        row_kernels.pad_lists(torch.arange(6).int(), torch.tensor(offsets), torch.arange(3), length=2)


@pytest.mark.parametrize(("token", "sample"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
@needs_kernels
def test_rows_elsewhere_are_refused(token: int, sample: int) -> None:
    with pytest.raises(AssertionError, match="compiled kernel"):
        row_kernels.add_rows(
            torch.ones(2, 2),
            torch.tensor([token]),
            torch.ones(1),
            into=torch.zeros(3, 2),
            sources=torch.tensor([sample]),
        )


@pytest.mark.parametrize(
    ("image", "windows", "places", "maps"),
    [
        (torch.zeros(2, 10), torch.arange(4), torch.arange(8), torch.zeros(2, 8, 3)),
        (torch.zeros(2, 10), torch.arange(4) - 1, torch.arange(7), torch.zeros(2, 7, 3)),
        (torch.zeros(2, 10), torch.arange(4), torch.arange(7), torch.zeros(3, 7, 3)),
        (torch.zeros(2, 10), torch.arange(4), torch.arange(6), torch.zeros(2, 7, 3)),
        (torch.zeros(2, 10), torch.arange(4).int(), torch.arange(7), torch.zeros(2, 7, 3)),
        (torch.zeros(2, 10).double(), torch.arange(4), torch.arange(7), torch.zeros(2, 7, 3)),
    ],
    ids=["beyond the end", "before the start", "samples", "positions", "offsets in int32", "float64"],
)
@needs_kernels
def test_what_would_read_elsewhere_is_refused(image: Tensor, windows: Tensor, places: Tensor, maps: Tensor) -> None:
    with pytest.raises(AssertionError, match="compiled kernel"):
        kernels.correlate(image, kernels.Offsets.of(windows), kernels.Offsets.of(places), maps)


def _states(net: nn.LSTM, x: Tensor) -> tuple[Tensor, Tensor]:
    """Norms that our engine finds for a loss that depends on all states, and the states themselves."""
    seen: list[Tensor] = []

    def loss(output: tuple[Tensor, tuple[Tensor, Tensor]], _: None) -> Tensor:
        seen.append(output[0].detach().clone())
        return output[0].flatten(1).sum(1) + output[1][1].transpose(0, 1).flatten(1).sum(1)

    norms = PerSampleGradients(net, options=GradientOptions(verify=False)).norms(x, None, loss)
    return norms, torch.cat(seen)


@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 30.0, 1e4])
@needs_kernels
def test_gates_are_as_exact_as_torch_itself(size: float) -> None:
    net = nn.LSTM(3, 5, batch_first=True, bidirectional=True)
    x = torch.randn(7, 6, 3) * size
    if size < 1:
        for parameter in net.parameters():
            parameter.data *= size
    _, states = _states(net, x)
    by_torch, _ = net(x)
    expected, _ = net.double()(x.double())
    error, usual = (states - expected).abs(), (by_torch - expected).abs()
    if size < 1:
        # Nothing is rounded on the way in; small states keep all their digits.
        assert (error <= 1e-6 * expected.abs()).all()
    assert error.max() <= 3 * usual.max() + 1e-7


@needs_kernels
def test_broken_sample_stays_alone() -> None:
    net, x = nn.LSTM(3, 5, batch_first=True), torch.randn(14, 6, 3)
    whole, _ = _states(net, x)
    x[4, 2, 1], x[9, 0, 0] = float("nan"), float("inf")
    with pytest.warns(UserWarning, match="not finite"):
        broken, _ = _states(net, x)
    # An infinite input saturates the gates; the gradient of its weight is 0 * inf.
    assert broken[[4, 9]].isfinite().tolist() == [False, False]
    others = [i for i in range(14) if i not in (4, 9)]
    assert torch.equal(broken[others], whole[others])


def _small_step(compiled: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 5, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3))
    x, y = torch.randn(20, 2, 8, 8), torch.randint(0, 3, (20,))
    engine = PerSampleGradients(
        model, options=GradientOptions(compiled=compiled, strategy={"0": "explicit"}, chunk_size=8)
    )
    loss = functional.cross_entropy
    _, sums = engine.weighted_sum(x, y, lambda o, t: loss(o, t, reduction="none"), lambda norms: 1 / norms)
    return sums


def test_with_and_without_agree() -> None:
    torch.testing.assert_close(_small_step(True), _small_step(False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "reason", ["asked not to", "no compiler", "compiler fails", "cache cannot be written", "somebody else's"]
)
def test_torch_takes_over(reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_library: None) -> None:
    expected = _small_step(False)
    library.cache_clear()
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    if reason == "asked not to":
        monkeypatch.setenv("SLUICE_NATIVE", "0")
    elif reason == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    elif reason == "compiler fails":
        broken = tmp_path / "cc"
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
    elif reason == "cache cannot be written":
        (tmp_path / "cache").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr("os.getuid", lambda: 12345)
    assert library() is None
    torch.testing.assert_close(_small_step(True), expected, rtol=0, atol=0)


@needs_kernels
def test_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_library: None) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path))
    library.cache_clear()
    assert library() is not None
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()}
    library.cache_clear()
    assert library() is not None
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()} == built


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    shape=st.sampled_from([(), (1,), (3, 7), (32,), (33,), (100,)]),
    kind=st.sampled_from([torch.float16, torch.float32]),
)
@needs_kernels
def test_stored_records_are_gathered_as_they_are(
    data: st.DataObject, shape: tuple[int, ...], kind: torch.dtype
) -> None:
    stored = (torch.randn(6, *shape) * 10.0 ** torch.randint(-8, 5, (6, *shape))).to(kind)
    stored[1:2] = torch.inf
    indices = torch.tensor(data.draw(st.lists(st.integers(0, 5), max_size=9)), dtype=torch.int64)
    into = torch.full((len(indices), *shape), torch.nan)
    assert gather.gather_rows(stored, indices, into=into)
    assert torch.equal(into, stored[indices].float())


@needs_kernels
def test_records_elsewhere_are_not_gathered() -> None:
    with pytest.raises(AssertionError, match="compiled kernel"):
        gather.gather_rows(torch.ones(3, 2), torch.tensor([3]), into=torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="compiled kernel"):
        gather.gather_rows(torch.ones(3, 2), torch.tensor([0]), into=torch.zeros(1, 3))
    assert not gather.gather_rows(torch.ones(3, 2).to(torch.uint8), torch.tensor([0]), into=torch.zeros(1, 2))
    assert not gather.gather_rows(torch.ones(2, 3).t(), torch.tensor([0]), into=torch.zeros(1, 2))
