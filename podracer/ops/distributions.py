"""Policy distributions over the three kinds of action, as functions of a network's output.

What a distribution samples is what log-probabilities are taken of; `to_action` turns it into what the environment
receives. For tanh-squashed actions the sample is the value before the squashing, which keeps log-probabilities exact
and finite.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

from podracer.types import ActionSpec, BoundedSpec, DiscreteSpec, MultiDiscreteSpec


@runtime_checkable
class Distribution(Protocol):
    """What agents ask of a distribution with leading axes `*B`. A `*sample` is `*B` if discrete, else `*B K`."""

    def sample(self, key: jax.Array) -> Shaped[Array, "*sample"]:
        """One draw per row."""
        ...

    def mode(self) -> Shaped[Array, "*sample"]:
        """The sample that evaluation plays: the likeliest, of `TanhNormal` that of the normal before squashing."""
        ...

    def log_prob(self, sample: Shaped[Array, "*sample"]) -> Float[Array, "*B"]:
        """The log-probability of the action that `sample` stands for; a density where actions are real."""
        ...

    def entropy(self) -> Float[Array, "*B"]:
        """In nats, summed over components."""
        ...

    def to_action(self, sample: Shaped[Array, "*sample"]) -> Shaped[Array, "*sample"]:
        """What the environment receives, within the spec's start or bounds."""
        ...


@dataclasses.dataclass(frozen=True)
class Categorical(Distribution):
    """One of `A` actions. Illegal ones have probability exactly 0; a row with no legal action counts as all legal."""

    logits: Float[Array, "*B A"]
    spec: DiscreteSpec

    @classmethod
    def create(cls, logits: jax.Array, spec: DiscreteSpec, mask: Bool[Array, "*B A"] | None) -> "Categorical":
        return cls(_mask_logits(logits, mask), spec)

    def sample(self, key: jax.Array) -> Integer[Array, "*B"]:
        return jax.random.categorical(key, self.logits).astype(self.spec.dtype)

    def mode(self) -> Integer[Array, "*B"]:
        return jnp.argmax(self.logits, -1).astype(self.spec.dtype)

    def log_prob(self, sample: Integer[Array, "*B"]) -> Float[Array, "*B"]:
        log_probs = jax.nn.log_softmax(self.logits)
        # A sum over a one-hot differentiates into elementwise work, where an index would into a scatter.
        return (jax.nn.one_hot(sample, self.spec.num_actions, dtype=log_probs.dtype) * log_probs).sum(-1)

    def entropy(self) -> Float[Array, "*B"]:
        log_probs = jax.nn.log_softmax(self.logits)
        return -(jnp.exp(log_probs) * log_probs).sum(-1)

    def to_action(self, sample: Integer[Array, "*B"]) -> Integer[Array, "*B"]:
        return sample + jnp.asarray(self.spec.start, sample.dtype)


@dataclasses.dataclass(frozen=True)
class MultiCategorical(Distribution):
    """Independent categorical components; the logits of all of them side by side, `[*B, sum(num_actions)]`."""

    components: tuple[Categorical, ...]
    dtype: str

    @classmethod
    def create(cls, logits: jax.Array, spec: MultiDiscreteSpec, mask: jax.Array | None) -> "MultiCategorical":
        masks = [None] * len(spec.num_actions) if mask is None else spec.split(mask)
        components = [
            Categorical.create(part, DiscreteSpec(n, dtype=spec.dtype), legal)
            for n, part, legal in zip(spec.num_actions, spec.split(logits), masks, strict=True)
        ]
        return cls(tuple(components), spec.dtype)

    def sample(self, key: jax.Array) -> Integer[Array, "*B K"]:
        keys = jax.random.split(key, len(self.components))
        return jnp.stack([c.sample(k) for c, k in zip(self.components, keys, strict=True)], -1)

    def mode(self) -> Integer[Array, "*B K"]:
        return jnp.stack([c.mode() for c in self.components], -1)

    def log_prob(self, sample: Integer[Array, "*B K"]) -> Float[Array, "*B"]:
        return jnp.stack([c.log_prob(sample[..., i]) for i, c in enumerate(self.components)]).sum(0)

    def entropy(self) -> Float[Array, "*B"]:
        return jnp.stack([c.entropy() for c in self.components]).sum(0)

    def to_action(self, sample: Integer[Array, "*B K"]) -> Integer[Array, "*B K"]:
        return sample


