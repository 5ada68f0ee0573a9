import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs
from tiny_runs import Tiny, TinyConfig, bits_of

from podracer import envs
from podracer.agent import ActorOutput
from podracer.envs import Countdown, Step
from podracer.envs.probe import ProbeMemory
from podracer.evaluate import Evaluation, Evaluator, evaluate, record
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec


def key():
    """The same one, without JAX's complaint that it was used before."""
    return jax.random.key(7)


def tiny(environment):
    """An agent that acts in an environment, and its parameters."""
    agent = TinyConfig().make(environment.spec, 1)
    return agent, agent.actor_params(agent.init(jax.random.key(0)))


@dataclasses.dataclass(frozen=True)
class OfAnyLength:
    """Episodes of 1 to 10 steps, drawn at the reset and shown; reward 1 per step, so that the return is the length."""

    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((1,), "float32"), DiscreteSpec(2))

    def reset(self, key):
        length = jax.random.randint(key, (), 1, 11, jnp.int32)
        return (jnp.int32(0), length), length.astype(jnp.float32)[None]

    def step(self, state, action, key):
        steps, length = state[0] + 1, state[1]
        observation = length.astype(jnp.float32)[None]
        return (steps, length), Step(observation, jnp.float32(1), steps == length, jnp.bool_(False))


@dataclasses.dataclass(frozen=True)
class Remembers(Tiny):
    """Solves `ProbeMemory`: its state is the cue that it saw on the first observation."""

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        cue = (timestep.observation[:, 0] > 0).astype(jnp.int32)
        cue = jnp.where(timestep.first(), cue, actor_state)
        return ActorOutput(cue, cue)


@pytest.mark.parametrize(("length", "ends"), [(1, "termination"), (129, "truncation"), (1000, "both")])
def test_returns_and_lengths_are_exact(length, ends):
    """1000 steps of reward 1 return 1000, however many chunks of steps the host looks at."""
    environment = Countdown(length, ends)
    agent, params = tiny(environment)
    result = evaluate(agent, environment, params, key(), 3)
    np.testing.assert_array_equal(result.returns, [length] * 3)
    np.testing.assert_array_equal(result.lengths, [length] * 3)
    assert result.unfinished == 0


def test_every_environment_plays_exactly_one_episode():
    environment = OfAnyLength()
    agent, params = tiny(environment)
    result = evaluate(agent, environment, params, key(), 200)
    assert len(result.returns) == len(result.lengths) == 200
    np.testing.assert_array_equal(result.returns, result.lengths)
    # Those that count their first episode alone are not biased to short ones: 5.5 on average.
    assert set(result.lengths) == set(range(1, 11))
    assert abs(result.lengths.mean() - 5.5) < 4 * math.sqrt(8.25 / 200)


def test_unfinished_episodes_are_reported_and_left_out():
    environment = OfAnyLength()
    agent, params = tiny(environment)
    whole = evaluate(agent, environment, params, key(), 200)
    cut = evaluate(agent, environment, params, key(), 200, max_steps=6)
    assert cut.unfinished == (whole.lengths > 6).sum() > 0
    np.testing.assert_array_equal(cut.returns, whole.returns[whole.lengths <= 6])
    assert len(cut.returns) == len(cut.lengths) == cut.summary()["episodes"] == 200 - cut.unfinished


def test_no_finished_episode_is_a_result_too():
    environment = Countdown(9)
    agent, params = tiny(environment)
    result = evaluate(agent, environment, params, key(), 2, max_steps=8)
    assert (len(result.returns), result.unfinished, result.summary()["episodes"]) == (0, 2, 0)
    assert math.isnan(result.summary()["mean"])
    assert "over 0 greedy episodes" in str(result)


def test_the_agents_state_is_carried_and_reset_per_environment():
    environment = ProbeMemory(length=5)
    agent = Remembers(environment.spec, TinyConfig(), 1)
    result = evaluate(agent, environment, {}, key(), 64)
    # One cue forgotten, or taken from a neighbour, costs 2.
    np.testing.assert_array_equal(result.returns, np.ones(64))
    frames, episode_return = record(agent, environment, {}, key())
    assert (len(frames), episode_return) == (7, 1)


