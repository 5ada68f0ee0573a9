import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from podracer import plotting
from podracer.plotting import plot_curves, read_curve


def make_run(path, returns, *, config=None, steps=None):
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    steps = steps or [100 * (index + 1) for index in range(len(returns))]
    lines = [
        json.dumps({"env_steps": s, "updates": s, "episode_return": r}) for s, r in zip(steps, returns, strict=True)
    ]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: the arguments of every line and band."""
    from matplotlib.axes import Axes

    calls = {"plot": [], "fill_between": []}
    for name, record in calls.items():
        original = getattr(Axes, name)

        def call(axes, *args, original=original, record=record, **kwargs):
            record.append((args, kwargs))
            return original(axes, *args, **kwargs)

        monkeypatch.setattr(Axes, name, call)
    return calls


def test_windows_without_a_finished_episode_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", [None, 1.0, None, 3.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 500, "updates": 500}\n{"env_steps": 600, "episode_ret')
    curve = read_curve(run)
    assert curve.steps.tolist() == [200, 400]
    assert curve.episode_return.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"name": "ppo_catch", "env": "catch"}, "ppo_catch"),
        ({"experiment": "ppo_catch", "env": {"name": "catch"}}, "ppo_catch"),
        ({"env": "catch"}, "catch"),
        ({"seed": 1}, "run"),
        ([], "run"),
        (None, "run"),
    ],
)
def test_a_run_is_called_after_its_experiment(tmp_path, config, label):
    assert read_curve(make_run(tmp_path / "run", [1.0], config=config)).label == label


def test_seeds_of_an_experiment_are_drawn_as_mean_and_spread(tmp_path, drawn):
    config = {"name": "ppo_catch"}
    runs = [
        make_run(tmp_path / "0", [0.0, 1.0, 2.0], config=config, steps=[100, 200, 300]),
        make_run(tmp_path / "1", [2.0, 3.0, 4.0, 9.0], config=config, steps=[100, 200, 300, 400]),
    ]
    out = plot_curves(runs, tmp_path / "curve.png")
    first, second, mean = drawn["plot"]
    # Both runs have the steps from 100 to 300; the mean goes no further.
    assert mean[0][0][[0, -1]].tolist() == [100, 300]
    assert mean[0][1][[0, -1]].tolist() == [1.0, 3.0]
    assert mean[1]["label"] == "ppo_catch, mean of 2 runs ± 1 std"
    assert (first[0][1][0], second[0][1][0]) == (0.0, 2.0)
    ((_, low, high), _) = drawn["fill_between"][0]
    assert (low[0], high[0]) == (0.0, 2.0)
    picture = Image.open(io.BytesIO(out.read_bytes()))
    assert picture.format == "PNG"
    assert picture.size == (1440, 900)
    assert len(np.unique(np.asarray(picture))) > 20


def test_other_experiments_have_other_colours(tmp_path, drawn):
    runs = [make_run(tmp_path / name, [1.0, 2.0], config={"name": name}) for name in ("a", "b", "c")]
    plot_curves(runs, tmp_path / "curve.png")
    assert len({kwargs["color"] for _, kwargs in drawn["plot"]}) == 3
    assert [kwargs["label"] for _, kwargs in drawn["plot"] if "label" in kwargs] == ["a", "b", "c"]


def test_runs_that_share_no_steps_and_runs_of_one_window_can_be_drawn(tmp_path):
    runs = [
        make_run(tmp_path / "0", [1.0], config={"name": "x"}, steps=[2**40]),
        make_run(tmp_path / "1", [1.0, 2.0], config={"name": "x"}, steps=[1, 2]),
    ]
    assert plot_curves(runs, tmp_path / "curve.png").is_file()
    assert plot_curves(runs[:1], tmp_path / "one.png").is_file()


def test_the_moving_mean_is_over_what_there_is():
    values = np.arange(200.0)
    smooth = plotting._smoothed(values)
    # Two windows to either side.
    assert smooth[100] == 100.0
    assert (smooth[0], smooth[-1]) == (1.0, 198.0)
    np.testing.assert_array_equal(plotting._smoothed(values[:50]), values[:50])


def labels(drawn):
    return [kwargs["label"] for _, kwargs in drawn["plot"] if "label" in kwargs]


def test_runs_of_one_name_and_other_settings_are_no_seeds(tmp_path, drawn):
    def config(seed, learning_rate, **changes):
        return {
            "name": "x",
            "seed": seed,
            "agent": {"name": "ppo", "learning_rate": learning_rate, "sizes": [4]},
        } | changes

    configs = [config(0, 0.1), config(1, 0.1), config(0, 0.2), config(0, 0.1, devices=2)]
    runs = [make_run(tmp_path / str(i), [1.0, 2.0], config=config) for i, config in enumerate(configs)]
    plot_curves(runs[:2], tmp_path / "curve.png")
    assert labels(drawn) == ["x, mean of 2 runs ± 1 std"]
    drawn["plot"].clear()
    plot_curves(runs, tmp_path / "curve.png")
    assert labels(drawn) == [
        "x, agent.learning_rate 0.1, mean of 2 runs ± 1 std",
        "x, agent.learning_rate 0.2",
        "x, agent.learning_rate 0.1, devices 2",
    ]
    assert len({kwargs["color"] for _, kwargs in drawn["plot"]}) == 3


def test_what_changes_nothing_that_is_learnt_makes_no_curve_of_its_own(tmp_path, drawn):
    changes = [{}, {"checkpoints": {"interval": 7}}, {"evaluation_episodes": 3}, {"updates_per_window": 2}]
    runs = [
        make_run(tmp_path / str(i), [1.0, 2.0], config={"name": "x", "env": "e", "devices": None} | change)
        for i, change in enumerate(changes)
    ]
    plot_curves(runs, tmp_path / "curve.png")
    assert labels(drawn) == ["x, mean of 4 runs ± 1 std"]


def test_only_runs_of_the_same_name_are_told_apart(tmp_path, drawn):
    configs = [{"name": "x", "env": "e"}, {"name": "y", "env": "f"}]
    runs = [make_run(tmp_path / str(i), [1.0, 2.0], config=config) for i, config in enumerate(configs)]
    plot_curves(runs, tmp_path / "curve.png")
    assert labels(drawn) == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run: it has no metrics.jsonl"),
        ("", "has no finished episode to plot in its 0 lines"),
        ('{"env_steps": 1, "episode_return": null}\n', "has no finished episode to plot in its 1 lines"),
        ('{"env_steps": 1, "episode_return": 1.0}\nnonsense\n', "line 2 of .* is not a line of metrics"),
        ('{"episode_return": 1.0}\n', "line 1 of .* is not a line of metrics"),
        ("[]\n", "line 1 of .* is not a line of metrics"),
    ],
)
def test_what_cannot_be_plotted_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        plot_curves([tmp_path], tmp_path / "curve.png")
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "curve.png").exists()


def test_no_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no runs to plot"):
        plot_curves([], tmp_path / "curve.png")


def test_neither_import_nor_plot_touches_pyplot(tmp_path):
    run = make_run(tmp_path / "run", [1.0, 2.0])
    script = f"""
import sys
from podracer.plotting import plot_curves
assert "matplotlib" not in sys.modules
plot_curves([{str(run)!r}], {str(tmp_path / "curve.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
