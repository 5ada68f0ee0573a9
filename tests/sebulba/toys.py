"""Host environments that do what a test tells them, and an agent that shows what it was given."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from podracer import parallel
from podracer.agent import ActorOutput
from podracer.envs import EnvironmentSlice, HostFactory
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, StepType, TimeStep, valid_mask


@dataclasses.dataclass
class Script:
    """What the environments do, and what they leave behind.

    `length` is that of every episode; rewards are `reward`, observations `[global index, episode, step]`, where the
    episode is 0 unless they are `numbered`.
    """

    length: int = 3
    delay: float = 0.0
    jitter: bool = False
    fail_at: int | None = None
    fail_in: int = 0
    fail_times: int = 10**9
    hang_at: int | None = None
    nan_at: int | None = None
    nan_in: str = "reward"
    make_delay: float = 0.0
    frames_per_step: int = 1
    reward: float = 1.0
    life_lost_at: int | None = None
    numbered: bool = True
    open: list["ScriptedEnvironment"] = dataclasses.field(default_factory=list)
    made: list[EnvironmentSlice] = dataclasses.field(default_factory=list)
    released: threading.Event = dataclasses.field(default_factory=threading.Event)

    def factory(self):
        return HostFactory("scripted", lambda where: ScriptedEnvironment(self, where))


class ScriptedEnvironment:
    spec = EnvironmentSpec(ArraySpec((3,), "float32"), DiscreteSpec(2))

    def __init__(self, script, where):
        time.sleep(script.make_delay if where.num_envs > 1 else 0)
        self.script, self.where, self.num_envs = script, where, where.num_envs
        self.frames_per_step = script.frames_per_step
        self.index = where.first_index + np.arange(where.num_envs)
        self.steps = 0
        script.made.append(where)
        script.open.append(self)
        self.random = np.random.default_rng(where.seeds()[0])
        # The same memory at every step, as some packages have it.
        self.observation = np.zeros((where.num_envs, 3), np.float32)

    def _emit(self):
        episode, step = divmod(self.steps, self.script.length + 1)
        kind = StepType.FIRST if step == 0 else StepType.LAST if step == self.script.length else StepType.MID
        ones = np.ones(self.num_envs, np.float32)
        self.observation[:] = np.stack([self.index, episode * self.script.numbered * ones, step * ones], -1)
        nan = self.script.nan_at is not None and self.steps >= self.script.nan_at
        reward = ones * (0 if step == 0 else self.script.reward)
        if nan and step:
            (reward if self.script.nan_in == "reward" else self.observation)[:] = np.nan
        discount = ones * (kind != StepType.LAST and step != self.script.life_lost_at)
        return TimeStep(
            np.full(self.num_envs, kind, np.int8),
            reward.astype(np.float32),
            discount.astype(np.float32),
            self.observation,
        )

    def reset(self):
        return self._emit()

    def step(self, action):
        script = self.script
        time.sleep(script.delay + (self.random.uniform(0, 0.01) if script.jitter else 0))
        self.steps += 1
        mine = script.fail_in == self.where.first_index // self.num_envs
        if mine and self.steps == script.fail_at and script.fail_times > 0:
            script.fail_times -= 1
            raise RuntimeError("the emulator crashed")
        if mine and self.steps == script.hang_at:
            script.released.wait(60)
        return self._emit()

    def close(self):
        if self in self.script.open:
            self.script.open.remove(self)


@dataclasses.dataclass(frozen=True)
class Watcher:
    """Its weights depend on everything that it is given, in order; it keeps the last trajectory of each replica."""

    size: int = 3  # Of an observation, a vector.

    def init(self, key):
        return {"weights": jax.random.normal(key, (2,)), "updates": jnp.int32(0)}

    def init_actor(self, batch_size):
        return jnp.zeros((batch_size, self.size), jnp.float32)

    def init_memory(self, example):
        return example.timestep.observation

    def actor_params(self, learner):
        return {"weights": learner["weights"], "updates": learner["updates"]}

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        logits = params["weights"][None] + 0.1 * timestep.observation[:, :2]
        action = jnp.argmax(logits, -1) if evaluate else jax.random.categorical(key, logits)
        updates = jnp.broadcast_to(params["updates"], action.shape)
        # The state is the observation itself: an array that must not stay in the host's memory.
        return ActorOutput(action.astype(jnp.int32), timestep.observation, {"updates": updates, "seen": actor_state})

    def update(self, learner, memory, trajectory, key, *, axis=None):
        mask = valid_mask(trajectory).astype(jnp.float32)
        acted = (mask * trajectory.action.astype(jnp.float32)).mean() + (mask * trajectory.timestep.reward[1:]).mean()
        drawn = parallel.mean_over_replicas(jax.random.normal(key, (2,)), axis)
        step = 0.1 * drawn + parallel.mean_over_replicas(acted, axis)
        weights = jnp.tanh(learner["weights"] * jnp.float32(0.9) + step)
        memory = trajectory.timestep.observation
        return {"weights": weights, "updates": learner["updates"] + 1}, memory, {"acted": acted}
