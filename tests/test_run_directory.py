import json
import math

import pytest
import tiny_runs
from tiny_runs import TinyConfig

from podracer.run_directory import RunDirectory, identity, json_text, write_json


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "one")
    directory.create(tiny_runs.experiment(), overwrite=False)
    return directory


def test_a_new_directory_holds_the_experiment(directory):
    assert directory.experiment() == tiny_runs.experiment()
    assert RunDirectory.existing(str(directory.path)) == directory
    assert [path.name for path in directory.path.iterdir()] == ["config.json"]


def test_an_empty_directory_can_be_used(tmp_path):
    RunDirectory(tmp_path).create(tiny_runs.experiment(), overwrite=False)


def test_a_run_is_overwritten_only_when_asked_for_and_nothing_else_with_it(directory):
    for name in ("metrics.jsonl", "curve.png", "episode.gif", "summary.json", "notes.txt"):
        (directory.path / name).write_text("old")
    for name in ("checkpoints/7/state", "tensorboard", "mine"):
        (directory.path / name).mkdir(parents=True)
        (directory.path / name / "file").write_text("old")
    with pytest.raises(ValueError, match="is not empty; choose another run directory, or --resume or --overwrite"):
        directory.create(tiny_runs.experiment(), overwrite=False)
    assert directory.metrics.read_text() == "old"
    directory.create(tiny_runs.experiment(seed=5), overwrite=True)
    assert sorted(path.name for path in directory.path.iterdir()) == ["config.json", "mine", "notes.txt"]
    assert directory.experiment().seed == 5
    assert (directory.path / "mine" / "file").read_text() == "old"


@pytest.mark.parametrize("content", [None, "[1]", '{"compilerOptions": {}}'])
def test_what_is_not_a_run_is_never_overwritten(content, tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "checkpoints").mkdir()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"not a run directory|not readable"):
        RunDirectory(tmp_path).create(tiny_runs.experiment(), overwrite=True)
    assert (tmp_path / "checkpoints").is_dir()


def test_a_file_is_no_directory(tmp_path):
    path = tmp_path / "file"
    path.write_text("text")
    with pytest.raises(ValueError, match="is a file; a run needs a directory"):
        RunDirectory(path).create(tiny_runs.experiment(), overwrite=True)
    with pytest.raises(ValueError, match=r"cannot make the run directory .*: Not a directory"):
        RunDirectory(path / "below").create(tiny_runs.experiment(), overwrite=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "an experiment is an object"),
        (json.dumps({"agent": {"name": "os.system"}}), r"no agent 'os.system'"),
        (json.dumps(tiny_runs.experiment().to_dict() | {"sed": 1}), r"no field 'sed'; nearest: seed"),
    ],
)
def test_a_configuration_that_cannot_be_read(content, message, directory):
    directory.config.write_text(content)
    with pytest.raises(ValueError, match=rf"config.json is not readable: .*{message}"):
        directory.experiment()


def test_where_and_how_a_run_is_made_is_no_part_of_what_it_is(directory):
    directory.check_same(
        tiny_runs.experiment(
            devices=8,
            evaluation_episodes=1,
            stop_on_nonfinite=False,
            updates_per_window=3,
            checkpoints=tiny_runs.CheckpointConfig(interval=7),
        )
    )
    with pytest.raises(ValueError, match=r"agent.bias was True and is False, agent.sizes was \(2, 3\) and is \(1,\)$"):
        directory.check_same(tiny_runs.experiment(agent=TinyConfig(bias=False, sizes=(1,))))
    with pytest.raises(ValueError, match=r"env_parameters.columns was 3 and is absent"):
        directory.check_same(tiny_runs.experiment(env_parameters={"rows": 3}))
    assert "devices" not in identity(tiny_runs.experiment())


def test_default_directories_differ(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first, second = (RunDirectory.default(tiny_runs.experiment(seed=7)) for _ in range(2))
    assert first != second
    assert first.path.parent.name == "runs"
    assert first.path.name.startswith("tiny_catch-seed7-2")


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan, "b": {"c": math.inf, "d": 1.5}, "e": 2**40})
    assert json.loads(path.read_text()) == {"a": None, "b": {"c": None, "d": 1.5}, "e": 2**40}
    assert json_text({"a": math.nan}) == '{"a": null}'


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr("pathlib.Path.replace", lambda *arguments: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
