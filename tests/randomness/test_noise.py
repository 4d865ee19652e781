from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Iterator
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sluice._base.errors import DataError, InputError
from sluice._base.grids import bernoulli_threshold, power_of_two_below, release_grid
from sluice.randomness import rounded_normal
from sluice.randomness.keystream import Keystream
from sluice.randomness.native import kernels
from sluice.randomness.noise import NoiseSource, SecureNoise, SeededNoise, noisy_sum
from sluice.randomness.rounded_normal import Entries, rounded_normals, settle

# Statistical tests run on fixed seeds; each would fail a correct generator about once in ten thousand seeds.
ALPHA = 1e-4


@pytest.fixture(scope="module", autouse=True, params=["compiled", "torch"])
def _both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds with the kernel in C and without it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels, "library", lambda: None)
        elif kernels.library() is None:
            pytest.skip("no C compiler was found")
        yield


class ListedDigits:
    """Digits that begin as given and go on uniformly."""

    def __init__(self, *begin: int) -> None:
        self._begin = list(begin)
        self._rest = Keystream(key=bytes(32), number=7)
        self.numbers_read = 0

    def read_into(self, target: np.ndarray) -> None:
        self._rest.read_into(target)
        self.numbers_read += target.size
        for place in range(min(target.size, len(self._begin))):
            target[place] = self._begin.pop(0)


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return SeededNoise(11).normal((4_000_000,), 2.0, dtype=torch.float64).numpy() / 2.0


def test_moments(normals: np.ndarray) -> None:
    count = normals.size
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        z = (np.mean(normals**power) - mean) / math.sqrt(variance / count)
        assert abs(z) < 4, (power, z)


def test_distribution(normals: np.ndarray) -> None:
    assert stats.kstest(normals[:1_000_000], "norm").pvalue > ALPHA
    # The two halves of a block come from cosine and sine.
    half = rounded_normal.PAIRS_PER_BLOCK
    assert stats.kstest(normals[:half], normals[half : 2 * half]).pvalue > ALPHA


@pytest.mark.parametrize("scale", [0.3, 0.7, 1.0, 3.0])
def test_rounding_gives_exactly_the_mass_of_each_cell(scale: float) -> None:
    drawn = SeededNoise(5).rounded_normal(400_000, scale=scale).numpy()
    limit = math.ceil(3.5 * scale)
    cells = np.arange(-limit, limit + 1)
    observed = [(drawn < -limit).sum(), *((drawn == cell).sum() for cell in cells), (drawn > limit).sum()]
    edges = stats.norm.cdf(np.concatenate([[-np.inf], np.append(cells, limit + 1) - 0.5, [np.inf]]), scale=scale)
    expected = np.diff(edges) * drawn.size
    keep = expected > 5
    observed_kept = np.array(observed)[keep]
    statistic = float((((observed_kept - expected[keep]) ** 2) / expected[keep]).sum())
    assert stats.chi2.sf(statistic, keep.sum()) > ALPHA


