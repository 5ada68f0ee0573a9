"""The mathematics that agents share, on time-major `[T, B]` arrays."""

from podracer.ops.advantages import generalized_advantages
from podracer.ops.distributions import (
    Categorical,
    Distribution,
    MultiCategorical,
    TanhNormal,
    distribution_for,
    num_parameters,
)
from podracer.ops.masking import zero_masked
from podracer.ops.minibatches import MinibatchGrid
from podracer.ops.normalization import Moments, merge_moments, normalize
from podracer.ops.rewards import clip_rewards
from podracer.ops.vtrace import VTrace, vtrace

__all__ = [
    "Categorical",
    "Distribution",
    "MinibatchGrid",
    "Moments",
    "MultiCategorical",
    "TanhNormal",
    "VTrace",
    "clip_rewards",
    "distribution_for",
    "generalized_advantages",
    "merge_moments",
    "normalize",
    "num_parameters",
    "vtrace",
    "zero_masked",
]
