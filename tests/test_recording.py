import io

import numpy as np
import pytest
from PIL import Image

from podracer.recording import save_gif


def frames_of(*colours, shape=(10, 10)):
    return [np.full((*shape, 3), colour, np.uint8) for colour in colours]


def test_every_frame_is_in_the_picture(tmp_path):
    frames = frames_of((255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 255))
    path = save_gif(frames, tmp_path / "episode.gif", fps=10)
    assert path == tmp_path / "episode.gif"
    picture = Image.open(io.BytesIO(path.read_bytes()))
    assert picture.info["loop"] == 0
    colours, milliseconds = [], 0
    for index in range(picture.n_frames):
        picture.seek(index)
        colours.append(picture.convert("RGB").getpixel((5, 5)))
        milliseconds += picture.info["duration"]
    assert colours[:3] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    # Equal frames may be one that lasts longer. The last rests for a second.
    assert milliseconds == 3 * 100 + 1000


def test_a_pixel_becomes_a_square(tmp_path):
    frame = np.zeros((10, 8, 3), np.uint8)
    frame[2, 3] = 255
    picture = Image.open(io.BytesIO(save_gif([frame], tmp_path / "episode.gif").read_bytes()))
    assert picture.size == (192, 240)
    white = np.argwhere(np.asarray(picture.convert("L")) > 127)
    assert white.min(0).tolist() == [48, 72]
    assert white.max(0).tolist() == [71, 95]
    assert len(white) == 24 * 24


@pytest.mark.parametrize(
    ("shape", "size"), [((210, 160), (320, 420)), ((240, 100), (100, 240)), ((64, 600), (600, 64))]
)
def test_frames_that_are_large_enough_stay(tmp_path, shape, size):
    assert (
        Image.open(io.BytesIO(save_gif(frames_of(0, shape=shape), tmp_path / "episode.gif").read_bytes())).size == size
    )


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "no frames to save"),
        ([np.zeros((10, 10, 3), np.float32)], r"frame 0 is float32\[10, 10, 3\]; frames are uint8"),
        ([np.zeros((10, 10), np.uint8)], r"frame 0 is uint8\[10, 10\]"),
        ([np.zeros((10, 10, 4), np.uint8)], r"frame 0 is uint8\[10, 10, 4\]"),
        ([np.zeros((0, 10, 3), np.uint8)], r"frame 0 is uint8\[0, 10, 3\]"),
        (frames_of(0) + frames_of(0, shape=(9, 10)), r"frame 1 is \[9, 10, 3\] and frame 0 \[10, 10, 3\]"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path, frames, message):
    with pytest.raises(ValueError, match=message):
        save_gif(frames, tmp_path / "episode.gif")
    assert not (tmp_path / "episode.gif").exists()


@pytest.mark.parametrize("fps", [0, -1, 51, float("nan")])
def test_rates_that_no_gif_has_are_refused(tmp_path, fps):
    with pytest.raises(ValueError, match="fps is"):
        save_gif(frames_of(0), tmp_path / "episode.gif", fps=fps)
