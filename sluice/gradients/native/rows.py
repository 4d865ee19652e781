"""Embedding tables by compiled kernels: sums of rows, norms of gradients, weighted sums. See `kernels`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.gradients.native.kernels import available, require, succeed
from sluice.gradients.native.loading import loaded_library

#: What a kernel returns for an id that the table does not have.
_OUT_OF_RANGE = 2
#: An id that no table can have.
_NO_ID = -(2**63)
_IDS = (torch.int32, torch.int64)


def list_entries(matrix: Tensor, *, padding: int | None) -> tuple[Tensor, Tensor]:
    """The entries of an integer matrix ``[n, columns]`` as one list, those that are ``padding`` left out.

    Returns (values, in the type of the matrix; where each row begins and the last one ends: ``[n + 1]``, int64).
    """
    matrix = matrix.contiguous()
    n, columns = matrix.shape
    require(matrix.dtype in _IDS and matrix.device.type == "cpu")
    values, offsets = matrix.new_empty(n * columns), torch.empty(n + 1, dtype=torch.int64)
    loaded_library().list_entries(
        *(n, columns, matrix.data_ptr(), matrix.element_size(), _NO_ID if padding is None else padding),
        *(values.data_ptr(), offsets.data_ptr()),
    )
    return values[: int(offsets[-1])], offsets


def pad_lists(values: Tensor, offsets: Tensor, indices: Tensor, *, length: int) -> Tensor:
    """Some of the lists that ``offsets`` cuts ``values`` into, as rows of one length, ``[n, length]``, filled up with -1.

    Args:
        values: int32.
        offsets: where each list begins, and where the last one ends, int64.
        indices: which lists, int64.
        length: that of the longest list at least.
    """
    count, lists = indices.shape[0], offsets.shape[0] - 1
    require(
        values.dtype is torch.int32 and values.dim() == 1 and values.is_contiguous() and values.device.type == "cpu"
    )
    require(is_index(offsets, lists + 1) and is_index(indices, count))
    rows = torch.empty(count, length, dtype=torch.int32)
    failed = loaded_library().pad_lists(
        *(count, length, lists, values.shape[0], values.data_ptr(), offsets.data_ptr(), indices.data_ptr()),
        rows.data_ptr(),
    )
    require(failed == 0)
    return rows


class _Bags(ctypes.Structure):
    """The struct of the same name in rows.c."""

    _fields_ = (
        *(("n", ctypes.c_int64), ("columns", ctypes.c_int64), ("ids", ctypes.c_void_p), ("bytes", ctypes.c_int64)),
        *(("counts", ctypes.c_void_p), ("factors", ctypes.c_void_p)),
    )


@dataclass(frozen=True, eq=False)
class Bags:
    """The rows of a table that each sample uses: the first ``counts[i]`` entries of ``ids[i]``.

    Attributes:
        ids: ``[n, any]``, int32 or int64.
        counts: ``[n]``, int64.
        factors: what each of these rows is multiplied with, of the shape of ``ids``; None for ones.
    """

    ids: Tensor
    counts: Tensor
    factors: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor, *, padding: int | None, factors: Tensor | None = None) -> Bags:
        """One sample in each row; entries that are ``padding`` are not ids, wherever they stand."""
        matrix = matrix.contiguous()
        n, columns = matrix.shape
        require(has_ids(matrix))
        counts = torch.empty(n, dtype=torch.int64)
        in_front = loaded_library().count_entries(
            *(n, columns, matrix.data_ptr(), matrix.element_size(), _NO_ID if padding is None else padding),
            counts.data_ptr(),
        )
        if padding is not None and not in_front:
            order = matrix.eq(padding).to(torch.int8).argsort(dim=1, stable=True)
            matrix, factors = matrix.gather(1, order), None if factors is None else factors.gather(1, order)
        return cls(matrix, counts, None if factors is None else factors.contiguous())

    def sizes(self) -> Tensor:
        """How many rows each sample uses, ``[n]``."""
        return self.counts

    def described(self) -> _Bags:
        """For C, which sees to it that ids and counts stay in their bounds."""
        n, columns = self.ids.shape
        require(has_ids(self.ids) and self.ids.is_contiguous())
        require(is_index(self.counts, n))
        factors = self.factors
        require(factors is None or (available(factors) and factors.shape == (n, columns) and factors.is_contiguous()))
        return _Bags(
            *(n, columns, self.ids.data_ptr(), self.ids.element_size(), self.counts.data_ptr(), _address(factors))
        )


def bag_forward(table: Tensor, bags: Bags, *, bias: Tensor | None, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sums of rows of a table, times scales, plus a bias, ``[n, width]``, and the squared norms of their gradients.

    The second is the squared norm of a sample's gradient over that of the derivative at its output, ``[n]``, float64.

    Args:
        table: ``[rows, width]``; any strides.
        bias: ``[width]``; None for zeros.
        scales: ``[n]``, what each sum is multiplied with; None for ones.

    Raises:
        IndexError: if the table has no such row.
    """
    n, width = bags.counts.shape[0], table.shape[1]
    require(available(table) and table.dim() == 2 and _is_row(bias, width) and _is_row(scales, n))
    output, squares = table.new_empty(n, width), torch.empty(n, dtype=torch.float64)
    failed = loaded_library().bag_forward(
        *(ctypes.byref(bags.described()), width, table.shape[0], table.data_ptr(), table.stride(0), table.stride(1)),
        *(_address(bias), _address(scales), output.data_ptr(), squares.data_ptr(), torch.get_num_threads()),
    )
    if failed == _OUT_OF_RANGE:
        raise IndexError(f"an index is outside a table of {table.shape[0]} rows")
    succeed(failed)
    return output, squares


