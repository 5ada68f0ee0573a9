"""`python -m benchmarks.learning [NAME ...] [--seeds N] [--out DIR] [--jobs N]`, or `make reproduce`.

Trains named experiments with several seeds, through the command line that users have, and writes a table and a picture
of each. Seeds that are done with the settings of now are kept: run it again after an interruption, or with more seeds.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks import machine
from benchmarks.learning_table import Target, markdown
from podracer import experiments
from podracer.run_directory import RunDirectory

TARGETS = {
    target.experiment: target
    for target in (
        Target("ppo_cartpole", 490, seeds=10, needed=0.9, reference="PureJaxRL: 500 at 5e5 steps"),
        Target("ppo_breakout_minatar", 40, reference="gymnax 28, PureJaxRL about 40, at 1e7 steps"),
        Target("ppo_asterix_minatar", 20, reference="gymnax 15 at 1e7 steps, Pgx 22 to 25 at 2e7"),
        Target("ppo_freeway_minatar", 60, reference="gymnax 58 at 1e7 steps, Pgx 63 at 2e7"),
        Target("ppo_space_invaders_minatar", 140, reference="gymnax 131 at 1e7 steps, Pgx 145 to 153 at 2e7"),
        Target("ppo_acrobot", -85, reference="own target"),
        Target("ppo_pendulum", -180, reference="own target"),
        Target("ppo_mountain_car_continuous", 90, reference="Gymnasium: solved at 90"),
        Target("impala_breakout_minatar", 25, reference="gymnax 28, of PPO, at 1e7 steps"),
        Target("ppo_memory", 0.9, reference="1 with memory, 0 without"),
        Target("ppo_cartpole_gymnasium", 475, reference="Gymnasium: solved at 475"),
        Target("ppo_half_cheetah", 1500, reference="own target"),
        Target("ppo_pong", 18, reference="own target, within 12 million frames; 21 is all there is"),
    )
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One seed of one experiment.

    Attributes:
        experiment: Its name.
        seed: Its seed.
        directory: The run directory.
    """

    experiment: str
    seed: int
    directory: pathlib.Path

    def summary(self) -> dict[str, Any] | None:
        """What the finished run says of itself; None if there is none of this seed and the experiment as it is now."""
        try:
            summary = json.loads((self.directory / "summary.json").read_text())
            run = RunDirectory(self.directory).experiment()
            now = experiments.get(self.experiment, seed=self.seed, devices=run.devices)
            return summary if run == now and "mean" in summary["evaluation"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def command(self, devices: int | None) -> list[str]:
        """Training from the start: an unfinished run may be of an older version of the experiment."""
        podracer = pathlib.Path(sys.executable).with_name("podracer")
        command = [str(podracer), "train", self.experiment, "--seed", str(self.seed)]
        command += ["--run-dir", str(self.directory), "--overwrite", "--quiet"]
        return command if devices is None else [*command, "--devices", str(devices)]


def run_job(job: Job, cores: "queue.SimpleQueue[int] | None") -> str | None:
    """Trains in a process of its own, on one of `cores` if given. Returns what went wrong, or None."""
    job.directory.parent.mkdir(parents=True, exist_ok=True)
    core = None if cores is None else cores.get()
    try:
        if core is not None:
            # Of this thread; the process that it starts inherits it.
            os.sched_setaffinity(0, {core})
        command = job.command(None if core is None else 1)
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    finally:
        if cores is not None and core is not None:
            cores.put(core)
    if result.returncode == 0 and job.summary() is not None:
        return None
    last = result.stderr.strip().splitlines()[-1:] or ["no message"]
    return f"{job.experiment} seed {job.seed}: exit code {result.returncode}: {last[0]}"


def run_all(jobs: Iterable[Job], at_once: int) -> list[str]:
    """Trains what is not done yet, and returns what went wrong."""
    waiting = [job for job in jobs if job.summary() is None]
    cores: queue.SimpleQueue[int] | None = None
    if at_once > 1:
        if not hasattr(os, "sched_setaffinity"):
            raise ValueError("--jobs needs os.sched_setaffinity, which this system lacks; leave it out")
        available = sorted(os.sched_getaffinity(0))
        if at_once > len(available):
            raise ValueError(f"--jobs is {at_once}; this process may use {len(available)} cores")
        cores = queue.SimpleQueue()
        for core in available[:at_once]:
            cores.put(core)
    errors = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(run_job, job, cores): job for job in waiting}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), start=1):
                error, job = future.result(), futures[future]
                summary = job.summary()
                outcome = error or f"{job.experiment} seed {job.seed}: {summary['evaluation']['mean']:.4g}"  # type: ignore[index]
                print(f"[{done}/{len(waiting)}] {outcome}", flush=True)
                errors += [error] if error else []
        except BaseException:
            # Ctrl-C reaches the running processes by itself; those that have not started must not start.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


def plot(experiment: str, jobs: Iterable[Job], out: pathlib.Path) -> pathlib.Path | None:
    """Mean and spread of the finished seeds."""
    from podracer.plotting import plot_curves

    finished = [job.directory for job in jobs if job.experiment == experiment and job.summary() is not None]
    return plot_curves(finished, out / f"{experiment}.png") if finished else None


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a run failed, 0 otherwise, targets missed or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seeds", type=int, help="per experiment, from 0; by default as many as its target says")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/reproduce"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each on one core and one device")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(TARGETS))
    if unknown:
        parser.error(f"no target for {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if options.jobs < 1 or (options.seeds is not None and options.seeds < 1):
        parser.error("--jobs and --seeds must be at least 1")
    targets = [TARGETS[name] for name in options.names or TARGETS]
    jobs = [
        Job(target.experiment, seed, options.out / target.experiment / f"seed_{seed}")
        for target in targets
        for seed in range(options.seeds or target.seeds)
    ]
    try:
        errors = run_all(jobs, options.jobs)
    except ValueError as error:
        parser.error(str(error))
    summaries = {
        target.experiment: [s for job in jobs if job.experiment == target.experiment and (s := job.summary())]
        for target in targets
    }
    table = markdown(targets, summaries)
    options.out.mkdir(parents=True, exist_ok=True)
    # Of the table alone: seeds that were finished before may be of another commit, or another machine.
    table += f"\nTable made on {machine.in_words(machine.describe())}.\n"
    (options.out / "results.md").write_text(table)
    print(table)
    for target in targets:
        path = plot(target.experiment, jobs, options.out)
        if path is not None:
            print(path)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
