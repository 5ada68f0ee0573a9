"""Host environments in NumPy: two that are right, and one for each fault that the conformance suite must find."""

import dataclasses
import subprocess
import sys
import threading
import time

import numpy as np

from podracer.envs.host import check_actions
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec, MaskedObservation, StepType, TimeStep


class Walks:
    """Correct: walks from random starts, each for five steps or until it is 3 away from 0; arrays are used again."""

    spec = EnvironmentSpec(ArraySpec((2,), "float32", -4.5, 6), DiscreteSpec(2))

    def __init__(self, where):
        self.num_envs = where.num_envs
        self.generators = [np.random.default_rng(seed) for seed in self.seeds(where)]
        self.x, self.t = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        numbers = [np.zeros(self.num_envs, dtype) for dtype in (np.int8, np.float32, np.float32)]
        self.timestep = TimeStep(*numbers, np.zeros((self.num_envs, 2), np.float32))

    def seeds(self, where):
        return where.seeds()

    def reset(self):
        for b in range(self.num_envs):
            self.start(b)
        return self.emit()

    def step(self, action):
        check_actions(action, self.num_envs)
        for b in range(self.num_envs):
            if self.timestep.step_type[b] == StepType.LAST:
                self.start(b)
            else:
                self.advance(b, action[b])
        return self.emit()

    def start(self, b):
        self.x[b], self.t[b] = self.generators[b].uniform(-1, 1), 0
        self.write(b, StepType.FIRST, 0, 1)

    def advance(self, b, action):
        self.x[b] += (1 if action == 1 else -1) + self.generators[b].uniform(-0.3, 0.3)
        self.t[b] += 1
        away = abs(self.x[b]) > 3
        self.write(b, StepType.LAST if away or self.t[b] == 5 else StepType.MID, 1, 0 if away else 1)

    def write(self, b, *numbers):
        timestep = self.timestep
        timestep.step_type[b], timestep.reward[b], timestep.discount[b] = numbers
        timestep.observation[b] = self.x[b], self.t[b]

    def emit(self):
        return self.timestep

    def close(self):
        pass


class WrongShape(Walks):
    def emit(self):
        return dataclasses.replace(self.timestep, observation=self.timestep.observation[:, :1])


class WrongType(Walks):
    def step(self, action):
        timestep = super().step(action)
        return dataclasses.replace(timestep, reward=timestep.reward.astype(np.float64))


class NoArray(Walks):
    def emit(self):
        return dataclasses.replace(self.timestep, discount=1.0)


class WrongBounds(Walks):
    spec = EnvironmentSpec(ArraySpec((2,), "float32", -1, 6), DiscreteSpec(2))


class UnequalSpecs(Walks):
    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((2,), "float32", -4.5, 6 + np.random.default_rng().random()), DiscreteSpec(2))


class SpecOfItsSize(Walks):
    @property
    def spec(self):
        return EnvironmentSpec(ArraySpec((2,), "float32", -4.5, 6 + self.num_envs), DiscreteSpec(2))


class WrongSize(Walks):
    def __init__(self, where):
        super().__init__(where)
        self.num_envs += 1


class NotFinite(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, step_type, np.nan if self.t[b] == 2 else reward, discount)


class Masked(Walks):
    """Correct, with a mask: only the step towards 0 is legal."""

    spec = EnvironmentSpec(MaskedObservation(Walks.spec.observation, ArraySpec((2,), "bool")), DiscreteSpec(2))

    def advance(self, b, action):
        assert self.mask()[b, action], "an illegal action"
        super().advance(b, action)

    def mask(self):
        return np.stack([self.x > 0, self.x <= 0], axis=-1)

    def emit(self):
        return dataclasses.replace(self.timestep, observation=MaskedObservation(self.timestep.observation, self.mask()))


class EmptyMask(Masked):
    def mask(self):
        return super().mask() & (self.t < 5)[:, None]


class NeverEnds(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, min(step_type, StepType.MID), reward, 1)


class NoFirst(Walks):
    def emit(self):
        timestep = self.timestep
        types = np.where((timestep.step_type == StepType.FIRST) & (self.x > 0), StepType.MID, timestep.step_type)
        return dataclasses.replace(timestep, step_type=types.astype(np.int8))


class FirstTooEarly(Walks):
    def emit(self):
        timestep = self.timestep
        return dataclasses.replace(timestep, step_type=np.where(self.t == 3, 0, timestep.step_type).astype(np.int8))


