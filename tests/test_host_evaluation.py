"""Whole episodes in host environments."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sebulba.toys import Script, ScriptedEnvironment, Watcher

from podracer.agent import ActorOutput
from podracer.envs import HostFactory, make, make_host
from podracer.evaluate import HostEvaluator, evaluate, record

PARAMS = {"weights": jnp.zeros(2), "updates": jnp.int32(0)}


def test_every_environment_plays_exactly_one_episode_and_is_closed():
    script = Script(length=4)
    result = evaluate(Watcher(), script.factory(), PARAMS, jax.random.key(0), 5)
    assert result.returns.tolist() == [4.0] * 5
    assert result.lengths.tolist() == [4] * 5
    assert result.unfinished == 0
    assert not script.open


def test_episodes_past_the_limit_are_unfinished():
    result = evaluate(Watcher(), Script(length=4).factory(), PARAMS, jax.random.key(0), 3, max_steps=3)
    assert (len(result.returns), result.unfinished) == (0, 3)


@dataclasses.dataclass(frozen=True)
class Remembering:
    """Plays the memory probe without error, if its state is carried from step to step and restarts with episodes."""

    def init_actor(self, batch_size):
        return jnp.zeros(batch_size, jnp.float32)

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        cue = jnp.where(timestep.first(), timestep.observation[:, 0], actor_state)
        return ActorOutput((cue > 0).astype(jnp.int32), cue)


@pytest.mark.parametrize("num_episodes", [1, 4])
def test_recurrent_state_is_carried_on_the_host_as_it_is_in_jax(num_episodes):
    for environment in (make("podracer:ProbeMemory", length=3), make_host("podracer:ProbeMemory", length=3)):
        result = evaluate(Remembering(), environment, (), jax.random.key(num_episodes), num_episodes)
        assert result.returns.tolist() == [1.0] * num_episodes
        assert result.lengths.tolist() == [4] * num_episodes


class Forgetful(Remembering):
    """Plays it without error when it is evaluated, and always wrong when it explores."""

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        output = super().act(params, timestep, actor_state, key)
        return output if evaluate else dataclasses.replace(output, action=1 - output.action)


@pytest.mark.parametrize(("greedy", "expected"), [(True, 1.0), (False, -1.0)])
def test_an_agent_acts_greedily_or_as_it_explores(greedy, expected):
    for environment in (make("podracer:ProbeMemory", length=3), make_host("podracer:ProbeMemory", length=3)):
        result = evaluate(Forgetful(), environment, (), jax.random.key(0), 4, greedy=greedy)
        assert result.returns.tolist() == [expected] * 4
        assert result.summary()["greedy"] == greedy
        assert ("greedy" in str(result)) == greedy
        _, episode_return = record(Forgetful(), environment, (), jax.random.key(0), greedy=greedy)
        assert episode_return == expected


def test_the_mean_is_put_on_the_scale_of_a_human():
    class Scored(ScriptedEnvironment):
        reference_scores = (1.0, 11.0)

    factory = HostFactory("scored", lambda where: Scored(Script(length=6), where))
    result = HostEvaluator(Watcher(), factory, 2)(PARAMS, jax.random.key(0))
    assert result.summary()["human_normalized"] == pytest.approx(0.5)
    assert "50% of human" in str(result)
    assert "human_normalized" not in evaluate(Watcher(), Script().factory(), PARAMS, jax.random.key(0), 2).summary()


def test_an_episode_is_recorded_frame_by_frame():
    script = Script(length=4)
    frames, episode_return = record(Watcher(), script.factory(), PARAMS, jax.random.key(0))
    assert (len(frames), episode_return) == (5, 4.0)
    assert all(frame.dtype == np.uint8 and frame.shape[-1] == 3 for frame in frames)
    assert len(record(Watcher(), script.factory(), PARAMS, jax.random.key(0), max_steps=2)[0]) == 3


def test_an_environment_draws_itself_if_it_can():
    class Drawn(ScriptedEnvironment):
        def render(self):
            return np.full((2, 2, 3), self.steps, np.uint8)

    frames, _ = record(Watcher(), HostFactory("drawn", lambda where: Drawn(Script(), where)), PARAMS, jax.random.key(0))
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2, 3]


def test_environments_that_fail_while_they_are_evaluated_are_closed():
    script = Script(fail_at=2)
    with pytest.raises(RuntimeError, match=r"^environments scripted: step: RuntimeError: the emulator crashed$"):
        evaluate(Watcher(), script.factory(), PARAMS, jax.random.key(0), 3)
    assert not script.open


def test_which_of_the_environments_failed_in_an_evaluation_is_said_where_it_is_known():
    class Knowing(ScriptedEnvironment):
        def step(self, action):
            error = ValueError("no such level")
            error.add_note("in environment 2 of scripted")
            raise error

    with pytest.raises(RuntimeError, match=r"^environments knowing: step: ValueError: no such level, in environment 2"):
        evaluate(
            Watcher(), HostFactory("knowing", lambda where: Knowing(Script(), where)), PARAMS, jax.random.key(0), 3
        )


def test_environments_that_come_too_late_are_closed_and_their_thread_ends():
    script = Script(make_delay=0.5)
    factory = script.factory().with_timeouts(0.1, 0.1)
    factory.__dict__["_facts"] = script.factory()._facts  # Which are not what is waited for here.
    with pytest.raises(TimeoutError, match=r"making them has not come back for 0\.1 s"):
        evaluate(Watcher(), factory, PARAMS, jax.random.key(0), 3)
    end = time.monotonic() + 5
    while (not script.made or script.open or "environments scripted" in names_of_threads()) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(script.made) == 2  # One was asked for its spec.
    assert not script.open
    assert "environments scripted" not in names_of_threads()


def names_of_threads():
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("episodes", "max_steps"), [(0, 5), (3, 0)])
def test_numbers_below_1_are_refused(episodes, max_steps):
    with pytest.raises(ValueError, match=r"must be at least 1|has at least 1 step"):
        evaluate(Watcher(), Script().factory(), PARAMS, jax.random.key(0), episodes, max_steps=max_steps)