def test_tails_by_counting_rare_events() -> None:
    source = SeededNoise(3)
    limits = (3.5, 4.0, 4.5, 5.0)
    counts = np.zeros(len(limits))
    draws, scale = 20_000_000, 2.0**16
    for _ in range(20):
        drawn = source.rounded_normal(draws // 20, scale=scale).abs_()
        counts += [int((drawn > limit * scale).sum()) for limit in limits]
    for limit, count in zip(limits, counts, strict=True):
        expected = 2 * stats.norm.sf(limit) * draws
        assert stats.poisson.cdf(count, expected) > ALPHA, limit
        assert stats.poisson.sf(count - 1, expected) > ALPHA, limit


@pytest.mark.parametrize("zeros", [18, 27, 50, 62])
def test_tail_beyond_six_sigma_has_the_right_law(zeros: int) -> None:
    """Where the radius' uniform begins with k zeros, the squared radius is ``2 k ln 2`` plus twice an exponential."""
    source = np.random.default_rng(zeros)
    scale, squared = 2.0**20, []
    for _ in range(800):
        first = int(source.integers(0, 1 << (63 - zeros)))
        second = int(source.integers(-(2**63), 2**63))
        x, y = settle(first, second, scale=scale, digits=ListedDigits(int(source.integers(0, 2**63))))
        squared.append((x * x + y * y) / scale**2)
    # With few digits left the law is conditional on those drawn here, which are still uniform given enough of them.
    excess = np.array(squared) - 2 * zeros * math.log(2)
    assert excess.min() > -1e-4
    if zeros <= 50:
        assert stats.kstest(excess, "expon", args=(0, 2)).pvalue > ALPHA


def test_there_is_no_largest_value() -> None:
    digits = ListedDigits(0, 1, 0, 0)
    x, y = settle(0, 2**61, scale=1.0, digits=digits)
    assert digits.numbers_read >= 4
    assert math.hypot(x, y) > math.sqrt(2 * 127 * math.log(2)) - 1


def test_no_correlation_within_or_between_calls(normals: np.ndarray) -> None:
    part = normals[:1_000_000]
    bound = 4.5 / math.sqrt(part.size)
    half = rounded_normal.PAIRS_PER_BLOCK
    for lag in (1, 2, 3, 7, half, 2 * half):
        for transform in (lambda x: x, lambda x: (x * x - 1) / math.sqrt(2)):
            assert abs(np.mean(transform(part[lag:]) * transform(part[:-lag]))) < bound, lag
    source = SeededNoise(11)
    first, second = (source.normal((200_000,), 1.0).numpy() for _ in range(2))
    assert abs(np.mean(first * second)) < 4.5 / math.sqrt(200_000)


def test_double_precision_keeps_the_error_bound() -> None:
    """The bound that the fast path trusts, at random digits and at the edges of its range."""
    source = np.random.default_rng(0)
    low, high = rounded_normal.SMALLEST_RADIUS_DIGITS, rounded_normal.LARGEST_RADIUS_DIGITS
    radius = [
        low,
        low + 1,
        high,
        high - 1,
        *source.integers(low, 2**50, 200),
        *source.integers(2**63 - 2**50, high, 200),
    ]
    radius += list(source.integers(low, high, 600))
    angle = [*source.integers(-(2**63), 2**63 - 1, len(radius) - 4), -(2**63), 2**63 - 1, 2**62, 0]
    scale = 1.5 * 2.0**25
    fast = 2.0**-63 * torch.tensor(np.array(radius, dtype=np.int64)).double()
    fast_radius = fast.log_().mul_(-2.0 * scale * scale).sqrt_()
    fast_angle = torch.tensor(np.array(angle, dtype=np.int64)).double().mul_(math.pi * 2.0**-63)
    worst = 0.0
    with mpmath.workprec(200):
        for place in range(len(radius)):
            for end in (0, 1):
                uniform = mpmath.mpf(int(radius[place]) + end) / 2**63
                turn = mpmath.pi * (int(angle[place]) + end) / 2**63
                exact_radius = mpmath.sqrt(-2 * mpmath.log(uniform))
                for wave, exact in ((torch.cos, mpmath.cos), (torch.sin, mpmath.sin)):
                    computed = float(fast_radius[place] * wave(fast_angle[place]))
                    worst = max(worst, abs(float(mpmath.mpf(computed) / scale - exact_radius * exact(turn))))
    assert worst < rounded_normal.ERROR_BOUND
    assert worst > rounded_normal.ERROR_BOUND / 1000, "the test looks at the wrong place"


@pytest.mark.parametrize("scale", [0.4, 2.0**20, 2.0**39])
def test_fast_path_and_interval_arithmetic_agree(scale: float) -> None:
    pairs = 300
    drawn = Keystream(key=bytes(32), number=3).read(2 * pairs, np.uint64).view(np.int64)
    digits = ListedDigits(*drawn.tolist())
    fast = rounded_normals(2 * pairs, scale=scale, digits=digits).view(2, pairs).T.tolist()
    for pair in range(pairs):
        more = ListedDigits()
        exact = settle(int(drawn[pair]) & (2**63 - 1), int(drawn[pairs + pair]), scale=scale, digits=more)
        if more.numbers_read == 0:
            assert tuple(fast[pair]) == exact


def test_open_roundings_are_settled_with_more_digits() -> None:
    """Digits found by search, after which a normal is so near to a half that 63 digits do not tell its rounding."""
    scale = 1.0
    with mpmath.workprec(300):
        radius = mpmath.mpf(3) / 2 / mpmath.cos(mpmath.pi / 8)
        uniform = mpmath.floor(mpmath.exp(-(radius**2) / 2) * mpmath.mpf(2) ** 63)
    angle = 2**60
    outcomes = set()
    for more in (0, 2**63, 2**64 - 1):
        digits = ListedDigits(more, 0)
        outcomes.add(settle(int(uniform), angle, scale=scale, digits=digits)[0])
        assert digits.numbers_read >= 2
    assert outcomes == {1, 2}


@pytest.mark.parametrize("radius", [0, 1, 2**44, 2**63 - 1, 2**63 - 2**45])
def test_radii_beyond_the_error_bound_are_settled(radius: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = []

    def watched(radius_digits: int, angle_digits: int, *, scale: float, digits: ListedDigits) -> tuple[int, int]:
        settled.append(radius_digits)
        return settle(radius_digits, angle_digits, scale=scale, digits=digits)

    monkeypatch.setattr(rounded_normal, "settle", watched)
    drawn = rounded_normals(4, scale=100.0, digits=ListedDigits(2**62, radius, 2**61, 2**61))
    assert settled == [radius]
    assert drawn.isfinite().all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 2 * rounded_normal.PAIRS_PER_BLOCK + 1])
