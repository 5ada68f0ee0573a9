"""Acting for a number of steps, against a loop in Python and against counts by hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agent import ActorOutput
from podracer.agents import Random
from podracer.agents.testing.environments import Patchwork
from podracer.envs import Autoreset, Countdown
from podracer.envs.recording import difference, to_numpy
from podracer.rollout import EpisodeStatistics, start_rollout, unroll
from podracer.streams import Stream, fold_in_each, stream_key
from podracer.types import DiscreteSpec, StepType, TimeStep, valid_mask


@dataclasses.dataclass(frozen=True)
class Counter:
    """Its state counts the steps of the episode; its action depends on that, on the parameters, and on a draw."""

    def init_actor(self, batch_size: int) -> jax.Array:
        return jnp.full(batch_size, 7, jnp.int32)

    def act(
        self, params: Any, timestep: TimeStep, actor_state: jax.Array, key: jax.Array, *, evaluate: bool = False
    ) -> ActorOutput:
        count = jnp.where(timestep.first(), 0, actor_state + 1)
        draw = jax.random.randint(key, actor_state.shape, 0, 3, jnp.int32)
        action = (count + params + (0 if evaluate else draw)) % 3
        return ActorOutput(action, count, extras={"draw": draw, "count": count})


STREAM = Autoreset(Patchwork(DiscreteSpec(3)))


def act_key(seed: int) -> jax.Array:
    return jax.random.key(seed)


def env_keys(seed: int, batch_size: int = 3) -> jax.Array:
    return jax.random.split(jax.random.key(100 + seed), batch_size)


UNROLL = jax.jit(lambda state, act, env: unroll(Counter(), STREAM, jnp.int32(2), state, act, env, 6))


def test_rows_are_those_of_a_loop_in_python() -> None:
    start = start_rollout(Counter(), STREAM, env_keys(0))
    final, trajectory = UNROLL(start, act_key(1), env_keys(1))

    step, act = jax.jit(STREAM.step), jax.jit(Counter().act)
    environment, timestep, actor, rows = start.environment, start.timestep, start.actor, []
    for t in range(6):
        output = act(jnp.int32(2), timestep, actor, jax.random.fold_in(act_key(1), t))
        rows.append((timestep, output.action, output.extras))
        keys = fold_in_each(env_keys(1), jnp.int32(t))
        environment, timestep = step(environment, output.action, keys)
        actor = output.actor_state
    timesteps = jax.tree.map(lambda *x: np.stack(x), *(row[0] for row in rows), timestep)
    action, extras = (jax.tree.map(lambda *x: np.stack(x), *(row[i] for row in rows)) for i in (1, 2))

    assert difference(trajectory.timestep, timesteps, 0) is None
    assert difference((trajectory.action, trajectory.extras), (action, extras), 0) is None
    assert difference((final.environment, final.timestep, final.actor), (environment, timestep, actor), 0) is None
    assert trajectory.actor_state.tolist() == [7, 7, 7]  # The state before row 0, not after it.
    assert (np.asarray(timesteps.step_type) == StepType.LAST).any()


def test_trajectories_join() -> None:
    state, first = UNROLL(start_rollout(Counter(), STREAM, env_keys(0)), act_key(1), env_keys(1))
    _, second = UNROLL(state, act_key(2), env_keys(2))
    found = difference(jax.tree.map(lambda x: x[-1], first.timestep), jax.tree.map(lambda x: x[0], second.timestep), 0)
    assert found is None
    np.testing.assert_array_equal(second.actor_state, first.extras["count"][-1])


@pytest.mark.parametrize(("length", "steps", "episodes"), [(1, 6, 6), (3, 9, 3), (5, 10, 2), (13, 12, 0)])
@pytest.mark.parametrize("ends", ["termination", "truncation"])
def test_counts_of_steps_and_episodes(length: int, steps: int, episodes: int, ends: str) -> None:
    # In 12 rows, every (length + 1)th goes from LAST to FIRST and is no step of any environment.
    agent, stream = Random(Countdown(length).spec), Autoreset(Countdown(length, ends))
    start = start_rollout(agent, stream, env_keys(0, 2))
    final, trajectory = jax.jit(lambda s, a, e: unroll(agent, stream, (), s, a, e, 12))(
        start, act_key(1), env_keys(1, 2)
    )
    assert valid_mask(trajectory).sum(0).tolist() == [steps, steps]
    statistics = final.episodes
    assert statistics.count.tolist() == [episodes, episodes]
    assert statistics.return_sum.tolist() == [episodes * length] * 2
    assert statistics.length_sum.tolist() == [episodes * length] * 2
    running = steps - episodes * length
    assert statistics.running_length.tolist() == [running if running or 12 % (length + 1) == 0 else length] * 2


def timestep(step_type: StepType, reward: float) -> TimeStep:
    return TimeStep(jnp.int8(step_type)[None], jnp.float32(reward)[None], jnp.ones(1, jnp.float32), ())


def test_statistics_go_on_over_windows_and_start_anew_with_an_episode() -> None:
    statistics = EpisodeStatistics.zero(1)
    for step_type, reward in ((StepType.MID, 2.0), (StepType.MID, 3.0)):
        statistics = statistics.add(timestep(step_type, reward))
    statistics = statistics.forget_finished()
    statistics = statistics.add(timestep(StepType.LAST, 4.0))
    assert (statistics.count[0], statistics.return_sum[0], statistics.length_sum[0]) == (1, 9.0, 3)
    statistics = statistics.add(timestep(StepType.FIRST, 0.0)).add(timestep(StepType.LAST, 1.0))
    assert (statistics.count[0], statistics.return_sum[0], statistics.length_sum[0]) == (2, 10.0, 4)
    forgotten = statistics.forget_finished()
    assert (forgotten.count[0], forgotten.return_sum[0], forgotten.length_sum[0]) == (0, 0.0, 0)


def test_keys_are_counted_and_differ_everywhere() -> None:
    with jax.debug_key_reuse(False):
        root = jax.random.key(0)
        by_hand = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(root, 3), 5), 8)
        assert jnp.array_equal(
            jax.random.key_data(stream_key(root, Stream.ACT, 5, jnp.int32(8))), jax.random.key_data(by_hand)
        )
        keys = [stream_key(root, stream, *counters) for stream in Stream for counters in ((), (0,), (1,), (0, 1))]
    distinct = {tuple(to_numpy(key).tolist()) for key in keys}
    assert len(distinct) == len(keys)