class RewardOnFirst(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, step_type, 1, discount)


class DiscountOnFirst(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, step_type, reward, discount * (step_type != StepType.FIRST))


class Discounts(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, step_type, reward, 0.99 * discount if step_type == StepType.MID else discount)


class LosesLives(Walks):
    def write(self, b, step_type, reward, discount):
        super().write(b, step_type, reward, 0 if self.t[b] == 2 else discount)


class ActsOnLast(Walks):
    def step(self, action):
        over = self.timestep.step_type == StepType.LAST
        timestep = super().step(action)
        timestep.observation[over, 0] += 0.1 * action[over]
        return timestep


class StepsOnLast(Walks):
    """As a vector environment that resets in the same step: the action on LAST moves the next episode."""

    def start(self, b):
        super().start(b)
        if self.action is not None:
            self.advance(b, self.action[b])
            self.write(b, StepType.FIRST, 0, 1)

    def reset(self):
        self.action = None
        return super().reset()

    def step(self, action):
        self.action = action
        return super().step(action)


class SameStart(Walks):
    def start(self, b):
        super().start(b)
        self.x[b] = 0
        self.write(b, StepType.FIRST, 0, 1)


class SeedsEveryReset(Walks):
    def __init__(self, where):
        super().__init__(where)
        self.where = where

    def start(self, b):
        self.generators[b] = np.random.default_rng(self.where.seeds()[b])
        super().start(b)


class HidesTheEnd(Walks):
    """LAST with the observation of the next reset, as in a vector environment that resets in the same step."""

    def start(self, b):
        if self.timestep.step_type[b] != StepType.LAST:
            super().start(b)
        self.write(b, StepType.FIRST, 0, 1)

    def advance(self, b, action):
        super().advance(b, action)
        if self.timestep.step_type[b] == StepType.LAST:
            discount = self.timestep.discount[b]
            self.timestep.step_type[b] = StepType.MID
            self.start(b)
            self.write(b, StepType.LAST, 1, discount)


class GlobalRandomness(Walks):
    def seeds(self, where):
        return np.random.default_rng().integers(1000, size=self.num_envs)


def ignoring(field):
    """Walks that are seeded as if a field of the slice were 0."""
    return type(f"Ignores_{field}", (Walks,), {"seeds": lambda self, where: ignore(where, field).seeds()})


def ignore(where, field):
    return dataclasses.replace(where, **{field: 0})


class OneSeed(Walks):
    def seeds(self, where):
        return where.seeds()[:1] * self.num_envs


class SeedsByPlace(Walks):
    """Differs by the first index, but environment b is not that of index b."""

    def seeds(self, where):
        return [1000 * where.seeds()[0] + b for b in range(self.num_envs)]


class SharedRandomness(Walks):
    """One generator for all, from which only those draw that move up."""

    def __init__(self, where):
        super().__init__(where)
        self.generators = self.generators[:1] * self.num_envs

    def advance(self, b, action):
        if action == 1:
            self.generators[b].random()
        super().advance(b, action)


class ChangesColumns(Walks):
    """The environments come in the order in which they are done, as when nobody sorts them."""

    def emit(self):
        order = np.argsort(self.x)
        timestep = self.timestep
        fields = {name: getattr(timestep, name)[order] for name in ("step_type", "reward", "discount", "observation")}
        return TimeStep(**fields)


class Blocks(Walks):
    def step(self, action):
        if len(action) != self.num_envs:
            threading.Event().wait(60)
        return super().step(action)


class Accepts(Walks):
    def step(self, action):
        return super().step(np.resize(action, self.num_envs))


class RaisesAnother(Walks):
    def step(self, action):
        if len(action) != self.num_envs:
            raise IndexError(len(action))
        return super().step(action)


class ClosesOnce(Walks):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class ClosesInItsOwnThread(Walks):
    def __init__(self, where):
        super().__init__(where)
        self.thread = threading.current_thread()

    def close(self):
        if threading.current_thread() is not self.thread:
            raise RuntimeError("another thread")


class HangsInClose(Walks):
    def reset(self):
        self.begun = True
        return super().reset()

    def close(self):
        time.sleep(3)


class LeavesProcesses(Walks):
    left = []  # noqa: RUF012

    def __init__(self, where):
        super().__init__(where)
        self.left.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))


class BadPicture(Walks):
    def render(self):
        return np.zeros((8, 8), np.float32)
