"""There is a picture of every environment, and it shows what is the case."""

import jax
import numpy as np
import pytest

from podracer import envs
from podracer.envs import rendering
from podracer.envs.rendering import draw_observation, render
from podracer.types import ArraySpec, MaskedObservation


def first_frame(id, seed=0, **parameters):
    environment = envs.make(id, **parameters)
    state, observation = jax.jit(environment.reset)(jax.random.key(seed))
    return environment, state, observation, render(environment, state, observation)


@pytest.mark.parametrize(
    "id",
    [
        *("gymnax:CartPole-v1", "gymnax:Pendulum-v1", "gymnax:Acrobot-v1", "gymnax:MountainCar-v0"),
        *("gymnax:MountainCarContinuous-v0", "gymnax:Breakout-MinAtar", "gymnax:FrozenLake-misc"),
        *(entry.id for entry in envs.list_environments() if entry.package == "podracer"),
    ],
)
def test_every_environment_has_a_picture(id):
    *_, frame = first_frame(id)
    assert frame.dtype == np.uint8
    assert frame.ndim == 3
    assert frame.shape[2] == 3
    assert min(frame.shape[:2]) >= 80
    assert frame.max() > 0


def test_breakout_shows_each_channel_in_its_colour():
    _, _, observation, frame = first_frame("gymnax:Breakout-MinAtar")
    assert frame.shape == (160, 160, 3)
    for row, column in np.argwhere(np.asarray(observation).any(-1)):
        channel = int(np.asarray(observation)[row, column].argmax())
        assert frame[row * 16 + 8, column * 16 + 8].tolist() == rendering._CHANNELS[channel].tolist()
    empty = np.argwhere(~np.asarray(observation).any(-1))[0]
    assert frame[empty[0] * 16, empty[1] * 16].tolist() == list(rendering._BACKGROUND)


def test_catch_shows_the_ball_and_the_paddle():
    _, state, _, frame = first_frame("podracer:Catch")
    assert frame.shape == (160, 80, 3)
    assert (frame[8, int(state.column) * 16 + 8] == 255).all()
    assert frame[152, int(state.paddle) * 16 + 8].tolist() == [80, 200, 120]


@pytest.mark.parametrize(("theta", "side"), [(0.6, 1), (-0.6, -1)])
def test_the_pole_leans_to_the_right_for_a_positive_angle(theta, side):
    environment, state, observation, _ = first_frame("gymnax:CartPole-v1")
    frame = render(environment, state.replace(x=0.0, theta=theta), observation)
    columns = np.argwhere((frame == rendering._ACCENT).all(-1))[:, 1]
    assert side * (columns.mean() - 120) > 10


@pytest.mark.parametrize(("theta", "up"), [(0.0, True), (np.pi, False)])
def test_the_pendulum_at_angle_zero_is_upright(theta, up):
    environment, state, observation, _ = first_frame("gymnax:Pendulum-v1")
    frame = render(environment, state.replace(theta=theta), observation)
    rows = np.argwhere((frame == rendering._ACCENT).all(-1))[:, 0]
    assert (rows.mean() < 80) == up


def test_the_acrobot_hangs_at_angle_zero_and_reaches_the_line_when_it_swings():
    environment, state, observation, _ = first_frame("gymnax:Acrobot-v1")
    hanging = render(environment, state.replace(joint_angle1=0.0, joint_angle2=0.0), observation)
    raised = render(environment, state.replace(joint_angle1=np.pi, joint_angle2=0.0), observation)
    rows = [np.argwhere((frame == rendering._ACCENT).all(-1))[:, 0] for frame in (hanging, raised)]
    assert rows[0].min() > 70
    assert rows[1].min() < 45


def test_the_car_moves_to_the_right_and_up_the_hill():
    environment, state, observation, _ = first_frame("gymnax:MountainCar-v0")
    frames = [render(environment, state.replace(position=x), observation) for x in (-0.5, 0.4)]
    valley, hill = (np.argwhere((frame == rendering._ACCENT).all(-1)).mean(0) for frame in frames)
    assert hill[1] > valley[1]
    assert hill[0] < valley[0]


@pytest.mark.parametrize(
    ("observation", "spec"),
    [
        (np.zeros(()), ArraySpec(())),
        (np.linspace(-5, 5, 7), ArraySpec((7,))),
        (np.asarray([np.nan, np.inf, -np.inf]), ArraySpec((3,))),
        (np.zeros(400), ArraySpec((400,))),
        (np.zeros((1, 1)), ArraySpec((1, 1), "float32", 1, 1)),
        (np.zeros((30, 40)), ArraySpec((30, 40), "float32", 0, 2)),
        (np.zeros((84, 84, 4), np.uint8), ArraySpec((84, 84, 4), "uint8")),
        (np.zeros((210, 160, 3), np.uint8), ArraySpec((210, 160, 3), "uint8")),
        (np.zeros((2, 3, 4, 5)), ArraySpec((2, 3, 4, 5))),
        ({"a": np.zeros(2), "b": (np.zeros((3, 3)),)}, {"a": ArraySpec((2,)), "b": (ArraySpec((3, 3)),)}),
        (MaskedObservation(np.zeros(2), np.ones(9, bool)), MaskedObservation(ArraySpec((2,)), ArraySpec((9,), "bool"))),
        ((), ()),
    ],
)
def test_any_observation_can_be_drawn(observation, spec):
    frame = draw_observation(observation, spec)
    assert frame.dtype == np.uint8
    assert frame.ndim == 3
    assert frame.shape[2] == 3
    assert min(frame.shape[:2]) > 0


def test_bars_follow_the_bounds():
    frame = draw_observation(np.asarray([0.0, 0.5, 1.0]), ArraySpec((3,), "float32", 0, 1))
    heights = [(frame[:, 53 * i] != rendering._BACKGROUND).any(-1).sum() for i in range(3)]
    assert heights == pytest.approx([2, 81, 160], abs=1)


def test_colour_images_are_shown_as_they_are():
    image = np.random.default_rng(0).integers(0, 255, (200, 160, 3), np.uint8)
    np.testing.assert_array_equal(draw_observation(image, ArraySpec((200, 160, 3), "uint8")), image)


def test_a_wrong_picture_is_refused():
    class Wrong(envs.Countdown):
        def render(self, state):
            return np.zeros((4, 4), np.uint8)

    with pytest.raises(ValueError, match=r"Wrong\.render must return uint8 of shape \[H, W, 3\]; got uint8 of shape"):
        render(Wrong(), 0, np.zeros(1))
