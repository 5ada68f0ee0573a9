"""Catch, the smallest game with a picture (bsuite, arXiv 1908.03568, section A.2)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, UInt8

from podracer.envs.base import Step
from podracer.types import ArraySpec, DiscreteSpec, EnvironmentSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CatchState:
    """The ball's row and column, and the paddle's column in the bottom row."""

    row: Int32[Array, ""]
    column: Int32[Array, ""]
    paddle: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Catch:
    """A ball falls from a random column; the paddle on the bottom row has to be under it.

    The actions are left, stay and right. The ball falls one row per step, and the paddle starts in the middle. The
    observation is the board, `[rows, columns]`, 1 at the ball and at the paddle. An episode has `rows - 1` steps, and
    only its last step is rewarded: 1 if the ball is caught, -1 if not.

    The optimal return is 1 from every start, as long as the paddle can reach every column in time, which is required.
    The value of a state seen `k` steps before the end is then `discount ** (k - 1)`.

    Args:
        rows: Height of the board, 2 or more.
        columns: Width of the board.

    Raises:
        ValueError: The board is too small, or so wide that some balls cannot be caught.
    """

    rows: int = 10
    columns: int = 5

    def __post_init__(self) -> None:
        if self.rows < 2 or self.columns < 1:
            raise ValueError(f"Catch needs rows >= 2 and columns >= 1; got rows={self.rows}, columns={self.columns}")
        if self.columns // 2 > self.rows - 1:
            raise ValueError(
                f"with columns={self.columns} some balls cannot be caught in {self.rows - 1} steps; "
                f"columns can be at most {2 * self.rows - 1} with rows={self.rows}"
            )

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(ArraySpec((self.rows, self.columns), "float32", 0, 1), DiscreteSpec(3))

    def reset(self, key: jax.Array) -> tuple[CatchState, Float[Array, "rows columns"]]:
        column = jax.random.randint(key, (), 0, self.columns, jnp.int32)
        state = CatchState(row=jnp.int32(0), column=column, paddle=jnp.int32(self.columns // 2))
        return state, self._board(state)

    def step(self, state: CatchState, action: Int32[Array, ""], key: jax.Array) -> tuple[CatchState, Step]:
        paddle = jnp.clip(state.paddle + action - 1, 0, self.columns - 1)
        state = CatchState(row=state.row + 1, column=state.column, paddle=paddle)
        over = state.row == self.rows - 1
        outcome = jnp.where(state.column == paddle, 1.0, -1.0)
        step = Step(
            observation=self._board(state),
            reward=jnp.where(over, outcome, 0.0).astype(jnp.float32),
            terminated=over,
            truncated=jnp.bool_(False),
        )
        return state, step

    def render(self, state: CatchState) -> UInt8[np.ndarray, "H W 3"]:
        """The ball in white, the paddle in green, 16 pixels a square."""
        frame = np.full((self.rows, self.columns, 3), 24, np.uint8)
        frame[-1, int(state.paddle)] = (80, 200, 120)
        frame[int(state.row), int(state.column)] = 255
        return frame.repeat(16, axis=0).repeat(16, axis=1)

    def _board(self, state: CatchState) -> Float[Array, "rows columns"]:
        board = jnp.zeros((self.rows, self.columns), jnp.float32)
        return board.at[self.rows - 1, state.paddle].set(1.0).at[state.row, state.column].set(1.0)
