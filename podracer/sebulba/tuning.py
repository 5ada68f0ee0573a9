"""How many threads and environments make a Sebulba run fastest here: by trying."""

import dataclasses
import time
from collections.abc import Iterator

from podracer.envs.host import failure_in_words
from podracer.experiment import Experiment
from podracer.sebulba.config import SebulbaConfig
from podracer.sebulba.report import TimeBudget
from podracer.sebulba.runner import Sebulba

_THREADS = (1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to run an experiment, and how fast it was.

    Attributes:
        config: The way.
        steps_per_second: Environment steps; None if it cannot run.
        frames_per_second: Frames of an emulator; None if it cannot run.
        bottleneck: Which side waited for the other, or why it cannot run.
    """

    config: SebulbaConfig
    steps_per_second: float | None
    frames_per_second: float | None
    bottleneck: str


def candidates(config: SebulbaConfig) -> list[SebulbaConfig]:
    """The configuration with other numbers of threads, and with half and twice the environments.

    Where environments are doubled the rollout is halved, so that an update has as many steps as before.
    """
    shapes = [(config.num_envs, config.rollout_length)]
    if config.rollout_length % 2 == 0:
        shapes.append((2 * config.num_envs, config.rollout_length // 2))
    if config.num_envs % 2 == 0:
        shapes.append((config.num_envs // 2, 2 * config.rollout_length))
    return [
        dataclasses.replace(config, num_envs=num_envs, rollout_length=length, threads_per_actor_device=threads)
        for num_envs, length in shapes
        for threads in _THREADS
    ]


def trials(experiment: Experiment, seconds: float) -> Iterator[Trial]:
    """Runs an experiment in every way, from its beginning, for an equal share of the time.

    What cannot run, since environments cannot be divided so or the agent refuses it, costs no time. One that fails does
    not end the others. `batch_splits` stays as it is: it decides what is learnt, and not only how fast.

    Args:
        experiment: Of a `SebulbaConfig`.
        seconds: For all of them, without compiling.

    Raises:
        ValueError: It is of another architecture.
    """
    if not isinstance(experiment.architecture, SebulbaConfig):
        raise ValueError(f"{experiment.name} runs under Anakin; `--architecture sebulba` changes that")
    ways = candidates(experiment.architecture)
    for config in ways:
        try:
            architecture = dataclasses.replace(experiment, architecture=config).make_architecture()
        except ValueError as error:
            yield Trial(config, None, None, str(error))
            continue
        assert isinstance(architecture, Sebulba)
        try:
            yield _try(architecture, experiment.seed, seconds / len(ways))
        except Exception as error:
            yield Trial(config, None, None, failure_in_words(error))


def _try(sebulba: Sebulba, seed: int, seconds: float) -> Trial:
    budget = TimeBudget()
    with sebulba:
        # Making environments and filling the pipeline is not what a long run spends its time on.
        state, _ = sebulba.run(sebulba.init(seed), 2)
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds or not steps:
            before = time.perf_counter()
            state, window = sebulba.run(state, 1)
            steps += int(window.env_steps)
            budget.add(window, time.perf_counter() - before)
        passed = time.perf_counter() - began
    rate = steps / passed
    return Trial(sebulba.config, rate, rate * sebulba.environments.frames_per_step, budget.bottleneck() or "")
