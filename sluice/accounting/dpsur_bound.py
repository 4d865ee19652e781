"""A Renyi bound for a release that is kept or forgotten by looking at the released value itself.

The law of a kept value ``w`` is ``f(w) a(w) / Z``: ``f`` a sampled Gaussian, ``a`` the probability of being kept, which
a record reaches only through a Poisson sample of rate ``validation_rate``. All that is known of ``a`` is that its
largest value is at most ``spread`` times its smallest. The proof is in docs/accounting.md, section 8.3; the names here
are its symbols: ``kappa`` the spread, ``t`` the largest acceptance over the mean one, ``tau`` the total variation
between the step with and without the record, ``c`` the range of the factor between the two density ratios.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy

from sluice.accounting.renyi_conversion import proved

#: The unknown ``t`` in [1, kappa] is cut into cells between these powers of kappa, finer towards kappa, where the worst
#: ones are. Each cell is bounded by its worst corner, so any cut is sound, and a finer one is only tighter.
_CELL_EDGES = 1 - np.concatenate([np.geomspace(1, 1e-2, 13), [0.0]])
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_TAIL = 12.0
#: Where the quadrature would need more panels than this, the bound is left to conditioning.
_MOST_PANELS = 500.0


@dataclass(frozen=True, kw_only=True)
class SelfSelection:
    """What a record can do to a release that is selected by its own value. Every field is public.

    Attributes:
        sample_rate: rate of the batch behind the released value [q].
        noise_multiplier: noise of the released value [sigma].
        validation_rate: rate of the batch that the decision looks at [q_v].
        spread: the largest over the smallest probability of acceptance [kappa].
    """

    sample_rate: float
    noise_multiplier: float
    validation_rate: float
    spread: float

    @property
    def distinguishability(self) -> float:
        """Total variation between the Gaussian step with and without the record [tau]."""
        return float(2 * scipy.special.ndtr(1 / (2 * self.noise_multiplier)) - 1)

    @property
    def acceptance_ratio_range(self) -> tuple[float, float]:
        """Range of ``a'(w) / a(w)``: the record enters the decision with probability ``validation_rate`` only."""
        rate = self.validation_rate
        return 1 - rate + rate / self.spread, 1 - rate + rate * self.spread

    @property
    def normaliser_ratio_range(self) -> tuple[float, float]:
        """Range of ``Z' / Z`` where nothing is known of Z."""
        low, high, _ = self._removed_normaliser(np.array([1.0]), np.array([self.spread]))
        return float(low[0]), float(high[0])

    def conditioning_renyi(self, orders: np.ndarray, step_renyi: np.ndarray) -> np.ndarray:
        """Bound by conditioning on acceptance, given the bound ``step_renyi`` of the step alone (section 8.2)."""
        low, high = self.acceptance_ratio_range
        normaliser_low, normaliser_high = self.normaliser_ratio_range
        tilt = max(math.log(high) - math.log(normaliser_low), math.log(normaliser_high) - math.log(low))
        return step_renyi + math.log(self.spread) / (orders - 1) + tilt

    def centred_renyi(self, order: float) -> float:
        """Bound by the centred moment (section 8.3), the worse of the two directions; infinite where not evaluated."""
        return float(proved(self.centred_renyi_by_direction(order)).max())

    def centred_renyi_by_direction(self, order: float) -> tuple[float, float]:
        """Bounds of ``D(P' || P)`` and ``D(P || P')``, where P' is the law with the record."""
        if order / self.noise_multiplier > _MOST_PANELS * self._panel_width:
            return math.inf, math.inf
        edges = self.spread**_CELL_EDGES
        lower, upper = edges[:-1], edges[1:]
        removed = np.log(upper) + self._removed_moment(order, *self._removed_factor(lower, upper))
        added = np.log(upper) + self._added_moment(order, *self._added_factor(lower, upper))
        removing, adding = (float(np.logaddexp(0.0, np.max(logs))) / (order - 1) for logs in (removed, added))
        return removing, adding

    def _reach(self, upper: np.ndarray) -> np.ndarray:
        """How far the record's step can move the mean acceptance, relative to it."""
        return self.sample_rate * upper * (1 - 1 / self.spread) * self.distinguishability

    def _removed_normaliser(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Range of ``Z' / Z`` for ``t = a_max / Z`` in each cell."""
        rate, kappa = self.validation_rate, self.spread
        tested_low, tested_high = 1 - rate + rate * lower / kappa, 1 - rate + rate * upper
        reach = self._reach(upper)
        keep = 1 - self.sample_rate
        low = np.maximum(tested_low - reach, keep * tested_low + self.sample_rate * lower / kappa)
        high = np.minimum(tested_high + reach, keep * tested_high + self.sample_rate * upper)
        return low, high, reach

    def _removed_factor(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Range of ``c = (a'/a) (Z/Z')`` for ``t = a_max / Z`` in each cell."""
        ratio_low, ratio_high = self.acceptance_ratio_range
        low, high, _ = self._removed_normaliser(lower, upper)
        return ratio_low / high, ratio_high / low

    def _added_factor(self, lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Range of ``c = (a/a') (Z'/Z)`` for ``t = a_max / Z'`` in each cell."""
        ratio_low, ratio_high = self.acceptance_ratio_range
        reach = self._reach(upper)
        low = np.maximum(np.maximum(1 - reach, lower / self.spread) / ratio_high, lower / self.spread)
        high = np.minimum(np.minimum(1 + reach, upper) / ratio_low, upper)
        return 1 / (ratio_high * high), 1 / (ratio_low * low)

    def _removed_moment(self, order: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """``log E_f[max over c of phi(c x)]`` with ``x = f'/f``, for each cell."""
        kinks = self._where_density_ratio_is(_log_crossing(order, low, high))
        nodes, log_weights = self._quadrature(-_TAIL, order / self.noise_multiplier + _TAIL, kinks)
        log_x = self._log_density_ratio(nodes)
        return _log_mean_of_largest(order, log_x, low, high, log_weights)

    def _added_moment(self, order: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """``log E_f'[max over c of phi(c / x)]``, for each cell."""
        kinks = self._where_density_ratio_is(-_log_crossing(order, low, high))
        nodes, log_weights = self._quadrature(-_TAIL - order / self.noise_multiplier, _TAIL, kinks)
        log_x = self._log_density_ratio(nodes)
        return _log_mean_of_largest(order, -log_x, low, high, log_weights + log_x)

    @property
    def _panel_width(self) -> float:
        # The density ratio changes over lengths of 1/mu = sigma, and the normal law over lengths of 1.
        return 2 * min(1.0, self.noise_multiplier)

    def _quadrature(self, start: float, stop: float, kinks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _gaussian_quadrature(start, stop, kinks, panel_width=self._panel_width)

    def _log_density_ratio(self, nodes: np.ndarray) -> np.ndarray:
        mu = 1 / self.noise_multiplier
        with np.errstate(divide="ignore"):
            stay = np.log1p(-self.sample_rate)
        ratio: np.ndarray = np.logaddexp(stay, math.log(self.sample_rate) + mu * nodes - mu**2 / 2)
        return ratio

    def _where_density_ratio_is(self, log_x: np.ndarray) -> np.ndarray:
        """The point at which ``log(f'/f)`` takes each value; not finite where it never does."""
        mu = 1 / self.noise_multiplier
        with np.errstate(divide="ignore", invalid="ignore"):
            where: np.ndarray = np.log1p(np.expm1(log_x) / self.sample_rate) / mu + mu / 2
        return where


def _log_crossing(order: float, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """``log y`` where phi(low y) = phi(high y); beyond it the larger factor is the worse one."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        slope = np.log(order * (high / low - 1)) - np.log(np.expm1(order * np.log(high / low)))
        crossing: np.ndarray = slope / (order - 1) - np.log(low)
    return crossing


def _gaussian_quadrature(
    start: float, stop: float, kinks: np.ndarray, *, panel_width: float
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and log weights of the standard normal law on ``[start, stop]``, by panels of Gauss and Legendre.

    Each row belongs to one kink and has a panel end exactly there, so that the integrand is smooth in every panel.
    """
    panels = math.ceil((stop - start) / panel_width) + 1
    half = panel_width / 2
    centres = start - half + panel_width * np.arange(panels)
    shift = np.mod(np.where(np.isfinite(kinks), kinks, start) - start, panel_width)
    nodes = (centres[:, None] + half * _NODES).ravel() + shift[:, None]
    weights = np.tile(np.log(half * _WEIGHTS), panels)
    return nodes, weights - nodes**2 / 2 - math.log(2 * math.pi) / 2


def _log_mean_of_largest(
    order: float, log_value: np.ndarray, low: np.ndarray, high: np.ndarray, log_weights: np.ndarray
) -> np.ndarray:
    """``log E[max(phi(low y), phi(high y))]`` for each pair (low, high); phi is convex, so the ends are the worst."""
    at_low = _log_centred_power(order, log_value + np.log(low)[:, None])
    at_high = _log_centred_power(order, log_value + np.log(high)[:, None])
    mean: np.ndarray = scipy.special.logsumexp(np.maximum(at_low, at_high) + log_weights, axis=1)
    return mean


def _log_centred_power(order: float, log_y: np.ndarray) -> np.ndarray:
    """``log phi(y)`` with ``phi(y) = y^a - 1 - a (y - 1) >= 0``, without overflow."""
    exponent = order * log_y
    # Far out, phi(y) <= y^a is exact to rounding; the clip keeps the branch that is not taken finite.
    near = np.minimum(exponent, 40.0)
    value = np.expm1(near) - order * np.expm1(np.minimum(log_y, 40.0 / order))
    with np.errstate(divide="ignore"):
        inner = np.log(np.maximum(value, 0.0))
    return np.where(exponent > 40.0, exponent, inner)
