"""Gymnasium's spaces as specs, and its observations and actions to and from what agents see."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import PyTree

from podracer.envs.actions import split_components
from podracer.envs.gymnasium_columns import LAST, Leaf, Rows
from podracer.envs.host import check_actions
from podracer.envs.packages import import_package
from podracer.types import (
    ActionSpec,
    ArraySpec,
    BoundedSpec,
    DiscreteSpec,
    EnvironmentSpec,
    MaskedObservation,
    MultiDiscreteSpec,
    TimeStep,
)

# JAX's integers and reals have 32 bits.
_NARROWER = {"float64": "float32", "int64": "int32", "uint64": "uint32"}
_LARGEST = float(np.finfo(np.float32).max)
_MASK = "action_mask"


class Spaces:
    """What an observation space and an action space are to an agent.

    Observations are pytrees as the spaces nest: a `Dict` is a dictionary, a `Tuple` a tuple. The leaves are `Box`,
    `MultiBinary`, `MultiDiscrete`, and `Discrete` as one int32. Numbers of 64 bits become numbers of 32;
    an integer that does not fit is an error.
    Images keep their dtype and their axes, also where the channels come first.

    Actions are `Discrete`, `MultiDiscrete`, `MultiBinary` (two actions per component) or a bounded `Box` of reals.
    Where they have several axes, or none, the agent's are vectors.

    A `Dict` of observations with a key "action_mask", of as many zeros and ones as the action space has actions,
    becomes a `MaskedObservation` of the other keys. A mask that leaves no action on LAST, where the action is ignored,
    becomes one that leaves all.

    Args:
        name: What errors call the environment.
        observation: Of one environment.
        action: Of one environment.

    Raises:
        ValueError: A space is of another kind.
    """

    def __init__(self, name: str, observation: Any, action: Any) -> None:
        self._name, self._space, self._action_space = name, observation, action
        leaves: dict[str, ArraySpec] = {}
        self._tree = _specs(name, observation, "", leaves)
        self.leaves = [Leaf(path, spec.shape, spec.dtype) for path, spec in leaves.items()]
        self._action = _action_spec(name, action)
        self._has_mask = _is_mask(self._tree, self._action)

    @functools.cached_property
    def spec(self) -> EnvironmentSpec:
        if not self._has_mask:
            return EnvironmentSpec(self._tree, self._action)
        rest = {key: spec for key, spec in self._tree.items() if key != _MASK}
        mask: Any = ArraySpec(self._tree[_MASK].shape, "bool")
        return EnvironmentSpec(MaskedObservation(rest, mask), self._action)

    def timestep(self, rows: Rows) -> TimeStep:
        """The rows with their observation as a pytree."""
        observation: Any = _build(self._space, iter(rows.leaves))
        if self._has_mask:
            mask = observation.pop(_MASK) != 0
            for component in split_components(self.spec, mask):  # Views of the mask.
                component |= ((rows.step_type == LAST) & ~component.any(-1))[:, None]
            observation = MaskedObservation(observation, mask)
        numbers: Any = rows
        return TimeStep(numbers.step_type, numbers.reward, numbers.discount, observation)

    def actions(self, action: PyTree, num_envs: int) -> np.ndarray:
        """Actions `[B, ...]` of an agent as a batch in the space's own shape and dtype, in an array of their own.

        Raises:
            ValueError: There is not one action per environment, or they are no actions of the spec.
        """
        array, space, spec = np.asarray(action), self._action_space, self._action
        check_actions(array, num_envs)
        shape = () if isinstance(spec, DiscreteSpec) else (int(np.prod(space.shape)),)
        real = isinstance(spec, BoundedSpec)
        if array.shape != (num_envs, *shape) or array.dtype.kind not in ("iuf" if real else "iu"):
            raise ValueError(
                f"the actions for {self._name} are {array.dtype}{list(array.shape)}; {spec} needs "
                f"{'reals' if real else 'integers'} of shape {[num_envs, *shape]}"
            )
        batch = array.astype(space.dtype).reshape((num_envs, *space.shape))
        if real:  # A bound may round to a float32 beyond it.
            return np.clip(batch, space.low, space.high)
        # Where Gymnasium's own count of a component begins; that of `Discrete` is in the spec.
        return batch + np.asarray(space.start, space.dtype) if hasattr(space, "nvec") else batch


def _specs(name: str, space: Any, path: str, leaves: dict[str, ArraySpec]) -> PyTree:
    """The specs of a space, which are also added to `leaves` by name."""
    spaces = import_package("gymnasium", "gymnasium.spaces")
    if isinstance(space, spaces.Dict):
        return {key: _specs(name, inner, f"{path}[{key!r}]", leaves) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_specs(name, inner, f"{path}[{i}]", leaves) for i, inner in enumerate(space.spaces))
    where = path or "(root)"
    match space:
        case spaces.Discrete():
            first, last = int(space.start), int(space.start + space.n - 1)
            leaf = ArraySpec((), "int32", first, last)
        case spaces.MultiDiscrete():
            last = int((space.start + space.nvec - 1).max())
            leaf = ArraySpec(tuple(space.shape), "int32", int(space.start.min()), last)
        case spaces.MultiBinary():
            leaf = ArraySpec(tuple(space.shape), "int8", 0, 1)
        case spaces.Box() if space.dtype.kind in "biuf":
            dtype = _NARROWER.get(str(space.dtype), str(space.dtype))
            leaf = ArraySpec(tuple(space.shape), dtype, *_bounds(space, dtype))
        case _:
            raise ValueError(
                f"{name} has the observation {type(space).__name__} at {where}; its leaves may be Box, Discrete, "
                "MultiDiscrete or MultiBinary, in Dict and Tuple"
            )
    if _is_too_narrow(leaf):
        raise ValueError(f"{name} has the observation {space} at {where}, with integers beyond those of {leaf.dtype}")
    leaves[where] = leaf
    return leaf


def _is_too_narrow(leaf: ArraySpec) -> bool:
    """Whether integers within the bounds do not fit."""
    if np.dtype(leaf.dtype).kind not in "iu" or leaf.minimum is None or leaf.maximum is None:
        return False
    limits = np.iinfo(leaf.dtype)
    return leaf.minimum < limits.min or leaf.maximum > limits.max


def _bounds(space: Any, dtype: str) -> tuple[float | None, float | None]:
    """The least and the greatest value of any element, rounded as the observations are, None where there is none."""
    if not space.low.size:
        return None, None
    pair: Any = (space.low.min(), space.high.max())
    if np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):
            pair = tuple(float(np.asarray(bound, dtype)) for bound in pair)
        known = [abs(bound) < _LARGEST for bound in pair]
    else:  # Integers without bounds have those of their type in Gymnasium.
        limits = np.iinfo(space.dtype) if space.dtype.kind in "iu" else None
        pair = tuple(int(bound) for bound in pair)
        wide = space.dtype.itemsize > 2
        known = [not (wide and limits and bound in (limits.min, limits.max)) for bound in pair]
    low, high = (bound if is_known else None for bound, is_known in zip(pair, known, strict=True))
    return low, high


def _action_spec(name: str, space: Any) -> ActionSpec:
    spaces = import_package("gymnasium", "gymnasium.spaces")
    match space:
        case spaces.Discrete():
            return DiscreteSpec(int(space.n), int(space.start))
        case spaces.MultiDiscrete():
            return MultiDiscreteSpec(tuple(int(n) for n in space.nvec.ravel()))
        case spaces.MultiBinary():
            return MultiDiscreteSpec((2,) * int(np.prod(space.shape)))
        case spaces.Box() if space.dtype.kind == "f":
            low, high = (tuple(float(x) for x in bound.ravel()) for bound in (space.low, space.high))
            try:
                return BoundedSpec(low, high)
            except ValueError as error:
                raise ValueError(f"the actions of {name} are {space}: {error}") from error
    raise ValueError(
        f"the actions of {name} are {space}; they may be Discrete, MultiDiscrete, MultiBinary or a bounded Box of reals"
    )


def _is_mask(tree: PyTree, action: ActionSpec) -> bool:
    mask = tree.get(_MASK) if isinstance(tree, dict) else None
    if not isinstance(mask, ArraySpec) or isinstance(action, BoundedSpec):
        return False
    binary = np.dtype(mask.dtype) == bool or (mask.minimum == 0 and mask.maximum == 1)
    return binary and mask.shape == (int(np.sum(action.num_actions)),)


def _build(space: Any, leaves: Iterator[np.ndarray]) -> PyTree:
    spaces = getattr(space, "spaces", None)
    if spaces is None:
        return next(leaves)
    if isinstance(spaces, dict):
        return {key: _build(inner, leaves) for key, inner in spaces.items()}
    return tuple(_build(inner, leaves) for inner in spaces)
