"""A network is two pure functions, whatever library wrote it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Network:
    """`init(key, observation) -> params` and `apply(params, observation) -> outputs`.

    Observations have any number of leading axes; outputs keep them.
    """

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[[Any, Any], Any]
