"""Trying numbers of threads and environments."""

import re

import pytest
from sebulba.toy_runs import experiment
from sebulba.toys import ScriptedEnvironment

from podracer import cli
from podracer.anakin import AnakinConfig
from podracer.sebulba import SebulbaConfig, tuning
from podracer.sebulba.tuning import Trial, candidates, trials


def test_every_way_has_as_many_steps_per_update():
    ways = candidates(SebulbaConfig(num_envs=8, rollout_length=4))
    shapes = {(way.num_envs, way.rollout_length) for way in ways}
    assert shapes == {(8, 4), (16, 2), (4, 8)}
    assert {way.threads_per_actor_device for way in ways} == {1, 2, 3, 4}
    assert {(way.num_envs, way.rollout_length) for way in candidates(SebulbaConfig(num_envs=7, rollout_length=3))} == {
        (7, 3)
    }


def test_what_cannot_run_says_why_and_the_rest_is_timed():
    run = experiment(architecture=SebulbaConfig(num_envs=4, rollout_length=3), devices=1)
    found = list(trials(run, 0.1))
    assert [trial.config.threads_per_actor_device for trial in found] == [1, 2, 3, 4] * 2
    for trial in found:
        divides = trial.config.num_envs % trial.config.threads_per_actor_device == 0
        assert (trial.steps_per_second is not None) == divides
        assert divides or "cannot be divided among 3 actor threads" in trial.bottleneck or "4 actor" in trial.bottleneck


def test_one_that_fails_does_not_end_the_others(monkeypatch):
    run = experiment(architecture=SebulbaConfig(num_envs=4, rollout_length=3), devices=1)
    make = ScriptedEnvironment.__init__

    def made(self, script, where):
        if where.num_envs == 2:
            raise OSError("out of emulators")
        make(self, script, where)

    monkeypatch.setattr(ScriptedEnvironment, "__init__", made)
    one, two, *others = trials(run, 0.1)
    assert one.steps_per_second is not None
    assert two.steps_per_second is None
    assert "out of emulators" in two.bottleneck
    assert any(trial.steps_per_second is not None for trial in others)


def test_ctrl_c_leaves_the_fastest_so_far(capsys, monkeypatch):
    def interrupted(experiment, seconds):
        for threads, rate in ((1, 10.0), (2, 20.0), (3, 15.0)):
            yield Trial(SebulbaConfig(num_envs=6, threads_per_actor_device=threads), rate, rate, "")
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "trials", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "sebulba", "tiny_scripted"])
    assert stopped.value.code == 130
    assert capsys.readouterr().out.splitlines()[-1].endswith("threads-per-actor-device 2")


def test_under_anakin_there_is_nothing_to_try():
    with pytest.raises(ValueError, match="tiny_scripted runs under Anakin"):
        next(trials(experiment(architecture=AnakinConfig(8, 5)), 1.0))


def test_the_command_prints_the_options_of_the_fastest(capsys):
    options = ["--num-envs", "2", "--rollout-length", "3", "--seconds", "0.1", "--devices", "1"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "sebulba", "tiny_scripted", *options])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["threads", "envs", "rollout", "steps/s", "frames/s", "slower"]
    assert len(lines) == 1 + 8 + 1
    rates = {}
    for line in lines[1:-1]:
        threads, num_envs, length, rate = line.split()[:4]
        if rate != "-":
            rates[int(threads), int(num_envs), int(length)] = int(rate.replace(",", ""))
    named = re.fullmatch(
        r"fastest: --num-envs (\d+) --rollout-length (\d+) --architecture.threads-per-actor-device (\d+)", lines[-1]
    )
    num_envs, length, threads = map(int, named.groups())
    assert rates[threads, num_envs, length] == max(rates.values())


@pytest.mark.parametrize("arguments", [[], ["anakin", "tiny_scripted"], ["sebulba", "tiny_scripted", "--seconds", "0"]])
def test_what_cannot_be_understood_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *arguments])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
