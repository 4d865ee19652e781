"""Opacus's schedulers of noise and clipping, which change an optimizer while it trains.

Here a schedule is part of what a run promises, so that what it costs is known before it begins.
"""

from sluice.compat.opacus.refusals import Refused

_NOISE = (
    "noise that changes while training could follow what was released, which its accounting does not cover. Fix it in advance: "
    "make_private(noise_schedule=Schedule.exponential(factor=0.99, every=len(data_loader), times=epochs)), or "
    "Schedule(factors=(1.0, 0.9, 0.8), every=len(data_loader)), from sluice."
)
_CLIP = _NOISE.replace("noise that changes", "a bound that changes").replace("noise_schedule", "clip_schedule")


class _NoiseScheduler(Refused):
    instead = _NOISE


class ExponentialNoise(_NoiseScheduler): ...


class LambdaNoise(_NoiseScheduler): ...


class StepNoise(_NoiseScheduler): ...


class _GradClipScheduler(Refused):
    instead = _CLIP


class ExponentialGradClip(_GradClipScheduler): ...


class LambdaGradClip(_GradClipScheduler): ...


class StepGradClip(_GradClipScheduler): ...


__all__ = ["ExponentialGradClip", "ExponentialNoise", "LambdaGradClip", "LambdaNoise", "StepGradClip", "StepNoise"]
