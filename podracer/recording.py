"""Episodes as pictures that move."""

import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

_LEGIBLE = 240


def save_gif(
    frames: Sequence[UInt8[np.ndarray, "H W 3"]], path: str | pathlib.Path, *, fps: float = 15
) -> pathlib.Path:
    """Writes an animated GIF that repeats for ever and rests for a second on its last frame.

    Frames whose longer side has fewer than 240 pixels are enlarged by a whole factor, each pixel becoming a square, so
    that a grid of 10 x 10 can be seen.

    Args:
        frames: Pictures of the same size, `[H, W, 3]` of uint8.
        path: The file to write.
        fps: Frames per second, at most 50: a GIF counts in hundredths of a second, and viewers slow down those that ask
            for one.

    Returns:
        The path.

    Raises:
        ValueError: For no frames, frames of other or different shapes, another dtype, or a rate out of range.
    """
    if not 0.1 <= fps <= 50:
        raise ValueError(f"fps is {fps}; a GIF shows between 0.1 and 50 frames per second")
    if len(frames) == 0:
        raise ValueError("no frames to save; an episode has at least one")
    for index, frame in enumerate(frames):
        if frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape or frame.dtype != np.uint8:
            raise ValueError(f"frame {index} is {frame.dtype}{list(frame.shape)}; frames are uint8[height, width, 3]")
        if frame.shape != frames[0].shape:
            raise ValueError(
                f"frame {index} is {list(frame.shape)} and frame 0 {list(frames[0].shape)}; one size is needed"
            )

    # Imported late: only recording needs it.
    from PIL import Image

    factor = -(-_LEGIBLE // max(frames[0].shape[:2]))
    images = [Image.fromarray(np.asarray(frame).repeat(factor, 0).repeat(factor, 1)) for frame in frames]
    durations = [round(1000 / fps)] * (len(images) - 1) + [max(1000, round(1000 / fps))]
    path = pathlib.Path(path)
    images[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
        disposal=1,
        optimize=False,
    )
    return path
