from __future__ import annotations

import pytest
import torch

from sluice._base.errors import InputError
from sluice.features.whitening import covariance, kronecker_covariances, unit_rows, whitening_matrix


def known(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """A covariance with these eigenvalues, and its eigenvectors."""
    generator = torch.Generator().manual_seed(1)
    directions, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return directions * torch.tensor(values) @ directions.T, directions


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5])
def test_eigenvalues_become_their_power(power):
    values = [0.5, 1.0, 2.5, 4.0]
    matrix, directions = known(values)
    found = whitening_matrix(matrix, power=power, ridge=0.01).double()
    expected = (torch.tensor(values, dtype=torch.float64) / 2 + 0.01) ** -power
    torch.testing.assert_close(directions.T @ found @ directions, torch.diag(expected), rtol=1e-5, atol=1e-6)


def test_full_whitening_makes_all_directions_vary_alike():
    matrix, directions = known([0.5, 1.0, 2.5, 4.0])
    rows = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = rows * torch.tensor([0.5, 1.0, 2.5, 4.0]).sqrt() @ directions.T
    whitened = rows @ whitening_matrix(covariance(rows), power=0.5, ridge=1e-9).double()
    expected = covariance(rows).trace() / 4 * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(covariance(whitened), expected, rtol=1e-4, atol=1e-4)
    assert (covariance(rows) - matrix).abs().max() < 0.2


def test_without_variance_only_the_scale_changes():
    torch.testing.assert_close(whitening_matrix(torch.zeros(3, 3), power=0.5, ridge=0.25), 2.0 * torch.eye(3))


def test_covariances_of_a_product():
    """Of maps A x B', whose entries are independent, channels vary as A A' and places as B B'."""
    generator = torch.Generator().manual_seed(3)
    across, along = torch.randn(3, 3, generator=generator), torch.randn(5, 5, generator=generator)
    maps = across @ torch.randn(40_000, 3, 5, generator=generator) @ along.T
    channels, places = kronecker_covariances(maps)
    for found, factor in ((channels, across), (places, along)):
        expected = (factor @ factor.T).double()
        torch.testing.assert_close(found / found.trace(), expected / expected.trace(), rtol=0, atol=0.02)


def test_unit_rows():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]])
    torch.testing.assert_close(unit_rows(rows), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, -1.0]]))


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match="it must be a square matrix"):
        whitening_matrix(torch.zeros(shape))
