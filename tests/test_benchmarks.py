"""That the benchmarks measure what they say. Not how fast anything is: that depends on the machine."""

import dataclasses
import datetime
import json
import os
import pathlib
from typing import Any

import jax
import pytest

from benchmarks import convolutions, learning, machine, memory, report, shuffle, speed
from benchmarks.contestants import Entry
from benchmarks.learning_table import Target, markdown
from benchmarks.ratios import Ratio, in_units
from benchmarks.worker import Worker, WorkerError
from podracer import experiments
from podracer.experiment import Experiment
from podracer.machine import cores
from podracer.run_directory import RunDirectory


def test_textbook_learns() -> None:
    # Its types are loose on purpose: it is what everyone writes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.debug_key_reuse(False):
        from benchmarks import textbook_ppo

        init, update = textbook_ppo.make_train("CartPole-v1", 16, 64, num_updates=40)
        run = jax.jit(lambda key: jax.lax.scan(update, init(key), None, 40)[1])
        returns = jax.device_get(run(jax.random.key(0))["episode_return"])
    assert returns[-5:].mean() > 1.5 * returns[:5].mean()


def test_shuffles_read_every_sample() -> None:
    batch = shuffle._batch(16, 4, (3,))
    total = 16 * 4 * (3 + 7)
    with jax.numpy_rank_promotion("allow"):
        for epoch in (shuffle.textbook, shuffle.grid):
            assert float(epoch(batch, jax.random.key(1))) == total, epoch.__name__


@pytest.mark.parametrize("workload", convolutions.WORKLOADS, ids=lambda workload: workload.name)
def test_both_contestants_compute_the_same_by_other_means(workload: convolutions.Workload) -> None:
    small = dataclasses.replace(workload, acting=(2,), learning=(2,), looping=2)
    params = jax.eval_shape(lambda: convolutions.initial_params(small))
    ours, theirs = convolutions.cases(small), convolutions.cases(small)
    assert [case.observations for case in ours] == [2, 2, 4]
    for a, b in zip(ours, theirs, strict=True):
        with convolutions.plain():
            plain = jax.make_jaxpr(b.function)(params, b.x)
        found = jax.make_jaxpr(a.function)(params, a.x)
        assert found.out_avals == plain.out_avals
        # Not even in a loop is what the other traced used again.
        assert "platform_index" in str(found)
        assert "platform_index" not in str(plain)


def test_ratio_is_of_medians_with_the_range_of_rounds() -> None:
    assert Ratio.of([1, 2, 4], [2, 6, 4]) == Ratio(ratio=2.0, lowest=1.0, highest=3.0)
    with pytest.raises(ValueError, match="3 and 2"):
        Ratio.of([1, 2, 3], [1, 2])


@pytest.mark.parametrize(("rate", "text"), [(12, "12"), (1234, "1.23k"), (123456, "123k"), (2_500_000, "2.5M")])
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert in_units(rate) == text


def test_every_workload_is_raced_against_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "cores", lambda: 2)
    for workload in speed.WORKLOADS:
        entries = speed.entries_for(*workload)
        assert [entry.kind for entry in entries] == ["textbook", "library", "library", "library"]
        assert [entry.devices for entry in entries] == [1, 1, 2, None]
        assert len({entry.label for entry in entries}) == 4


def test_document_has_hardware_versions_and_raw_timings(tmp_path: pathlib.Path) -> None:
    section = report.Section("speed", {"workloads": [{"steps_per_second": [1.0, 2.0]}]}, [])
    started = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    contents = report.document(machine.describe(), [section], False, started)
    path = report.write(contents, tmp_path / "results")
    read = json.loads(path.read_text())
    assert path.name.startswith("2026-01-02T030405-")
    assert read["results"]["speed"]["workloads"][0]["steps_per_second"] == [1.0, 2.0]
    assert read["machine"]["cores"] == os.cpu_count()
    assert read["machine"]["packages"]["jax"] == jax.__version__
    assert set(read["machine"]["packages"]) >= {"jaxlib", "flax", "optax", "gymnax"}
    assert {"cpu", "memory_gib", "os", "python", "commit"} <= set(read["machine"])


def test_memory_is_this_process() -> None:
    assert 10 < machine.resident_megabytes() < 100_000
    assert memory._COMPILED in (event for event in _events_of_compiling())


def _events_of_compiling() -> list[str]:
    seen: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1.5)(1.25).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return seen


def test_a_failing_worker_is_an_error_not_a_wait() -> None:
    with Worker([Entry("one_file", "Pendulum-v1", 4, 8)], 0.1) as worker, pytest.raises(WorkerError, match="code 1"):
        worker.wait_until_ready()


