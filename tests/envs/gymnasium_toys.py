"""Small Gymnasium environments, right ones and broken ones. Processes import this module, so it imports no podracer."""

import os
import pathlib
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """The step index as the observation, reward 1 per step, an end after `length` steps.

    The reset option "level" is added to the observation.

    Args:
        length: Of an episode. With several, environments take turns by their seed.
        ends: "termination", "truncation" or "both".
        random_start: Whether a number below 1, drawn anew for each episode, is added to the observation instead.
        shape: Of the reward.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, length=3, ends="truncation", random_start=False, shape=(), render_mode=None):
        self.observation_space = spaces.Box(0, 100, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode = render_mode
        self._length, self._ends, self._random_start, self._shape = length, ends, random_start, shape

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        lengths = self._length if isinstance(self._length, tuple) else (self._length,)
        if seed is not None:
            self._limit = lengths[seed % len(lengths)]
        self._t = 0
        self._start = self.np_random.integers(1000) / 1000 if self._random_start else (options or {}).get("level", 0)
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} of {type(action)} is no action"
        assert self._t < self._limit, "a step after the end"
        self._t += 1
        over = self._t >= self._limit
        # What is in infos ends no episode.
        infos = {"TimeLimit.truncated": True, "final_info": {}, "episode": {"r": 1.0}}
        reward = np.ones(self._shape) if self._shape else 1.0
        return self.observe(), reward, over and self._ends != "truncation", over and self._ends != "termination", infos

    def observe(self):
        return np.asarray([self._start + self._t], np.float32)

    def render(self):
        return np.full((4, 6, 3), self._t, np.uint8)


class Hidden(Counter):
    """Everything at once: a tree of every kind of leaf, and an action mask."""

    def __init__(self, num_actions=3, **parameters):
        super().__init__(**parameters)
        self.action_space = spaces.Discrete(num_actions, start=5)
        self.observation_space = spaces.Dict(
            {
                "zebra": spaces.Dict({"inner": spaces.MultiBinary(3)}),
                "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
                "vector": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                "pair": spaces.Tuple([spaces.Discrete(101), spaces.MultiDiscrete([3, 4], start=[1, 0])]),
                "action_mask": spaces.MultiBinary(num_actions),
            }
        )

    def observe(self):
        mask = np.ones(self.action_space.n, np.int8)
        mask[1:] = (self._t < self._limit) & (np.arange(1, self.action_space.n) > self._t % 2)
        mask[0] = self._t == 0  # On the last row nothing is legal.
        return {
            "vector": np.asarray([self._start, self._t], np.float64),
            "image": np.full((4, 4, 1), self._t, np.uint8),
            "pair": (self._t, np.asarray([1 + self._t % 3, self._t % 4])),
            "zebra": {"inner": np.asarray([1, 0, 1], np.int8)},
            "action_mask": mask,
        }


class Acts(Counter):
    """Shows the action it was given, whatever its space: bounded reals of shape `[2, 2]`, for instance."""

    SPACES = {  # noqa: RUF012
        "matrix": spaces.Box(np.asarray([[-1, -2], [-0.4, 0]]), np.ones((2, 2)), dtype=np.float64),
        "scalar": spaces.Box(-2, 3, (), np.float32),
        "multi": spaces.MultiDiscrete([[3, 4], [2, 2]], start=[[1, 0], [0, 5]]),
        "binary": spaces.MultiBinary((2, 2)),
        "start": spaces.Discrete(3, start=-1),
        "unbounded": spaces.Box(-np.inf, 1, (2,), np.float32),
        "integers": spaces.Box(0, 5, (2,), np.int32),
        "dict": spaces.Dict({"a": spaces.Discrete(2)}),
    }

    def __init__(self, kind="matrix", **parameters):
        super().__init__(length=5, **parameters)
        self.action_space = self.SPACES[kind]
        self.observation_space = spaces.Box(-10, 10, self.action_space.shape or (), np.float64)
        self._action = np.zeros(self.action_space.shape or ())

    def observe(self):
        return np.asarray(self._action, np.float64)

    def step(self, action):
        self._action = np.asarray(action).copy()
        return super().step(action)


class Sees(Counter):
    """An observation space of some kind, and what is emitted in it."""

    SPACES = {  # noqa: RUF012
        "text": spaces.Dict({"words": spaces.Text(3)}),
        "graph": spaces.Tuple([spaces.Discrete(2), spaces.Graph(spaces.Discrete(2), None)]),
        "sequence": spaces.Sequence(spaces.Discrete(2)),
        "one_of": spaces.OneOf([spaces.Discrete(2)]),
        "far": spaces.Discrete(2, start=2**40),
        "wrong_shape": spaces.Box(0, 1, (2,), np.float32),
        "rounds": spaces.Box(0, 255, (1,), np.uint8),
        "lacks": spaces.Dict({"there": spaces.Discrete(9), "missing": spaces.Discrete(9)}),
    }

    def __init__(self, kind, **parameters):
        super().__init__(**parameters)
        self.observation_space = self.SPACES[kind]
        self._kind = kind

    def observe(self):
        if self._kind == "lacks":
            return {"there": 1}
        return np.full(1, 0.5, np.float32)


class Misbehaves(Counter):
    """Instead of step `at` it "raises", "dies", "hangs" or is "deaf", which is to hang and to ignore being told to end.

    When it is closed, it makes a file `closed`.
    """

    def __init__(self, how=None, at=2, closed=None, **parameters):
        super().__init__(**parameters)
        self._how, self._at, self._closed = how, at, closed

    def step(self, action):
        if self._t + 1 == self._at:
            if self._how == "raises":
                raise KeyError("broken on purpose")
            if self._how == "dies":
                os._exit(7)
            if self._how == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self._how in ("hangs", "deaf"):
                time.sleep(1000)
        return super().step(action)

    def close(self):
        if self._closed is not None:
            pathlib.Path(self._closed).touch()


TOYS = {"Counter": Counter, "Hidden": Hidden, "Acts": Acts, "Sees": Sees, "Misbehaves": Misbehaves}


def register():
    """Registers the environments above as "Toy/NAME-v0"."""
    for name in TOYS:
        if f"Toy/{name}-v0" not in gymnasium.registry:
            gymnasium.register(f"Toy/{name}-v0", f"gymnasium_toys:{name}")
