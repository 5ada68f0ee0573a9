"""What every stream of timesteps must satisfy, whatever steps it: the part that both conformance suites share."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jaxtyping import Float

from podracer.envs.actions import split_components
from podracer.types import ArraySpec, EnvironmentSpec, StepType, leaf_name, split_mask


class StreamConformance:
    """Tests of a recording of random legal actions; the suites that inherit it make one.

    Attributes:
        num_steps: Length of the recording. Episodes must end within it, so give `make` a short time limit.
        ends: False for a task that never ends.
        ends_where_it_starts: Episodes end in a state that may be that of a reset.
        bounds_slack: How far observations may leave the bounds in the spec, for rounding.
    """

    num_steps: ClassVar[int] = 200
    ends: ClassVar[bool] = True
    ends_where_it_starts: ClassVar[bool] = False
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

    @staticmethod
    def _check_leaves(spec: Any) -> None:
        """Whether a spec is one, with bounds the right way round."""
        assert isinstance(spec, EnvironmentSpec), f"spec must be an EnvironmentSpec, got {type(spec).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec.observation):
            where = leaf_name(path)
            assert isinstance(leaf, ArraySpec), f"the observation spec at {where} must be an ArraySpec, got {leaf!r}"
            np.dtype(leaf.dtype)
            if leaf.minimum is not None and leaf.maximum is not None:
                assert leaf.minimum <= leaf.maximum, f"the bounds at {where} are the wrong way round: {leaf}"

    def _check_ends_differ_from_starts(
        self, vectors: Callable[[StepType], Float[np.ndarray, "rows N"]], message: str
    ) -> None:
        """Whether what is emitted on LAST is not what a reset gives, out of the rows of each type as numbers."""
        if self.ends_where_it_starts:
            pytest.skip("ends_where_it_starts = True")
        firsts, mids, lasts = map(vectors, StepType)
        if not (len(mids) and len(lasts)):
            pytest.skip("no episode of two steps or more ended")
        # What is the same after every reset and moves during the episode, a step counter for instance, gives it away.
        moves = (firsts == firsts[0]).all(0) & (mids != firsts[0]).any(0)
        if not moves.any():
            pytest.skip("nothing that is the same at every start moves during an episode")
        assert (lasts[:, moves] != firsts[0][moves]).any(), message
