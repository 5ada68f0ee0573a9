"""What every agent must satisfy, as tests to inherit.

```
from podracer.agents.testing import AgentConformance

class TestMyAgent(AgentConformance):
    def make(self, spec, num_updates):
        return MyAgent(spec, num_updates, discount=self.discount)
```

pytest collects the inherited tests. They act and learn in a small environment whose episodes end in every way, compare
devices, run the agent under both architectures, and train it on environments of known value. What they compile is
shared within the class, so `make` has to return an equal agent every time. Each failure says what is wrong and what to
do about it. What a class declares (`podracer.agents.testing.subject` lists it) leaves tests out: they are skipped, and
say why.
"""

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree

from podracer.agents.testing.checks import relative_difference, row, values_of_what_followed
from podracer.agents.testing.environments import Patchwork, ProbeTruncation
from podracer.agents.testing.protocol import ProtocolConformance
from podracer.anakin import Anakin, AnakinConfig
from podracer.checkpoint import Checkpointer
from podracer.envs.autoreset import Autoreset
from podracer.envs.base import Environment
from podracer.envs.host import HostFactory, JaxHostEnvironment
from podracer.envs.probe import (
    ProbeActionMatters,
    ProbeConstantReward,
    ProbeContinuous,
    ProbeDelayedReward,
    ProbeMasked,
    ProbeMemory,
    ProbeMultiDiscrete,
    ProbeObservationReward,
)
from podracer.envs.recording import difference, to_numpy
from podracer.rollout import RolloutState, rollout_step, start_rollout
from podracer.sebulba import Sebulba, SebulbaConfig, SebulbaState
from podracer.types import leaf_name, valid_mask


