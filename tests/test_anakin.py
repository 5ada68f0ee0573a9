"""Anakin: what it counts, which keys it hands out, and what it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import parallel
from podracer.agent import ActorOutput
from podracer.agents.testing.environments import Patchwork
from podracer.anakin import Anakin, AnakinConfig
from podracer.envs import Countdown, Step
from podracer.envs.recording import difference, to_numpy
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, TimeStep, Trajectory
from podracer.window import Window


@dataclasses.dataclass(frozen=True)
class Instrument:
    """An agent that writes down what it was given.

    Its memory keeps the keys of the last update and the first draw of acting; its loss is NaN at update `breaks_at`.
    """

    breaks_at: int = 0

    def init(self, key: jax.Array) -> Any:
        return {"updates": jnp.int32(0), "reward": jnp.float32(0), "draw": jax.random.uniform(key, (), jnp.float32)}

    def init_actor(self, batch_size: int) -> tuple[()]:
        return ()

    def init_memory(self, example: Trajectory) -> Any:
        zero = jnp.zeros(2, jnp.uint32)
        return {"update": zero, "act": zero, "last": jax.tree.map(lambda x: x[-1], example.timestep)}

    def actor_params(self, learner: Any) -> Any:
        return learner["updates"]

    def act(
        self, params: Any, timestep: TimeStep, actor_state: Any, key: jax.Array, *, evaluate: bool = False
    ) -> ActorOutput:
        batch_size = timestep.step_type.shape[0]
        data = jnp.broadcast_to(jax.random.key_data(key)[None], (batch_size, 2))
        return ActorOutput(jnp.zeros(batch_size, jnp.int32), actor_state, (data, jnp.broadcast_to(params, batch_size)))

    def update(
        self, learner: Any, memory: Any, trajectory: Trajectory, key: jax.Array, *, axis: str | None = None
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        updates = learner["updates"] + 1
        loss = jnp.where(updates == self.breaks_at, jnp.nan, trajectory.timestep.reward.mean())
        metrics = {
            "a_loss": loss,
            "update": updates.astype(jnp.float32),
            "replica": parallel.replica_index(axis).astype(jnp.float32),
            "acted_with": trajectory.extras[1].astype(jnp.float32).mean(),
        }
        reward = parallel.mean_over_replicas(trajectory.timestep.reward.sum(), axis)
        memory = {
            "update": jax.random.key_data(key),
            "act": trajectory.extras[0][0, 0],
            "last": jax.tree.map(lambda x: x[-1], trajectory.timestep),
        }
        return learner | {"updates": updates, "reward": reward}, memory, metrics


def anakin(environment: Any, num_envs: int = 8, length: int = 8, devices: Any = (0,), agent: Any = None) -> Anakin:
    chosen = [jax.devices()[i] for i in devices]
    return Anakin(agent or Instrument(), environment, AnakinConfig(num_envs, length), chosen)


@pytest.fixture(scope="module")
def counting() -> Anakin:
    """Countdown of length 3 on 4 devices, 5 rows an update."""
    return anakin(Countdown(3), length=5, devices=range(4))


def test_steps_and_episodes_are_counted_without_the_rows_of_resets(counting: Anakin) -> None:
    # Row t of each of the 8 environments is LAST where t % 4 == 3; 4 updates are rows 0 .. 19, 5 of which are LAST.
    state = counting.init(0)
    state, window = counting.run(state, 4)
    assert int(window.env_steps) == 8 * 15
    assert int(window.episodes) == 8 * 5
    summary = window.summarize()
    assert (summary["episodes"], summary["episode_return"], summary["episode_length"]) == (40, 3.0, 3.0)
    assert counting.steps_per_update == 40


def test_windows_add_up_to_one(counting: Anakin) -> None:
    # An episode that goes over the edge between two windows is counted, whole, where it ends.
    state, windows = counting.init(0), []
    for _ in range(4):
        state, window = counting.run(state, 1)
        windows.append(jax.device_get(window))
    assert [int(w.env_steps) for w in windows] == [8 * 4, 8 * 4, 8 * 4, 8 * 3]
    # Update u adds the timesteps 5 (u - 1) + 1 .. 5 u, of which 3, 7, 11, 15 and 19 are LAST.
    assert [int(w.episodes) for w in windows] == [8, 8, 16, 8]
    assert [float(w.return_sum) for w in windows] == [24, 24, 48, 24]
    assert [int(w.length_sum) for w in windows] == [24, 24, 48, 24]


def test_metrics_are_means_over_updates_and_replicas(counting: Anakin) -> None:
    state, window = counting.run(counting.init(0), 4)
    summary = window.summarize()
    assert summary["update"] == 2.5
    assert summary["replica"] == 1.5
    assert summary["acted_with"] == 1.5  # Update k acts with the parameters after k - 1 updates.
    assert (int(state.updates), int(state.learner["updates"])) == (4, 4)
    assert summary["episodes"] == 40


def test_a_window_without_an_episode_has_no_return() -> None:
    runner = anakin(Countdown(100), num_envs=1, length=2)
    _, window = runner.run(runner.init(0), 3)
    summary = window.summarize()
    assert summary["episodes"] == 0
    assert np.isnan(summary["episode_return"])
    assert np.isnan(summary["episode_length"])
    assert int(window.env_steps) == 6


def test_every_replica_has_its_own_keys_and_every_update_too(counting: Anakin) -> None:
    seen = []
    state = counting.init(0)
    for _ in range(2):
        state, _ = counting.run(state, 1)
        memory = jax.device_get(state.memory)
        assert memory["act"].shape == (4, 2)
        seen += [tuple(key) for name in ("act", "update") for key in memory[name].tolist()]
    assert len(set(seen)) == 16


def test_environments_have_streams_of_their_own_whatever_the_devices() -> None:
    streams, rewards = [], []
    for devices in (range(1), range(8), (3, 1)):
        runner = anakin(Patchwork(DiscreteSpec(2)), devices=devices)
        state, _ = runner.run(runner.init(0), 2)
        streams.append(jax.device_get(state.rollout.timestep))
        rewards.append(float(state.learner["reward"]) * len(devices))
    for other in streams[1:]:
        assert difference(other, streams[0], 0) is None
    assert rewards[1:] == pytest.approx(rewards[:1] * 2, rel=1e-5)
    noise = streams[0].observation[:, 3]
    assert len(set(noise.tolist())) == 8


def test_another_seed_gives_other_episodes_and_another_learner() -> None:
    runner = anakin(Patchwork(DiscreteSpec(2)), devices=range(2))
    noise, draws = [], []
    for seed in (1, 1, 2):
        state = runner.init(seed)
        draws.append(float(state.learner["draw"]))
        start = np.asarray(state.rollout.timestep.observation[:, 3])
        state, _ = runner.run(state, 1)
        noise.append(np.concatenate([start, state.rollout.timestep.observation[:, 3]]))
    np.testing.assert_array_equal(noise[0], noise[1])
    assert (noise[0] != noise[2]).all()
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("seed", [np.int64(5), np.uint8(5)])
def test_a_seed_may_be_an_integer_of_numpy_or_a_key(counting: Anakin, seed: Any) -> None:
    by_number, by_key = counting.init(seed), counting.init(jax.random.key(5))
    assert difference(jax.tree.map(to_numpy, by_number), jax.tree.map(to_numpy, by_key), 0) is None


@pytest.mark.parametrize("seed", [0.5, "1", None, jnp.uint32(1), jnp.zeros(2, jnp.uint32)])
def test_what_is_no_seed_is_refused(counting: Anakin, seed: Any) -> None:
    with pytest.raises(ValueError, match="it must be an integer or one typed key"):
        counting.init(seed)


def test_the_state_is_donated_and_the_callers_key_is_not(counting: Anakin) -> None:
    key = jax.random.key(5)
    state = counting.init(key)
    after, _ = counting.run(state, 1)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.learner, state.rollout.timestep)))
    with pytest.raises(ValueError, match="donated it; use the state that it returned"):
        counting.run(state, 1)
    assert not key.is_deleted()
    assert int(counting.run(after, 1)[0].updates) == 2


def test_nothing_is_kept_from_call_to_call(counting: Anakin) -> None:
    state, window = counting.run(counting.init(0), 1)
    alive = []
    for _ in range(20):
        state, window = counting.run(state, 1)
        window.summarize()
        alive.append(len(jax.live_arrays()))
    assert len(set(alive[1:])) == 1, alive


@pytest.mark.parametrize("number", [0, -1, 2**30 // 40 + 1, 2.5])
def test_numbers_of_updates_out_of_range_are_refused(counting: Anakin, number: int) -> None:
    with pytest.raises(ValueError, match=rf"num_updates is {number}; one call makes 1 to {2**30 // 40} updates"):
        counting.run(counting.init(0), number)


def test_an_update_that_int32_cannot_count_is_refused() -> None:
    with pytest.raises(ValueError, match="2147483648"):
        anakin(Countdown(3), num_envs=2**16, length=2**15)


@pytest.mark.parametrize(
    ("num_envs", "devices", "nearest"), [(6, 4, "4 or 8"), (2, 8, "8"), (13, 4, "12 or 16"), (1, 2, "2")]
)
def test_environments_that_do_not_divide_among_devices_are_refused(num_envs: int, devices: int, nearest: str) -> None:
    message = f"num_envs is {num_envs}, which is not a multiple of the {devices} devices; nearest valid: {nearest}$"
    with pytest.raises(ValueError, match=message):
        anakin(Countdown(3), num_envs=num_envs, devices=range(devices))


def test_no_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="devices is empty"):
        anakin(Countdown(3), devices=())


def test_lengths_are_summed_beyond_what_int32_holds(counting: Anakin) -> None:
    state = counting.init(0)
    episodes = state.rollout.episodes
    long = jax.device_put(episodes.running_length + 2**29, episodes.running_length.sharding)
    rollout = dataclasses.replace(state.rollout, episodes=dataclasses.replace(episodes, running_length=long))
    _, window = counting.run(dataclasses.replace(state, rollout=rollout), 1)
    # 8 environments finish an episode of 2^29 + 3 steps each.
    assert window.summarize()["episode_length"] == pytest.approx(2**29 + 3, rel=1e-6)


@dataclasses.dataclass(frozen=True)
class Naming(Instrument):
    """Has one more metric."""

    name: str = "loss"

    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
        learner, memory, metrics = super().update(*args, **kwargs)
        return learner, memory, metrics | {self.name: jnp.float32(0)}


@pytest.mark.parametrize(
    "name", ["updates", "env_steps", "episode_return", "reward", "policy_lag_1", "actor_time_step"]
)
def test_metrics_may_not_take_the_names_of_what_is_counted(name: str) -> None:
    with pytest.raises(ValueError, match=f"names a metric '{name}'; reserved are reward, "):
        anakin(Countdown(3), agent=Naming(name=name))


class Spoiling(Instrument):
    """Its acting parameters are NaN after the third update, of which its metrics say nothing."""

    def actor_params(self, learner: Any) -> Any:
        # With an epsilon that is a Python number, and the least that was seen so far.
        number = jnp.where(learner["updates"] == 3, jnp.nan, learner["updates"].astype(jnp.float32))
        return number, 0.1, jnp.float32(jnp.inf)

    def act(self, params: Any, *args: Any, **kwargs: Any) -> ActorOutput:
        return super().act(params[0], *args, **kwargs)


def test_parameters_that_the_last_update_spoiled_are_noticed_before_they_are_saved() -> None:
    runner = anakin(Countdown(3), num_envs=2, length=4, devices=range(2), agent=Spoiling())
    state, window = runner.run(runner.init(0), 2)
    window.summarize()
    _, window = runner.run(state, 1)
    with pytest.raises(FloatingPointError, match=r"acting_parameters was not finite at update 3$"):
        window.summarize()


@pytest.mark.parametrize("field", ["num_envs", "rollout_length"])
@pytest.mark.parametrize("value", [0, -4, 64.0, True, None])
def test_sizes_that_are_no_positive_integers_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be an integer of at least 1"):
        AnakinConfig(**{field: value})


@dataclasses.dataclass(frozen=True)
class Breaking:
    """Never ends; at step `at` its reward or its observation is `value`, once."""

    what: str
    at: int
    value: float

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((1,)), DiscreteSpec(2))

    def reset(self, key: jax.Array) -> Any:
        return jnp.int32(0), jnp.zeros(1, jnp.float32)

    def step(self, state: jax.Array, action: jax.Array, key: jax.Array) -> Any:
        state = state + 1
        broken = jnp.where(state == self.at, jnp.float32(self.value), 0)
        reward, observation = (broken if self.what == name else jnp.float32(0) for name in ("reward", "observation"))
        return state, Step(observation[None], reward, jnp.bool_(False), jnp.bool_(False))


# Step k is row k of the run, and update u has rows 4 (u - 1) .. 4 u: 9 is in the third update, and 8 ends the second.
@pytest.mark.parametrize(
    ("what", "at", "value", "update"),
    [("reward", 9, np.nan, 3), ("reward", 8, np.inf, 2), ("observation", 9, -np.inf, 3), ("a_loss", 0, 0.0, 2)],
)
def test_what_is_not_finite_is_named_with_its_update(what: str, at: int, value: float, update: int) -> None:
    # The loss is not finite either where the reward is not: the reward is named, which is the cause.
    agent = Instrument(breaks_at=2 if what == "a_loss" else 0)
    runner = anakin(Breaking(what, at, value), num_envs=2, length=4, devices=range(2), agent=agent)
    state, window = runner.run(runner.init(0), 1)
    window.summarize()
    state, window = runner.run(state, 4)
    with pytest.raises(FloatingPointError, match=f"{what} was not finite at update {update}$"):
        window.summarize()
    assert isinstance(window, Window)
    _, window = runner.run(state, 1)
    window.summarize()
