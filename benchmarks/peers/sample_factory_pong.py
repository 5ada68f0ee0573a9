"""Sample Factory's APPO on Pong: agent steps per second, from its own log of the samples that came in."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

# In the log, every five seconds: "Fps is (10 sec: ...). ... Samples: 83856." A sample is an agent step.
LINE = re.compile(r"Fps is .*? Samples: (\d+)\.")
# Its processes are spawned and import the module that began the program. Nothing else makes ALE known to them.
PROGRAM = """
import ale_py
from sf_examples.atari.train_atari import main

if __name__ == "__main__":
    main()
"""
WARM_UP = 30.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs-per-worker", type=int, default=16)
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--batches-per-epoch", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--network", default="convnet_simple")
    parser.add_argument("--units", type=int, default=512)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "train.py")
        with open(program, "w") as file:
            file.write(PROGRAM)
        found = samples(
            [
                *(sys.executable, program, "--env=atari_pong", "--device=cpu", "--use_rnn=False", "--async_rl=True"),
                *(f"--train_dir={folder}", "--experiment=pong", "--with_wandb=False", "--save_every_sec=100000"),
                *(f"--num_workers={args.workers}", f"--num_envs_per_worker={args.envs_per_worker}"),
                *(f"--worker_num_splits={args.splits}", f"--rollout={args.length}", f"--batch_size={args.batch}"),
                *(f"--num_batches_per_epoch={args.batches_per_epoch}", f"--num_epochs={args.epochs}"),
                *(f"--encoder_conv_architecture={args.network}", f"--encoder_conv_mlp_layers={args.units}"),
            ],
            args.seconds,
        )
    (began, first), (ended, last) = found[0], found[-1]
    rate = (last - first) / (ended - began)
    print(json.dumps(vars(args) | {"library": "sample-factory", "steps_per_second": rate}))


def samples(command, seconds):
    """When a line came, and how many there were, in the `seconds` after the warm-up.

    An error in one process leaves the others waiting, and its own limit of seconds ends nothing, so that it is ended
    from here in any case."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    limit = threading.Timer(seconds + WARM_UP + 120, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    log, found = [], []
    try:
        for line in process.stdout:
            log.append(line)
            if match := LINE.search(line):
                found.append((time.monotonic(), int(match[1])))
                if found[-1][0] - found[0][0] > WARM_UP + seconds:
                    break
    finally:
        limit.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    warm = [(when, count) for when, count in found if when - found[0][0] >= WARM_UP]
    if len(warm) < 2:
        sys.exit(f"Sample Factory has not logged its speed:\n{''.join(log)[-3000:]}")
    return warm


if __name__ == "__main__":
    main()
