"""What is raced: ways to train the same PPO on the same environment, behind one interface.

A contestant is made in the process that runs it, since the number of CPU devices is fixed when JAX starts.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

# Long enough that neither dispatch nor reading the clock shows, short enough to alternate often.
_ROWS_PER_CALL = 2**16
# Never reached: a learning rate that has decayed to 0 would be another workload.
_NUM_UPDATES = 10**6


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contestant by name.

    Attributes:
        kind: `textbook`, `library` or `one_file`.
        environment: gymnax's name.
        num_envs: B over all devices.
        rollout_length: T.
        devices: For the library, how many; None leaves the choice to it.
        network: For the library: `separate` is the textbook's, `default` that of the experiment `experiment`.
        experiment: Where the network `default` comes from.
    """

    kind: str
    environment: str
    num_envs: int
    rollout_length: int
    devices: int | None = 1
    network: str = "separate"
    experiment: str = "ppo_cartpole"

    @property
    def label(self) -> str:
        if self.kind != "library":
            return self.kind.replace("_", "-")
        if self.network == "default":
            return "library, its own choices"
        return f"library, same network, {self.devices} device{'s' if self.devices != 1 else ''}"


class Contestant:
    """A compiled training loop, warmed up, with its state.

    Attributes:
        compile_seconds: From the first call to its end, the first updates included.
        steps_per_call: Rows of all environments in one call.
        devices: How many it runs on.
    """

    def __init__(self, state: Any, call: Callable[[Any], Any], steps_per_call: int, devices: int) -> None:
        import jax

        self.steps_per_call = steps_per_call
        self.devices = devices
        self._call, self._wait = call, jax.block_until_ready
        start = time.perf_counter()
        self._state = self._wait(call(state))
        self.compile_seconds = time.perf_counter() - start
        self._calls = 1

    def calibrate(self, seconds: float) -> None:
        """Makes a round of `race` take about that long."""
        self.race()
        self._calls = max(1, round(seconds / self.race()))

    def race(self) -> float:
        """One round: seconds per call."""
        start = time.perf_counter()
        state = self._state
        for _ in range(self._calls):
            state = self._call(state)
        self._state = self._wait(state)
        return (time.perf_counter() - start) / self._calls


def build(entry: Entry) -> Contestant:
    """Compiles a contestant and makes its first call."""
    updates = max(1, _ROWS_PER_CALL // (entry.num_envs * entry.rollout_length))
    steps = updates * entry.num_envs * entry.rollout_length
    state, call, devices = {"textbook": _textbook, "library": _library, "one_file": _one_file}[entry.kind](
        entry, updates
    )
    return Contestant(state, call, steps, devices)


def library_anakin(entry: Entry) -> Any:
    """The library's `Anakin` for an entry."""
    from podracer import experiments
    from podracer.agents.ppo import PPOConfig
    from podracer.anakin import AnakinConfig
    from podracer.experiment import Experiment
    from podracer.networks import NetworkConfig

    network = NetworkConfig() if entry.network == "separate" else experiments.get(entry.experiment).agent.network
    return Experiment(
        name="benchmark",
        env=f"gymnax:{entry.environment}",
        agent=PPOConfig(num_minibatches=8, network=network),
        architecture=AnakinConfig(entry.num_envs, entry.rollout_length),
        total_steps=_NUM_UPDATES * entry.num_envs * entry.rollout_length,
        devices=entry.devices,
    ).make_architecture()


def _library(entry: Entry, updates: int) -> tuple[Any, Callable[[Any], Any], int]:
    anakin = library_anakin(entry)
    return anakin.init(0), lambda state: anakin.run(state, updates)[0], anakin.mesh.size


def _textbook(entry: Entry, updates: int) -> tuple[Any, Callable[[Any], Any], int]:
    import jax

    from benchmarks import textbook_ppo

    init, update = textbook_ppo.make_train(entry.environment, entry.num_envs, entry.rollout_length, _NUM_UPDATES)
    # Donated, as the library's is: the comparison is not about copies.
    run = jax.jit(lambda carry: jax.lax.scan(update, carry, None, updates), donate_argnums=0)
    return jax.jit(init)(jax.random.key(0)), lambda carry: run(carry)[0], 1


def _one_file(entry: Entry, updates: int) -> tuple[Any, Callable[[Any], Any], int]:
    import jax
    import numpy as np

    from examples import anakin_in_one_file

    if entry.environment != "CartPole-v1":
        raise ValueError(f"the one-file example learns CartPole-v1 only; got {entry.environment}")
    config = anakin_in_one_file.Config(entry.num_envs, entry.rollout_length, _NUM_UPDATES)
    devices = jax.devices()[: entry.devices]
    init, run = anakin_in_one_file.compile_for(config, devices)
    key, number = jax.random.key(0), np.int32(updates)
    return init(key), lambda state: run(key, state, number)[0], len(devices)
