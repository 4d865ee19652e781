from __future__ import annotations

import numpy as np
import pytest
import scipy

from sluice.accounting.composition import _fast_length


def test_transforms_have_the_lengths_that_scipy_would_choose():
    numbers = [*range(1, 5000), *np.random.default_rng(0).integers(5000, 1 << 21, 2000).tolist()]
    assert [_fast_length(each) for each in numbers] == [scipy.fft.next_fast_len(each, real=True) for each in numbers]


@pytest.mark.parametrize("points", [2, 3, 1000, 1024, 6075])
def test_numpy_transforms_as_scipy_does(points):
    masses = np.random.default_rng(points).exponential(size=points) * np.exp(-np.linspace(0, 30, points))
    spectrum = scipy.fft.rfft(masses)
    np.testing.assert_allclose(np.fft.rfft(masses), spectrum, rtol=0, atol=1e-15 * np.linalg.norm(masses) * 10)
    np.testing.assert_allclose(np.fft.irfft(spectrum, points), masses, rtol=0, atol=1e-15 * np.linalg.norm(masses) * 10)
