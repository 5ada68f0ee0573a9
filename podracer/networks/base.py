"""A network is a few pure functions, whatever library wrote it.

Feed-forward networks take observations with any leading axes and keep them. Recurrent ones take one time step of `B`
environments, which acting runs; learning runs `unroll`, which scans it over time unless the network has a faster way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool, PyTree


@dataclasses.dataclass(frozen=True)
class Network:
    """`init(key, observation) -> params` and `apply(params, observation) -> outputs`."""

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class RecurrentNetwork:
    """A network with a memory of the episode.

    Attributes:
        init: `init(key, observation [B, ...]) -> params`.
        apply: `apply(params, observation [B, ...], first [B], state [B, ...]) -> (outputs, state)`. It starts from the
            initial state wherever `first` is true, whatever `state` holds there.
        initial_state: `initial_state(batch_size) -> state [B, ...]`.
        apply_over_time: `apply_over_time(params, observation [T, B, ...], first [T, B], state [B, ...])`, what scanning
            `apply` over time returns, computed faster: all rows at once outside of the part that has to go step by
            step. None scans `apply`.
    """

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    initial_state: Callable[[int], Any]
    apply_over_time: Callable[[Any, Any, Any, Any], tuple[Any, Any]] | None = None

    def unroll(
        self, params: PyTree, observation: PyTree, first: Bool[Array, "T B"], state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """`apply` over `[T, B, ...]`: outputs `[T, B, ...]` and the state after the last step."""
        if self.apply_over_time is not None:
            return self.apply_over_time(params, observation, first, state)

        def step(state: PyTree, inputs: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
            outputs, state = self.apply(params, *inputs, state)
            return state, outputs

        state, outputs = jax.lax.scan(step, state, (observation, first))
        return outputs, state
