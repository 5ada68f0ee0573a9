"""An agent, environments and an experiment that compile in a moment, for tests of what happens around training.

Importing this registers them, so that a process started by a test knows them as the test does.
"""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

import podracer
from podracer import parallel
from podracer.agent import ActorOutput
from podracer.checkpoint import Checkpointer
from podracer.envs import Step
from podracer.experiment import CheckpointConfig, Experiment
from podracer.run_directory import RunDirectory, identity
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, valid_mask


@dataclasses.dataclass(frozen=True)
class TinyConfig:
    learning_rate: float = 0.5
    bias: bool = True
    sizes: tuple[int, ...] = (2, 3)

    def __post_init__(self):
        if not 0 <= self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be a finite number, 0 or more")

    def make(self, spec, num_updates):
        return Tiny(spec, self, num_updates)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Prefers actions by weights that drift with rewards, observations and noise: all that a resumed run must keep."""

    spec: EnvironmentSpec
    config: TinyConfig
    num_updates: int

    def init(self, key):
        weights = jax.random.normal(key, (self.spec.action.num_actions,))
        return {"weights": weights, "momentum": jnp.zeros_like(weights), "updates": jnp.int32(0)}

    def init_actor(self, batch_size):
        return jnp.zeros(batch_size, jnp.int32)

    def init_memory(self, example):
        return ()

    def actor_params(self, learner):
        return {"weights": learner["weights"]}

    def act(self, params, timestep, actor_state, key, *, evaluate=False):
        logits = jnp.broadcast_to(params["weights"], (*timestep.reward.shape, *params["weights"].shape))
        action = jnp.argmax(logits, -1) if evaluate else jax.random.categorical(key, logits)
        return ActorOutput(action.astype(jnp.int32), actor_state + 1)

    def update(self, learner, memory, trajectory, key, *, axis=None):
        mask = valid_mask(trajectory).astype(jnp.float32)
        reward = (mask * trajectory.timestep.reward[1:]).mean()
        seen = trajectory.timestep.observation.mean() + trajectory.actor_state.astype(jnp.float32).mean() / 100
        noise = jax.random.normal(key, learner["weights"].shape)
        step = parallel.mean_over_replicas(noise * (1 + reward) + 0.1 * seen, axis)
        momentum = jnp.float32(0.9) * learner["momentum"] + step
        done = learner["updates"].astype(jnp.float32) / self.num_updates
        learning_rate = jnp.float32(self.config.learning_rate) * (1 - done)
        weights = learner["weights"] + learning_rate * momentum
        learner = {"weights": weights, "momentum": momentum, "updates": learner["updates"] + 1}
        return learner, memory, {"loss": reward, "learning_rate": learning_rate}


@dataclasses.dataclass(frozen=True)
class Endless:
    """Episodes that never end; from step `nan_at` on the reward is not a number, if that is not 0."""

    nan_at: int = 0

    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((1,), "float32"), DiscreteSpec(2))

    def reset(self, key):
        return jnp.int32(0), jnp.zeros(1, jnp.float32)

    def step(self, state, action, key):
        state = state + 1
        is_nan = (state >= self.nan_at) & (self.nan_at > 0)
        reward = jnp.where(is_nan, jnp.nan, 1.0).astype(jnp.float32)
        return state, Step(jnp.ones(1, jnp.float32), reward, jnp.bool_(False), jnp.bool_(False))


# What a line of metrics says of time, which no two runs share.
TIMING = ("steps_per_second",)


def experiment(**changes):
    """12 updates of 8 environments x 4 steps of Catch on 2 devices, saved after every second one."""
    settings = {
        "name": "tiny_catch",
        "env": "podracer:Catch",
        "env_parameters": {"rows": 3, "columns": 3},
        "agent": TinyConfig(),
        "architecture": podracer.AnakinConfig(num_envs=8, rollout_length=4),
        "total_steps": 12 * 32,
        "devices": 2,
        "updates_per_window": 1,
        "evaluation_episodes": 4,
        "checkpoints": CheckpointConfig(interval=2),
    }
    return Experiment(**settings | changes)


def metrics_of(run_dir, *, timing=False):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if timing or name not in TIMING} for line in lines]


def bits_of(tree):
    def data(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(jax.tree.map(data, tree)))
    return {jax.tree_util.keystr(path): (leaf.dtype, leaf.tobytes()) for path, leaf in leaves}


def saved_state(run_dir, update=None):
    """The bits of the whole state in a run's newest checkpoint, and what was saved besides."""
    directory = RunDirectory.existing(run_dir)
    experiment = directory.experiment()
    checkpointer = Checkpointer(directory.checkpoints, config=identity(experiment))
    restored = checkpointer.restore(experiment.make_architecture().shapes, update)
    checkpointer.close()
    return restored.update, bits_of(restored.state), restored.metadata


@contextlib.contextmanager
def compiled_programs(directory):
    """Has JAX keep what it compiles, as many tests run the same programs. Gives the variables to set for a process."""
    settings = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    # On some processors XLA finds fault with a cached program for options that are no features of a processor.
    yield {name.upper(): str(value) for name, value in settings.items()} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


podracer.agents.register("tiny", TinyConfig)
podracer.envs.register("tiny:Endless", Endless)
podracer.experiments.register(experiment())
