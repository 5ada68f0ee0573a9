"""Sample Factory's APPO on Pong: agent steps per second, from its own log of the frames it has seen."""

import argparse
import json
import re
import subprocess
import sys
import tempfile


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=120)
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
        command = [
            *(sys.executable, "-m", "sf_examples.atari.train_atari", "--env=atari_pong", "--device=cpu"),
            *(f"--train_dir={folder}", "--experiment=pong", "--with_wandb=False", "--async_rl=True"),
            *(f"--num_workers={args.workers}", f"--num_envs_per_worker={args.envs_per_worker}"),
            *(f"--worker_num_splits={args.splits}", f"--rollout={args.length}", f"--batch_size={args.batch}"),
            *(f"--num_batches_per_epoch={args.batches_per_epoch}", f"--num_epochs={args.epochs}"),
            *(f"--encoder_conv_architecture={args.network}", f"--encoder_conv_mlp_layers={args.units}"),
            *(
                f"--train_for_seconds={args.seconds}",
                "--use_rnn=False",
                "--save_every_sec=100000",
                "--experiment_summaries_interval=1000",
            ),
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True)
    # "Fps is (10 sec: 3276.8, 60 sec: 3003.7, ...). Total num frames: 163840." Frames are the emulator's.
    found = re.findall(r"Fps is \(10 sec: \S+ 60 sec: ([0-9.]+)", log.stdout + log.stderr)
    if not found:
        sys.exit(f"Sample Factory has not logged its speed:\n{log.stdout[-2000:]}{log.stderr[-2000:]}")
    print(json.dumps(vars(args) | {"library": "sample-factory", "steps_per_second": float(found[-1]) / 4}))


if __name__ == "__main__":
    main()