def test_any_count(count: int) -> None:
    drawn = SeededNoise(1).rounded_normal(count, scale=100.0)
    assert drawn.shape == (count,)
    assert torch.equal(drawn, drawn.round())
    assert len(drawn) < 3 or drawn.std() > 10


def test_keystream_is_chacha20() -> None:
    """The keystream of RFC 8439, appendix A.1, test vector 1."""
    expected = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    assert Keystream(key=bytes(32), number=0).read(32, np.uint8).tobytes() == expected
    long = Keystream(key=bytes(32), number=0).read(3_000_001, np.uint8)
    pieces = Keystream(key=bytes(32), number=0)
    together = np.concatenate([pieces.read(size, np.uint8) for size in (1, 1_000_000, 2_000_000)])
    assert (long == together).all()


def test_seeded_noise_repeats_and_resumes() -> None:
    first, second = SeededNoise(4), SeededNoise(4)
    assert torch.equal(first.normal((100,), 1.0), second.normal((100,), 1.0))
    state = pickle.loads(pickle.dumps(first.state_dict()))
    expected = (first.normal((50,), 3.0), first.bernoulli(50, 0.3), first.uniform((5,)))
    resumed = SeededNoise(0)
    resumed.load_state_dict(state)
    actual = (resumed.normal((50,), 3.0), resumed.bernoulli(50, 0.3), resumed.uniform((5,)))
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert resumed.seed == 4
    assert not torch.equal(SeededNoise(4).normal((9,), 1.0), SeededNoise(5).normal((9,), 1.0))
    assert not torch.equal(first.normal((9,), 1.0), first.normal((9,), 1.0))


def test_secure_noise_never_repeats() -> None:
    source = SecureNoise()
    before = source.state_dict()
    drawn = [source.normal((4,), 1.0)]
    source.load_state_dict(before)
    copies = (source, SecureNoise(), copy.copy(source), copy.deepcopy(source), pickle.loads(pickle.dumps(source)))
    drawn += [other.normal((4,), 1.0) for other in copies]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)
    assert source.secure
    assert not SeededNoise(1).secure
    assert stats.kstest(source.normal((100_000,), 1.0).numpy(), "norm").pvalue > 1e-9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_secure_noise_differs_after_a_fork() -> None:
    source = SecureNoise()
    source.uniform((1,))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, source.keystream().read(16, np.uint8).tobytes())
        os._exit(0)
    mine = source.keystream().read(16, np.uint8).tobytes()
    os.waitpid(child, 0)
    theirs = os.read(read_end, 16)
    os.close(read_end)
    os.close(write_end)
    assert len(theirs) == 16
    assert theirs != mine


@pytest.mark.parametrize(
    ("source", "state"),
    [
        (SecureNoise(), {"kind": "seeded", "seed": 1, "calls": 2}),
        (SeededNoise(1), {"kind": "secure"}),
        (SeededNoise(1), {"kind": "seeded", "seed": 1, "calls": -2}),
        (SeededNoise(1), {}),
    ],
)
def test_a_foreign_state_is_refused(source: NoiseSource, state: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"allowed|resume"):
        source.load_state_dict(state)