def test_evaluating_is_a_function_of_the_key_and_changes_nothing():
    environment = envs.make("podracer:Catch")
    agent, params = tiny(environment)
    before = bits_of(params)
    evaluator = Evaluator(agent, environment, 32)
    first = evaluator(params, key())
    other = evaluator(params, jax.random.key(8))
    assert (first.returns != other.returns).any()
    np.testing.assert_array_equal(first.returns, evaluator(params, key()).returns)
    np.testing.assert_array_equal(first.returns, evaluate(agent, environment, params, key(), 32).returns)
    assert bits_of(params) == before


def test_an_evaluator_is_traced_for_its_first_call_only(monkeypatch):
    traced = []
    act = Tiny.act
    monkeypatch.setattr(Tiny, "act", lambda *args, **kwargs: traced.append(1) or act(*args, **kwargs))
    environment = Countdown(2)
    agent, params = tiny(environment)
    evaluator = Evaluator(agent, environment, 4)
    evaluator(params, key())
    before = len(traced)
    assert before > 0
    evaluator(jax.tree.map(lambda x: x + 1, params), jax.random.key(8))
    assert len(traced) == before


def test_the_agent_is_asked_not_to_explore():
    environment = envs.make("podracer:Catch", rows=3, columns=3)
    agent = TinyConfig().make(environment.spec, 1)
    # Preferences so weak that exploring would try all three.
    for best in range(3):
        params = {"weights": jnp.zeros(3).at[best].set(0.01)}
        result = evaluate(agent, environment, params, key(), 64)
        # From the middle the paddle comes to one column, and the ball falls into any of three.
        frames, _ = record(agent, environment, params, key())
        green = [np.argwhere((frame == (80, 200, 120)).all(-1))[:, 1].mean() // 16 for frame in frames[:2]]
        assert green == [1, best]
        assert -0.7 < result.returns.mean() < 0


def test_bad_numbers():
    environment = Countdown()
    agent, params = tiny(environment)
    with pytest.raises(ValueError, match="the number of episodes is 0; it must be at least 1"):
        evaluate(agent, environment, params, key(), 0)
    with pytest.raises(ValueError, match="max_steps is 0; an episode has at least 1 step"):
        evaluate(agent, environment, params, key(), 1, max_steps=0)
    with pytest.raises(ValueError, match="max_steps is -1; an episode has at least 1 step"):
        record(agent, environment, params, key(), max_steps=-1)


@pytest.mark.parametrize(
    ("length", "max_steps", "frames"), [(3, 1000, 4), (300, 1000, 301), (300, 5, 6), (300, 128, 129)]
)
def test_a_recording_has_a_frame_for_every_timestep(length, max_steps, frames):
    environment = Countdown(length)
    agent, params = tiny(environment)
    shown, episode_return = record(agent, environment, params, key(), max_steps=max_steps)
    assert len(shown) == frames
    assert episode_return == frames - 1
    assert {frame.dtype for frame in shown} == {np.dtype(np.uint8)}


def test_a_summary_by_hand():
    summary = Evaluation(np.array([1.0, 2.0, 6.0], np.float32), np.array([1, 1, 1])).summary()
    expected = {"mean": 3, "std": math.sqrt(14 / 3), "min": 1, "max": 6, "episodes": 3, "greedy": True}
    assert summary == pytest.approx(expected)


@pytest.mark.slow
def test_normalisation_is_frozen(tmp_path):
    """Observation statistics are those of training, come from the checkpoint, and stay as they were."""
    from podracer.agents import PPOConfig
    from podracer.loading import load_policy
    from podracer.networks import NetworkConfig

    config = PPOConfig(normalize_observations=True, scale_rewards=True, network=NetworkConfig(hidden_sizes=(8,)))
    result = tiny_runs.experiment(agent=config).run(tmp_path / "run", quiet=True)
    learner = bits_of(result.state.learner.observations)
    assert result.state.learner.observations.count > 1
    loaded = load_policy(result.run_dir)
    assert bits_of(loaded.params.observations) == learner
    key = loaded.key()
    again = evaluate(loaded.agent, loaded.environment, loaded.params, key, 4)
    # In the environment's own rewards, though learning saw them scaled.
    assert set(again.returns) <= {-1.0, 1.0}
    np.testing.assert_array_equal(again.returns, result.evaluation.returns)
    assert bits_of(loaded.params.observations) == learner