def row_norms(rows: Tensor, ids: Tensor, offsets: Tensor, *, table_rows: int) -> Tensor:
    """Squared norms of samples' gradients, ``[n]``, float64: rows with the same id are added up first.

    Args:
        rows: ``[lookups, width]``, one for each lookup.
        ids: ``[lookups]``, integers below ``table_rows``.
        offsets: ``[n + 1]``, where each sample's lookups begin, and where the last one's end.
    """
    rows, ids = rows.contiguous(), ids.long()
    count, width = rows.shape
    n = offsets.shape[0] - 1
    require(available(rows))
    require_within(ids, count, table_rows)
    _require_spans(offsets, count)
    squares = torch.empty(n, dtype=torch.float64)
    failed = loaded_library().row_norms(
        *(n, width, table_rows, rows.data_ptr(), ids.data_ptr(), offsets.data_ptr()),
        *(squares.data_ptr(), torch.get_num_threads()),
    )
    succeed(failed)
    return squares


class _Addition(ctypes.Structure):
    """The struct of the same name in rows.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "width", "table_rows")),
        *((name, ctypes.c_void_p) for name in ("rows", "sources", "ids")),
        *(("bytes", ctypes.c_int64), ("scales", ctypes.c_void_p), ("into", ctypes.c_void_p)),
        *((name, ctypes.c_int64) for name in ("row_step", "column_step", "fresh", "threads")),
    )


def _addition(rows: Tensor, into: Tensor, *, fresh: bool) -> _Addition:
    """One to which nothing has been assigned yet."""
    width = rows.shape[1]
    require(available(rows, into) and rows.is_contiguous() and into.dim() == 2 and into.shape[1] == width)
    return _Addition(
        width=width,
        table_rows=into.shape[0],
        rows=rows.data_ptr(),
        into=into.data_ptr(),
        row_step=into.stride(0),
        column_step=into.stride(1),
        fresh=fresh,
        threads=torch.get_num_threads(),
    )


def add_rows(
    rows: Tensor,
    ids: Tensor,
    scales: Tensor | None,
    *,
    into: Tensor,
    sources: Tensor | None = None,
    fresh: bool = False,
) -> None:
    """``into[ids[k]] += scales[k] * rows[sources[k]]`` for all k, in place; rounded once for each row of ``into``.

    Args:
        rows: ``[any, width]``.
        ids: ``[lookups]``, int32 or int64, rows of ``into``.
        scales: ``[lookups]``; None for ones.
        into: ``[rows of the table, width]``; any strides.
        sources: ``[lookups]``, integers, rows of ``rows``; None if there is a row for each lookup, in order.
        fresh: ``into`` has nothing in it yet and counts as zero.
    """
    rows, scales = rows.contiguous(), None if scales is None else scales.contiguous()
    count = ids.shape[0]
    require(is_index(ids, count, _IDS) and _is_row(scales, count))
    if sources is not None:
        require_within(sources, count, rows.shape[0])
    else:
        require(rows.shape[0] == count)
    addition = _addition(rows, into, fresh=fresh)
    addition.count, addition.ids, addition.bytes = count, ids.data_ptr(), ids.element_size()
    addition.sources, addition.scales = _address(sources), _address(scales)
    _require_added(loaded_library().add_rows(ctypes.byref(addition)))


def add_bags(
    rows: Tensor, bags: Bags, *, scales: Tensor | None, weights: Tensor, into: Tensor, fresh: bool = False
) -> None:
    """What `add_rows` does for the lookups of bags, with ``rows[i] * scales[i] * weights[i]`` for all those of bag i.

    Args:
        rows: ``[n, width]``.
        scales: ``[n]``; None for ones.
        weights: ``[n]``.
    """
    rows, weights = rows.contiguous(), weights.contiguous()
    n = bags.counts.shape[0]
    require(rows.shape[0] == n and _is_row(scales, n) and _is_row(weights, n))
    addition = _addition(rows, into, fresh=fresh)
    described = bags.described()
    pointers = ctypes.byref(described), ctypes.byref(addition), _address(scales), weights.data_ptr()
    _require_added(loaded_library().add_bags(*pointers))


def _require_added(failed: int) -> None:
    require(failed != _OUT_OF_RANGE)
    succeed(failed)


def _is_row(numbers: Tensor | None, count: int) -> bool:
    """Whether these are so many numbers that C can read, or none at all."""
    return numbers is None or (available(numbers) and numbers.shape == (count,) and numbers.is_contiguous())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def has_ids(matrix: Tensor) -> bool:
    """Whether a matrix has integers in it that C can read."""
    return matrix.dtype in _IDS and matrix.device.type == "cpu"


def is_index(index: Tensor, count: int, types: tuple[torch.dtype, ...] = (torch.int64,)) -> bool:
    """Whether it is a list of so many integers that C can read."""
    in_memory = index.device.type == "cpu" and index.is_contiguous()
    return index.shape == (count,) and index.dtype in types and in_memory


def require_within(index: Tensor, count: int, end: int) -> None:
    """Refuse an index that is not ``count`` integers from 0 to ``end`` - 1."""
    require(is_index(index, count))
    low, high = torch.aminmax(index) if count else (0, -1)
    require(int(low) >= 0 and int(high) < end)


def _require_spans(offsets: Tensor, count: int) -> None:
    require(is_index(offsets, offsets.shape[0]) and offsets.shape[0] > 0)
    require(int(offsets[0]) == 0 and int(offsets[-1]) == count and bool((offsets[1:] >= offsets[:-1]).all()))