@dataclasses.dataclass(frozen=True)
class TanhNormal(Distribution):
    """A diagonal normal squashed by tanh into the action's bounds (SAC, arXiv 1801.01290, appendix C).

    The entropy is that of the normal before squashing, which has a closed form; the squashed one has none. The log
    standard deviation is kept within [-10, 2].
    """

    loc: Float[Array, "*B K"]
    log_scale: Float[Array, "*B K"]
    spec: BoundedSpec

    @classmethod
    def create(cls, outputs: Float[Array, "*B P"], spec: BoundedSpec) -> "TanhNormal":
        loc, log_scale = jnp.split(outputs, 2, -1)
        return cls(loc, jnp.clip(log_scale, -10.0, 2.0), spec)

    def sample(self, key: jax.Array) -> Float[Array, "*B K"]:
        noise = jax.random.normal(key, self.loc.shape, jnp.float32)
        return self.loc + jnp.exp(self.log_scale) * noise

    def mode(self) -> Float[Array, "*B K"]:
        return self.loc

    def log_prob(self, sample: Float[Array, "*B K"]) -> Float[Array, "*B"]:
        standardised = (sample - self.loc) * jnp.exp(-self.log_scale)
        normal = -0.5 * jnp.square(standardised) - self.log_scale - 0.5 * math.log(2 * math.pi)
        # log(1 - tanh(x)^2) in a form that does not round to log(0) where tanh saturates.
        log_slope = 2 * (math.log(2) - sample - jax.nn.softplus(-2 * sample))
        low, high = self._bounds()
        log_slope = log_slope + _lead(jnp.log((high - low) / 2), log_slope.ndim)
        return (normal - log_slope).sum(-1)

    def entropy(self) -> Float[Array, "*B"]:
        return (self.log_scale + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def to_action(self, sample: Float[Array, "*B K"]) -> Float[Array, "*B K"]:
        low, high = (_lead(bound, sample.ndim) for bound in self._bounds())
        share = (jnp.tanh(sample) + 1) / 2
        # In this form both bounds are reached exactly. The clip is for float32 rounding between them.
        return jnp.clip(low * (1 - share) + high * share, low, high)

    def _bounds(self) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(self.spec.low, jnp.float32), jnp.asarray(self.spec.high, jnp.float32)


def num_parameters(spec: ActionSpec) -> int:
    """How many outputs a policy network needs for this action space."""
    match spec:
        case DiscreteSpec():
            return spec.num_actions
        case MultiDiscreteSpec():
            return sum(spec.num_actions)
        case BoundedSpec():
            return 2 * len(spec.low)


def distribution_for(spec: ActionSpec, outputs: Float[Array, "*B P"], mask: jax.Array | None = None) -> Distribution:
    """The distribution that a policy network's outputs stand for."""
    match spec:
        case DiscreteSpec():
            return Categorical.create(outputs, spec, mask)
        case MultiDiscreteSpec():
            return MultiCategorical.create(outputs, spec, mask)
        case BoundedSpec():
            return TanhNormal.create(outputs, spec)


def _mask_logits(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return logits
    # A large finite number instead of -inf: probabilities are exactly 0 all the same, and p log p stays 0 and not NaN.
    legal = mask | ~mask.any(-1, keepdims=True)
    return jnp.where(legal, logits, jnp.asarray(-1e9, logits.dtype))


def _lead(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
