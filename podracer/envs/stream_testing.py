"""What every stream of timesteps must satisfy, whatever steps it: the part that both conformance suites share."""

from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from podracer.envs.actions import split_components
from podracer.types import StepType, leaf_name, split_mask


class StreamConformance:
    """Tests of a recording of random legal actions; the suites that inherit it make one.

    Attributes:
        num_steps: Length of the recording. Episodes must end within it, so give `make` a short time limit.
        ends: False for a task that never ends.
        bounds_slack: How far observations may leave the bounds in the spec, for rounding.
    """

    num_steps: ClassVar[int] = 200
    ends: ClassVar[bool] = True
    bounds_slack: ClassVar[float] = 1e-5

    def _recorded(self) -> Any:
        """With `spec` and `timesteps [T + 1, B]`, the latter in NumPy."""
        raise NotImplementedError

    def test_observations_stay_within_the_bounds_of_the_spec(self) -> None:
        recording = self._recorded()
        specs = jax.tree_util.tree_leaves_with_path(recording.spec.observation)
        for (path, spec), leaf in zip(specs, jax.tree.leaves(recording.timesteps.observation), strict=True):
            low = -np.inf if spec.minimum is None else spec.minimum - self.bounds_slack
            high = np.inf if spec.maximum is None else spec.maximum + self.bounds_slack
            assert low <= leaf.min() <= leaf.max() <= high, (
                f"observations at {leaf_name(path)} reach from {leaf.min()} to {leaf.max()}, the spec says "
                f"{spec.minimum} to {spec.maximum}; correct the bounds, or leave them out"
            )

    def test_emissions_are_finite(self) -> None:
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._recorded().timesteps):
            assert np.isfinite(leaf).all(), f"{leaf_name(path)} is not finite in every row"

    def test_every_mask_leaves_a_legal_action(self) -> None:
        recording = self._recorded()
        mask = split_mask(recording.timesteps.observation)[1]
        if mask is None:
            pytest.skip("observations have no action mask")
        for component in split_components(recording.spec, mask):
            empty = np.argwhere(~np.asarray(component).any(-1))
            assert not len(empty), (
                f"the action mask in row (t, b) = {empty[0]} has no legal action; final observations need one too, "
                "since an action is drawn on them although it is ignored"
            )

    def test_an_episode_ends(self) -> None:
        if not self.ends:
            pytest.skip("ends = False")
        assert (self._recorded().timesteps.step_type == StepType.LAST).any(), (
            f"no episode ended within num_steps = {self.num_steps}; give make() a shorter time limit, raise num_steps, "
            "or declare ends = False"
        )

    def test_first_comes_from_reset_and_after_last_only(self) -> None:
        types = np.asarray(self._recorded().timesteps.step_type)
        assert np.isin(types, list(StepType)).all(), f"step types are 0, 1 and 2; got {np.unique(types)}"
        assert (types[0] == StepType.FIRST).all(), f"reset gives the step types {types[0]}, not FIRST"
        wrong = np.argwhere((types[:-1] == StepType.LAST) != (types[1:] == StepType.FIRST))
        assert not len(wrong), f"FIRST must come after LAST and only there; not so after row (t, b) = {wrong[0]}"

    def test_first_has_reward_0_and_discount_1(self) -> None:
        timesteps = self._recorded().timesteps
        first = timesteps.step_type == StepType.FIRST
        assert (timesteps.reward[first] == 0).all(), f"rewards on FIRST must be 0; got {timesteps.reward[first]}"
        assert (timesteps.discount[first] == 1).all(), f"discounts on FIRST must be 1; got {timesteps.discount[first]}"