class AgentConformance(ProtocolConformance):
    """Inherit, override `make`, and declare by the attributes of `AgentUnderTest` what is so on purpose."""

    # Learning.

    def test_update_learns_and_compiles_once(self) -> None:
        learner, trajectory = self._rollout()
        once = self._update(1, trajectory)
        found = difference(once, learner, 0)
        assert found is not None or not self.learns, "update returns the learner as it was: nothing was learnt"
        for path, leaf in jax.tree_util.tree_leaves_with_path(once):
            assert np.isfinite(to_numpy(leaf)).all(), f"{leaf_name(path)} is not finite after an update"
        self._update(1, trajectory, learner=once)
        traces = self._shared("traces 1", dict)
        assert traces["count"] == 1, f"update was traced {traces['count']} times for arguments of the same types"

    def test_update_is_equal_on_any_number_of_devices(self) -> None:
        if not self.learns:
            pytest.skip("learns = False")
        if not self.same_on_any_number_of_devices:
            pytest.skip("same_on_any_number_of_devices = False")
        trajectory = self._rollout()[1]
        one = self._update(1, trajectory)
        for devices in (2, 8):
            found = relative_difference(self._update(devices, trajectory), one, self.tolerance)
            assert found is None, (
                f"update on {devices} devices differs from one device with the same trajectory: {found}; average "
                "gradients and statistics with podracer.parallel.mean_over_replicas, and draw what replicas must "
                "agree on from podracer.parallel.shared_key"
            )

    def test_replicas_stay_equal(self) -> None:
        replicas = self._replicas(8, self._rollout()[1])
        for path, leaf in jax.tree_util.tree_leaves_with_path(replicas):
            array = to_numpy(leaf)
            assert (array == array[:1]).all(), (
                f"{leaf_name(path)} differs between replicas after an update; whatever changes the learner has to be "
                "averaged over the axis first"
            )

    def test_nothing_is_learnt_from_rows_on_which_an_environment_resets(self) -> None:
        trajectory = self._rollout()[1]
        last, first = trajectory.timestep.last()[:-1], trajectory.timestep.first()
        assert (last.any(), first[1:].any()) == (True, True), "no episode ended in the trajectory; raise rollout_length"
        clean = self._update(1, trajectory)
        for garbage in (np.nan, np.inf, -1e30, 3.0):
            found = difference(self._update(1, self._soiled(trajectory, garbage)), clean, 0)
            assert found is None, (
                f"with {garbage} for the rewards and discounts of FIRST rows, and for the actions and extras of LAST "
                f"rows, update learns something else: {found}; give rows outside podracer.valid_mask the weight 0, and "
                "replace what they hold by jnp.where, since 0 * NaN is NaN"
            )

    def test_the_rest_of_the_trajectory_is_learnt_from(self) -> None:
        if not self.learns:
            pytest.skip("learns = False")
        trajectory = self._rollout()[1]
        valid = np.concatenate([np.zeros((1, self.num_envs), bool), valid_mask(trajectory)])
        reward = jnp.where(valid, trajectory.timestep.reward - 3 * trajectory.timestep.observation[..., 3], 0)
        other = dataclasses.replace(trajectory, timestep=dataclasses.replace(trajectory.timestep, reward=reward))
        assert difference(self._update(1, other), self._update(1, trajectory), 0), (
            "update gives the same learner whatever the rewards are"
        )

    # Under Anakin.

    def test_runs_in_chunks_of_any_size_equal_one_run(self) -> None:
        whole = self._run(4)
        for chunks in ((2, 2), (1, 3)):
            found = difference(self._run(*chunks), whole, 0)
            assert found is None, f"{chunks} updates differ from 4 in one call: {found}; keep nothing outside the state"

    def test_one_seed_gives_one_result(self) -> None:
        found = difference(self._run(4), self._run(4), 0)
        assert found is None, f"two runs with one seed differ: {found}"

    def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(self, tmp_path: pathlib.Path) -> None:
        anakin, checkpointer = self._anakin(), Checkpointer(tmp_path, config={})
        state, _ = anakin.run(anakin.init(0), 2)
        checkpointer.save(2, state, {})
        restored = checkpointer.restore(anakin.shapes).state
        checkpointer.close()
        found = difference(self._run(2, state=restored), self._run(4), 0)
        assert found is None, (
            f"4 updates differ where the state was saved and read back after 2: {found}; keep what changes in arrays, "
            "and nothing of it in fields that a pytree takes for constants"
        )

    def test_the_running_loop_moves_nothing_and_compiles_nothing(self) -> None:
        anakin, state = self._anakin(), self._anakin().init(0)
        state, _ = anakin.run(state, 1)
        compiled: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: compiled.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("jax")
        logger.addHandler(handler)
        try:
            with jax.transfer_guard("disallow"), jax.log_compiles():
                for num_updates in (1, 2, 3):
                    state, window = anakin.run(state, num_updates)
                jax.block_until_ready(state)
        finally:
            logger.removeHandler(handler)
        again = [message for message in compiled if message.startswith("Compiling")]
        assert not again, f"a running loop compiles again: {again}"
        window.summarize()

    # Under Sebulba.

    def test_sebulba_without_lag_equals_anakin(self) -> None:
        environment, devices = Patchwork(self.actions[0]), jax.local_devices()
        anakin = Anakin(self._agent(), environment, AnakinConfig(self.num_envs, self.rollout_length), devices[:1])
        state, _ = anakin.run(anakin.init(0), 3)
        other = self._sebulba(devices[:1])
        found = relative_difference((other.learner, other.memory), (state.learner, state.memory), self.tolerance)
        assert found is None, f"3 updates under Sebulba differ from those under Anakin: {found}"
        if len(devices) < 4 or not self.same_on_any_number_of_devices:
            return
        learner = self._sebulba(devices, actor_devices=(3,), learner_devices=(1, 3)).learner
        first, second = (jax.tree.map(lambda x, i=i: x.addressable_shards[i].data, learner) for i in range(2))
        found = difference(second, first, 0)
        assert found is None, f"replicas differ: {found}; average what changes the learner over `axis`"
        found = relative_difference(learner, state.learner, self.tolerance)
        assert found is None, f"3 updates, acting on device 3 and learning on 1 and 3, differ: {found}"

    def _sebulba(self, devices: list[jax.Device], **places: Any) -> SebulbaState:
        """The state after 3 updates without lag, of one actor."""
        stream = Autoreset(Patchwork(self.actions[0]))
        config = SebulbaConfig(self.num_envs, self.rollout_length, threads_per_actor_device=1, max_lag=0, **places)
        factory = HostFactory("patchwork", lambda where: JaxHostEnvironment(stream, where))
        with Sebulba(self._agent(), factory, config, devices) as sebulba:
            return sebulba.run(sebulba.init(0), 3)[0]

    # Environments of known value, from the easiest.

    def test_solves_constant_reward(self) -> None:
        self._solve(ProbeConstantReward(), 1.0)

    def test_solves_observation_reward(self) -> None:
        self._solve(ProbeObservationReward(), None)

    def test_solves_delayed_reward(self) -> None:
        self._solve(ProbeDelayedReward(), 1.0)

    def test_solves_action_matters(self) -> None:
        self._solve(ProbeActionMatters(start=1), 1.0)

    def test_a_truncation_bootstraps_and_a_termination_does_not(self) -> None:
        self._solve(ProbeTruncation(), 1.0)

    def test_solves_continuous_actions(self) -> None:
        self._solve(ProbeContinuous(), 1.0)

    def test_solves_multi_discrete_actions(self) -> None:
        self._solve(ProbeMultiDiscrete(), 1.0)

    def test_solves_masked_actions(self) -> None:
        self._solve(ProbeMasked(), 1.0)

    def test_solves_memory(self) -> None:
        self._solve(ProbeMemory(length=2), 1.0)

    def _solve(self, probe: Environment, optimal: float | None) -> None:
        """Trains on the probe, then plays greedily: the mean return, and every value against what followed."""
        if not self.learns:
            pytest.skip("learns = False")
        declaration = "remembers" if isinstance(probe, ProbeMemory) else "feed_forward_probes"
        if not getattr(self, declaration):
            pytest.skip(f"{declaration} = False")
        kind = type(probe.spec.action)
        if not any(isinstance(action, kind) for action in self.actions):
            pytest.skip(f"actions has no {kind.__name__}")
        agent = self.make(probe.spec, self.probe_updates)
        anakin = Anakin(agent, probe, AnakinConfig(self.probe_envs, self.rollout_length), jax.devices()[:1])
        state, _ = anakin.run(anakin.init(0), self.probe_updates)

        @jax.jit
        def play(learner: PyTree, key: jax.Array) -> PyTree:
            reset_key, environment_key, act_key = jax.random.split(key, 3)
            stream, params = Autoreset(probe), agent.actor_params(learner)
            start = start_rollout(agent, stream, jax.random.split(reset_key, self.probe_envs))
            environment_keys = jax.random.split(environment_key, self.probe_envs)

            def step(rollout: RolloutState, t: jax.Array) -> tuple[RolloutState, PyTree]:
                following, output = rollout_step(
                    agent, stream, params, rollout, act_key, environment_keys, t, evaluate=True
                )
                return following, (rollout.timestep, following.timestep, output.extras)

            final, rows = jax.lax.scan(step, start, jnp.arange(9, dtype=jnp.int32))
            return final.episodes, rows

        episodes, (timestep, following, extras) = jax.device_get(play(state.learner, jax.random.key(1)))
        mean = episodes.return_sum.sum() / episodes.count.sum()
        name = type(probe).__name__
        if optimal is not None:
            assert mean >= optimal - self.return_tolerance, f"the mean return on {name} is {mean}, not {optimal}"
        values = self.value(extras)
        if values is None:
            return
        known = values_of_what_followed(timestep, following, np.asarray(values), self.discount)
        wrong = np.argwhere(np.abs(values - known) > self.value_tolerance)
        if len(wrong):
            t, b = wrong[0]
            raise AssertionError(
                f"the value on {name} of the observation {row(timestep.observation, (t, b))} is "
                f"{values[t, b]:.3f}, the true one {known[t, b]:.3f}"
            )