def _summary(mean: float, **changes: Any) -> dict[str, Any]:
    summary = {"experiment": "e", "seed": 0, "env_steps": 500_000, "steps_per_second": 1e5, "wall_seconds": 75.0}
    return summary | {"evaluation": {"mean": mean, "std": 1.0, "min": 0.0, "max": 500.0, "episodes": 128}} | changes


def test_table_states_targets_and_what_became_of_them() -> None:
    targets = [Target("e", 490, seeds=10, needed=0.9), Target("f", 40), Target("g", -85)]
    runs = {"e": [_summary(500.0)] * 9 + [_summary(100.0)], "f": [_summary(39.0), _summary(40.5)]}
    lines = markdown(targets, runs).splitlines()
    assert ">= 490 in 9 of 10 | reached" in lines[2]
    assert "460 ± 1.3e+02" in lines[2]
    assert "1 min 15 s" in lines[2]
    assert "39, 40.5 | mean >= 40 | **missed**" in lines[3]
    assert "mean >= -85 | not run" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(("good", "seeds", "reached"), [(9, 10, True), (8, 10, False), (2, 2, True), (1, 2, False)])
def test_share_of_seeds(good: int, seeds: int, reached: bool) -> None:
    assert Target("e", 490, needed=0.9).reached([495.0] * good + [9.0] * (seeds - good)) == reached


def test_finished_seeds_are_not_trained_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [learning.Job("ppo_cartpole", seed, tmp_path / f"seed_{seed}") for seed in range(7)]

    def leave(job: learning.Job, text: str | None = None, **changes: Any) -> None:
        RunDirectory(job.directory).create(
            experiments.get("ppo_cartpole", **{"seed": job.seed, **changes}), overwrite=True
        )
        (job.directory / "summary.json").write_text(text or json.dumps(_summary(1.0)))

    leave(jobs[0])
    leave(jobs[1], devices=1)
    leave(jobs[2], "{half a fi")
    leave(jobs[3], seed=0)
    # Of the same name, before its settings changed.
    leave(jobs[4], total_steps=400_000)
    leave(jobs[5], agent=dataclasses.replace(experiments.get("ppo_cartpole").agent, learning_rate=0.5))
    trained = []

    def train(job: learning.Job, cores: Any) -> None:
        trained.append(job.seed)
        leave(job)

    monkeypatch.setattr(learning, "run_job", train)
    assert learning.run_all(jobs, at_once=1) == []
    assert trained == [2, 3, 4, 5, 6]


def test_the_table_says_what_it_was_made_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "run_all", lambda jobs, at_once: [])
    assert learning.main(["ppo_cartpole", "--out", str(tmp_path)]) == 0
    here = machine.describe()
    line = (tmp_path / "results.md").read_text().splitlines()[-1]
    for part in (here["cpu"], f"{cores()} cores", f"jax {jax.__version__}", str(here["commit"])):
        assert part in line


def test_every_target_of_memory_and_compilation_is_answered() -> None:
    for growth, count, seconds, answer in ((4.0, 1, 9.0, "yes"), (6.0, 2, 11.0, "no")):
        data = {
            "resident_megabytes": [[10, 500.0], [100, 500.0 + growth]],
            "compilations": {"run": count},
            "experiment": "ppo_cartpole",
            "compile_seconds": seconds,
        }
        assert [row[3] for row in memory.rows(data)] == ["", "", answer, answer, answer]


def test_every_target_of_speed_is_answered() -> None:
    assert set(speed.TARGETS) <= {workload[:3] for workload in speed.WORKLOADS}
    assert speed.verdict(("CartPole-v1", 2048, 64), 2.99) == ">= 3: no"
    assert speed.verdict(("CartPole-v1", 64, 128), 2.0) == ">= 2: yes"
    assert speed.verdict(("CartPole-v1", 4, 128), 0.9) == ">= 1: no"
    assert speed.verdict(("Breakout-MinAtar", 64, 128), 0.9) == ""


def test_the_clock_of_compiling_starts_before_anything_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Anakin:
        def init(self, seed: int) -> None: ...

        def compile(self) -> None: ...

    def make_architecture(experiment: Experiment) -> Anakin:
        clock.append(clock[-1] + 5.0)
        return Anakin()

    clock = [100.0]
    monkeypatch.setattr(memory.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(Experiment, "make_architecture", make_architecture)
    assert memory._compile_seconds("ppo_cartpole") == 5.0


def test_jobs_have_a_core_each(tmp_path: pathlib.Path) -> None:
    job = learning.Job("ppo_cartpole", 3, tmp_path / "run")
    assert job.command(1)[-2:] == ["--devices", "1"]
    assert "--devices" not in job.command(None)
    with pytest.raises(ValueError, match="999"):
        learning.run_all([job], at_once=999)


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        learning.main(["ppo_cartpol"])
    assert "ppo_cartpol; there are ppo_cartpole" in capsys.readouterr().err
