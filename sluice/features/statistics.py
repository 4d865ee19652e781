"""Means over a data set, released by the Gaussian mechanism: of each channel with its square, or of rows of norm 1."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.grids import power_of_two_below
from sluice.accounting import dpa
from sluice.randomness.noise import NoiseSource, noisy_sum

_RECORDS_AT_ONCE = 128
_ROWS_AT_ONCE = 8192

# Contributions are multiples of this fraction of the clip norm, so that float64 adds up to 2^27 of them exactly.
_GRID = 2.0**-24
_MOST_RECORDS = 2**27

# Room for the rounding of the scaling itself, so that a contribution never exceeds the clip norm.
_JUST_BELOW_ONE = 1.0 - 2.0**-40


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelStatistics:
    """What was released: one number for each channel in each vector, as float32."""

    mean: Tensor
    mean_square: Tensor

    @property
    def variance(self) -> Tensor:
        """Mean square less squared mean, and 0 where the noise made that negative."""
        return (self.mean_square - self.mean.square()).clamp(min=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class PrivateStatistics:
    """Released statistics and the event an accountant has to be told."""

    statistics: ChannelStatistics
    event: dpa.DpEvent


def private_channel_statistics(
    features: Tensor,
    *,
    mean_clip_norm: float,
    square_clip_norm: float,
    noise_multiplier: float,
    public_size: int,
    noise: NoiseSource,
) -> PrivateStatistics:
    """Release each channel's mean and mean square over the data set.

    Args:
        features: ``(samples, channels, height, width)``; may be mapped from a file, it is read in parts.
        mean_clip_norm: bound on the 2-norm of a record's vector of channel means. It must be public: chosen from
            other data or from the scale of the features, never measured on these.
        square_clip_norm: the same for a record's vector of channel mean squares.
        noise_multiplier: standard deviation of the noise over the clip norm, for both releases.
        public_size: what the sums are divided by; a public number near the number of records.
        noise: the source of the noise.

    Guarantee:
        The result is post-processing of two Gaussian mechanisms with the noise multiplier ``noise_multiplier`` under
        adding or removing one record, which is what ``event`` says.

        *Sensitivity.* Let v_i be the vector of channel means of record i, a function of record i alone, rounding
        included. Its contribution is c_i = trunc(v_i * min(1, C / |v_i|)), where C is ``mean_clip_norm`` (times
        1 - 2^-40, against rounding) and trunc moves every entry towards 0 to a multiple of a public step. Scaling makes
        the norm at most C and trunc shrinks every entry, so |c_i| <= C. The sum of the c_i is exact in float64
        (multiples of one step, below 2^53 steps), so adding or removing record i moves it by c_i exactly, at most C
        in norm. ``noisy_sum`` adds noise of C * ``noise_multiplier`` to it. The same holds for the mean squares with
        ``square_clip_norm``. Dividing by ``public_size``, a public number, is post-processing.

        | record or channel | contribution |
        |---|---|
        | NaN or infinite mean (or mean square) in any channel | 0 to that sum; nothing else changes |
        | all zeros | 0 |
        | mean vector longer than the clip norm | scaled down to it, direction kept |
        | data set without records | noise alone |
        | channel without variance | its variance is noise, and 0 where that is negative |
    """
    validate.positive(
        mean_clip_norm=mean_clip_norm, square_clip_norm=square_clip_norm, noise_multiplier=noise_multiplier
    )
    validate.positive_integer(public_size=public_size)
    if features.dim() != 4 or not features.is_floating_point():
        raise InputError(
            f"features ({features.dtype}, shape {tuple(features.shape)}) are not allowed: they must be floating-point "
            "numbers of shape (samples, channels, height, width)."
        )
    if len(features) > _MOST_RECORDS:
        raise InputError(f"features of {len(features)} records are not allowed: at most {_MOST_RECORDS} can be summed.")
    raw_sum = torch.zeros(features.shape[1], dtype=torch.float64)
    raw_square_sum = torch.zeros(features.shape[1], dtype=torch.float64)
    for part in features.split(_RECORDS_AT_ONCE):
        raw_means, raw_mean_squares = _spatial_means(part)
        raw_sum += _contributions(raw_means, mean_clip_norm).sum(dim=0)
        raw_square_sum += _contributions(raw_mean_squares, square_clip_norm).sum(dim=0)
    releases = [
        noisy_sum([total], noise_multiplier=noise_multiplier, sensitivity=clip_norm, noise=noise)[0] / public_size
        for total, clip_norm in ((raw_sum, mean_clip_norm), (raw_square_sum, square_clip_norm))
    ]
    mean, mean_square = (release.to(torch.float32) for release in releases)
    gaussian = dpa.GaussianDpEvent(noise_multiplier)
    return PrivateStatistics(
        statistics=ChannelStatistics(mean=mean, mean_square=mean_square),
        event=dpa.ComposedDpEvent([gaussian, gaussian]),
    )


def private_row_mean(rows: Tensor, *, noise_multiplier: float, public_size: int, noise: NoiseSource) -> Tensor:
    """Release the mean of rows of norm 1, as float32.

    Args:
        rows: ``(records, width)``; longer rows than 1 are scaled down to it.
        noise_multiplier: standard deviation of the noise of the sum.
        public_size: what the sum is divided by; a public number near the number of records.
        noise: the source of the noise.

    Guarantee:
        The result is post-processing of one Gaussian mechanism with the noise multiplier ``noise_multiplier`` under adding
        or removing one record. Contributions are made as in `private_channel_statistics`, with a clip norm of 1; a row
        with a NaN or an infinity contributes nothing.
    """
    validate.positive(noise_multiplier=noise_multiplier)
    validate.positive_integer(public_size=public_size)
    if rows.dim() != 2 or not rows.dtype.is_floating_point:
        raise InputError(f"rows ({rows.dtype}, shape {tuple(rows.shape)}) are not allowed: give (records, width).")
    if len(rows) > _MOST_RECORDS:
        raise InputError(f"rows of {len(rows)} records are not allowed: at most {_MOST_RECORDS} can be summed.")
    raw_sum = torch.zeros(rows.shape[1], dtype=torch.float64)
    for part in rows.split(_ROWS_AT_ONCE):
        raw_sum += _contributions(part.to(device="cpu", dtype=torch.float64), 1.0).sum(dim=0)
    (released,) = noisy_sum([raw_sum], noise_multiplier=noise_multiplier, sensitivity=1.0, noise=noise)
    return (released / public_size).to(torch.float32)


def _spatial_means(features: Tensor) -> tuple[Tensor, Tensor]:
    """Means and mean squares over the image, ``(samples, channels)`` each."""
    values = features.to(device="cpu", dtype=torch.float64).flatten(2).permute(2, 0, 1).contiguous()
    return _sum_in_order(values) / len(values), _sum_in_order(values.square()) / len(values)


def _sum_in_order(values: Tensor) -> Tensor:
    """A sum over the first dimension whose rounding does not depend on the others, as that of ``Tensor.sum`` may."""
    total: Tensor = functools.reduce(torch.add, values)
    return total


def _contributions(raw_vectors: Tensor, clip_norm: float) -> Tensor:
    """One row for each record: clipped, on the grid, and 0 where the record is not finite."""
    step = power_of_two_below(clip_norm * _GRID)
    is_finite = torch.isfinite(raw_vectors).all(dim=1, keepdim=True)
    finite = torch.where(is_finite, raw_vectors, 0.0)
    norms = _sum_in_order(finite.square().t()).sqrt()[:, None]
    factors = (clip_norm * _JUST_BELOW_ONE / norms.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    return (finite * factors / step).trunc() * step
