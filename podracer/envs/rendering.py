"""Pictures of environments, for recorded episodes.

An environment with a `render(state)` of its own is drawn by it. Every other is shown by its observation: a board or an
image as itself, a vector as bars. So there is a picture of every environment.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree, Shaped, UInt8
from PIL import Image, ImageDraw

from podracer.types import split_mask

Frame = UInt8[np.ndarray, "H W 3"]

_SMALLEST = 160  # Boards are magnified to at least this many pixels.
_BACKGROUND, _INK, _ACCENT = (24, 26, 30), (210, 214, 220), (240, 130, 60)
# Of hues that stay apart on a dark ground, for up to twelve channels.
_CHANNELS = np.asarray(
    [
        *((90, 200, 250), (250, 220, 80), (130, 130, 140), (240, 110, 90), (120, 210, 120), (190, 130, 240)),
        *((250, 160, 60), (80, 130, 240), (240, 140, 190), (60, 190, 170), (200, 200, 200), (160, 110, 70)),
    ],
    np.uint8,
)


def is_frame(frame: Any) -> bool:
    """Whether something is a picture: uint8 `[H, W, 3]` in NumPy."""
    return isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3


def render(environment: Any, state: PyTree, observation: PyTree) -> Frame:
    """One frame of one environment, in NumPy, outside `jit`.

    Args:
        environment: The raw environment, with or without a `render` method.
        state: Its raw state, without a batch axis: the first element of the pair that `Autoreset` keeps.
        observation: Its observation, without a batch axis.

    Raises:
        ValueError: The environment's own `render` returned something other than uint8 `[H, W, 3]`.
    """
    draw = getattr(environment, "render", None)
    if draw is None:
        return draw_observation(observation, environment.spec.observation)
    frame = np.asarray(draw(state))
    if not is_frame(frame):
        raise ValueError(
            f"{type(environment).__name__}.render must return uint8 of shape [H, W, 3]; "
            f"got {frame.dtype} of shape {frame.shape}"
        )
    return frame


def draw_observation(observation: PyTree, spec: PyTree) -> Frame:
    """A picture of an observation; of a pytree, of its largest leaf.

    Args:
        observation: Without a batch axis.
        spec: The observation's spec, whose bounds scale the colours.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(split_mask(observation)[0])]
    specs = jax.tree.leaves(split_mask(spec)[0])
    if not leaves:
        return np.full((_SMALLEST, _SMALLEST, 3), _BACKGROUND, np.uint8)
    largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
    image, bounds = leaves[largest], specs[largest]
    if image.ndim == 3 and min(image.shape[:2]) > 1:
        return _magnify(_channels(image))
    scaled = _unit(image.astype(np.float64), bounds.minimum, bounds.maximum)
    if image.ndim == 2 and min(image.shape) > 1:
        return _magnify(_colours(scaled))
    return _bars(scaled.ravel())


def _channels(image: Shaped[np.ndarray, "H W C"]) -> Frame:
    if image.dtype == np.uint8 and image.shape[2] == 3:
        return image
    if image.dtype == np.uint8:  # A stack of grey frames: the newest.
        return image[:, :, -1:].repeat(3, axis=2)
    frame = np.full((*image.shape[:2], 3), _BACKGROUND, np.uint8)
    for channel in reversed(range(image.shape[2])):  # The first channels, usually the player, end on top.
        frame[image[:, :, channel] > 0] = _CHANNELS[channel % len(_CHANNELS)]
    return frame


def _unit(values: Shaped[np.ndarray, "..."], low: float | None, high: float | None) -> Shaped[np.ndarray, "..."]:
    """Values in [0, 1], by the bounds where there are any; otherwise zero becomes a half."""
    values = np.clip(np.nan_to_num(values), -1e6, 1e6)
    if low is not None and high is not None and high > low:
        return np.clip((values - low) / (high - low), 0, 1)
    return 0.5 + values / (2 + 2 * np.abs(values))