@pytest.mark.parametrize("seed", [1.5, True, "1"])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(InputError, match="seed="):
        SeededNoise(seed)  # type: ignore[arg-type]


class ListedSource(SeededNoise):
    """A source whose keystream holds the given 64-bit numbers as ``bernoulli`` reads them."""

    def __init__(self, first: list[int], rest: list[int]) -> None:
        super().__init__(0)
        self._listed = [np.array(first, dtype=np.uint16), np.array(rest, dtype=np.uint64) << np.uint64(16)]

    def keystream(self) -> Keystream:
        listed = self._listed

        class Listed(Keystream):
            def __init__(self) -> None: ...

            def read_into(self, target: np.ndarray) -> None:
                target[:] = listed.pop(0)

        return Listed()


@given(st.integers(0, 2**64 - 1), st.integers(-2, 2), st.floats(0, 1, exclude_max=True))
def test_bernoulli_compares_all_64_bits(uniform: int, offset: int, probability: float) -> None:
    """Also where the uniform is right beside the threshold, which chance would never find."""
    threshold = bernoulli_threshold(probability)
    for number in (uniform, min(max(threshold + offset, 0), 2**64 - 1)):
        undecided = [number & (2**48 - 1)] if number >> 48 == threshold >> 48 else []
        assert bool(ListedSource([number >> 48], undecided).bernoulli(1, probability)) == (number < threshold)


@given(st.floats(0, 1))
def test_bernoulli_is_never_above_the_probability(probability: float) -> None:
    exact, granted = Fraction(probability), Fraction(bernoulli_threshold(probability), 2**64)
    assert exact - Fraction(1, 2**64) < granted <= exact


def test_bernoulli_edges() -> None:
    source = SeededNoise(1)
    assert source.bernoulli(1000, 1.0).all()
    assert not source.bernoulli(1000, 0.0).any()
    assert source.bernoulli(0, 0.5).shape == (0,)
    with pytest.raises(InputError, match=r"probability=1\.5"):
        source.bernoulli(3, 1.5)


def test_uniform() -> None:
    drawn = SeededNoise(2).uniform((100, 1000)).numpy()
    assert drawn.shape == (100, 1000)
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > ALPHA


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_noisy_sum_is_grid_sum_plus_grid_noise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    raw = [torch.randn(3, 5, generator=generator).to(dtype), torch.randn((), generator=generator).to(dtype)]
    before = [tensor.clone() for tensor in raw]
    step, std = release_grid(noise_multiplier=2.0, sensitivity=1.5, entries=16)
    drawn = SeededNoise(8).rounded_normal(16, scale=std / step)
    result = noisy_sum(raw, noise_multiplier=2.0, sensitivity=1.5, noise=SeededNoise(8))
    for after, old, grid_noise in zip(result, before, (drawn[:15].view(3, 5), drawn[15]), strict=True):
        expected = ((old.double() / step).round() + grid_noise) * step
        assert torch.equal(after, expected.to(dtype))
        assert after.dtype == dtype
    assert result[0] is raw[0]
    assert result[1] is raw[1]
    assert math.log2(step).is_integer()


def test_what_is_released_lies_on_the_public_grid_whatever_the_sum() -> None:
    """An attack on low-order digits needs a value that one sum can give and its neighbour cannot."""
    step, _ = release_grid(noise_multiplier=1.0, sensitivity=1.0, entries=1000)
    for value in (0.0, math.pi * 1e-7, 1 / 3, 1234.5678):
        raw = torch.full((1000,), value, dtype=torch.float64)
        (released,) = noisy_sum([raw], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1))
        assert torch.equal((released / step).round() * step, released)


@given(st.floats(1e-3, 1e3), st.floats(1e-6, 1e6), st.integers(1, 10**10), st.sampled_from([0.0, 1e-3, 2.0]))
def test_the_noise_pays_for_the_grid(multiplier: float, sensitivity: float, entries: int, error: float) -> None:
    step, std = release_grid(noise_multiplier=multiplier, sensitivity=sensitivity, entries=entries, sum_error=error)
    rounding_squared = Fraction(step) ** 2 * entries
    assert rounding_squared <= (Fraction(std) / 2**15) ** 2
    spare = Fraction(std) / Fraction(multiplier) - Fraction(sensitivity) - 2 * Fraction(error)
    assert spare > 0
    assert spare**2 >= rounding_squared
    assert std <= multiplier * (sensitivity * (1 + multiplier * 2.0**-15 + 1e-10) + 2 * error * (1 + 1e-10))