def _colours(scaled: Shaped[np.ndarray, "H W"]) -> Frame:
    ground, ink = np.asarray(_BACKGROUND), np.asarray(_INK)
    return (ground + scaled[..., None] * (ink - ground)).astype(np.uint8)


def _bars(scaled: Shaped[np.ndarray, "N"]) -> Frame:
    shown = scaled[:_SMALLEST]
    width = max(1, _SMALLEST // max(1, len(shown)))
    frame = np.full((_SMALLEST, width * len(shown), 3), _BACKGROUND, np.uint8)
    for i, value in enumerate(shown):
        top = round((1 - float(value)) * (_SMALLEST - 2))
        frame[top:, i * width : i * width + max(1, width - 2)] = _CHANNELS[i % len(_CHANNELS)]
    return frame


def _magnify(frame: Frame) -> Frame:
    times = max(1, math.ceil(_SMALLEST / max(frame.shape[:2])))
    return frame.repeat(times, axis=0).repeat(times, axis=1)


def _canvas(width: int = 240, height: int = 160) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (width, height), _BACKGROUND)
    return image, ImageDraw.Draw(image)


def _rod(draw: ImageDraw.ImageDraw, start: tuple[float, float], angle: float, length: float) -> tuple[float, float]:
    """Draws a rod and returns its far end; the angle is from straight down, anticlockwise."""
    end = start[0] + length * math.sin(angle), start[1] + length * math.cos(angle)
    draw.line([start, end], fill=_ACCENT, width=6)
    draw.ellipse([start[0] - 4, start[1] - 4, start[0] + 4, start[1] + 4], fill=_INK)
    return end


def _cartpole(state: Any) -> Frame:
    image, draw = _canvas()
    x = 120 + float(state.x) / 2.4 * 110
    draw.line([(0, 130), (240, 130)], fill=_INK, width=1)
    draw.rectangle([x - 18, 120, x + 18, 134], fill=_INK)
    _rod(draw, (x, 120), math.pi - float(state.theta), 80)  # Theta is from upright, clockwise.
    return np.asarray(image)


def _pendulum(state: Any) -> Frame:
    image, draw = _canvas(160, 160)
    _rod(draw, (80, 80), math.pi + float(state.theta), 60)  # Theta is from upright, anticlockwise.
    return np.asarray(image)


def _acrobot(state: Any) -> Frame:
    image, draw = _canvas(160, 160)
    draw.line([(0, 45), (160, 45)], fill=(90, 94, 100), width=1)  # The goal: one link above the pivot.
    first = float(state.joint_angle1)
    elbow = _rod(draw, (80, 80), first, 35)
    _rod(draw, elbow, first + float(state.joint_angle2), 35)
    return np.asarray(image)


def _mountain_car(goal: float) -> Callable[[Any], Frame]:
    def point(position: float) -> tuple[float, float]:
        return (position + 1.2) / 1.8 * 238 + 1, 130 - 90 * (math.sin(3 * position) * 0.5 + 0.5)

    def draw_state(state: Any) -> Frame:
        image, draw = _canvas()
        draw.line([point(-1.2 + 1.8 * i / 60) for i in range(61)], fill=_INK, width=2)
        x, y = point(goal)
        draw.line([(x, y), (x, y - 24)], fill=_INK, width=2)
        draw.polygon([(x, y - 24), (x + 12, y - 19), (x, y - 14)], fill=(120, 210, 120))
        x, y = point(float(state.position))
        draw.ellipse([x - 7, y - 14, x + 7, y], fill=_ACCENT)
        return np.asarray(image)

    return draw_state


DRAWINGS: dict[str, Callable[[Any], Frame]] = {
    "CartPole-v1": _cartpole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car(0.5),
    "MountainCarContinuous-v0": _mountain_car(0.45),
}
"""Drawings of the raw states of gymnax's classic control environments, by name."""