def test_noisy_sum_has_the_stated_spread() -> None:
    (released,) = noisy_sum([torch.zeros(200_000)], noise_multiplier=3.0, sensitivity=0.5, noise=SeededNoise(6))
    assert stats.kstest(released.numpy(), "norm", args=(0, 1.5)).pvalue > ALPHA


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 70_000, 139_999])
def test_noisy_sum_refuses_what_is_not_finite(bad: float, dtype: torch.dtype, place: int) -> None:
    raw = [torch.ones(3), torch.ones(140_000, dtype=dtype)]
    raw[1][place] = bad
    for _ in range(2):  # whoever tries again must not get what the first call has left
        with pytest.raises(DataError, match="raw_sum"):
            noisy_sum(raw, noise_multiplier=1.0, sensitivity=1.0, noise=SecureNoise())
    assert raw[0].isnan().all()
    assert raw[1].isnan().all() or dtype is torch.bfloat16


def test_zero_has_no_sign() -> None:
    """The sign of a zero would tell the sign of a raw sum that is far below the grid."""
    for value in (-0.0, 0.0, -1e-9, 1e-9):
        steps = torch.full((1000,), value, dtype=torch.float64)
        Entries([steps]).add_rounded_normals(scale=0.3, step=1.0, digits=Keystream(key=bytes(32), number=1))
        assert (steps == 0).any()
        assert not steps[steps == 0].signbit().any()
    assert not SeededNoise(1).rounded_normal(1000, scale=0.1).signbit().any()


def test_beyond_the_largest_number_of_steps_is_clamped() -> None:
    values = [2.0**52 + 6, 2.0**51 + 1, 2.0**60, 3e38, -(2.0**53), -3e38, 2.0**51 + 0.5, 2.0**50 + 0.75]
    raw = torch.tensor(values, dtype=torch.float64)
    drawn = SeededNoise(1).rounded_normal(len(values), scale=4.0)
    Entries([raw]).add_rounded_normals(scale=4.0, step=1.0, digits=SeededNoise(1).keystream())
    expected = [
        min(max(round(value), -(2**52)), 2**52) + int(noise) for value, noise in zip(values, drawn, strict=True)
    ]
    assert [int(value) for value in raw] == expected


def test_noisy_sum_edges() -> None:
    assert noisy_sum([], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1)) == []
    empty, scalar = noisy_sum(
        [torch.zeros(0), torch.zeros(())], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1)
    )
    assert empty.shape == (0,)
    assert scalar != 0
    huge = torch.tensor([1e300], dtype=torch.float64)
    step, _ = release_grid(noise_multiplier=1.0, sensitivity=1.0, entries=1)
    (clamped,) = noisy_sum([huge], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1))
    assert clamped == pytest.approx(2.0**52 * step)
    parameter = torch.nn.Parameter(torch.ones(2, 3).t())
    noisy_sum([parameter], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1))
    assert parameter.grad_fn is None
    for wrong in ({"noise_multiplier": 0.0}, {"sensitivity": -1.0}, {"sum_error": -1.0}, {"sensitivity": 1e-250}):
        given_arguments = {"noise_multiplier": 1.0, "sensitivity": 1.0, "sum_error": 0.0} | wrong
        with pytest.raises(InputError, match=next(iter(wrong))):
            noisy_sum([torch.zeros(1)], noise=SeededNoise(1), **given_arguments)


def test_other_input_is_refused() -> None:
    for std in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="std="):
            SeededNoise(1).normal((2,), std)
    with pytest.raises(InputError, match="coarser grid"):
        SeededNoise(1).rounded_normal(2, scale=2.0**41)


@given(st.floats(1e-300, 1e300))
def test_power_of_two_below(value: float) -> None:
    power = power_of_two_below(value)
    assert power <= value < 2 * power
    assert math.frexp(power)[0] == 0.5
