"""Podracer against another library on Pong, in alternating rounds with equal settings.

`python benchmarks/peers/compare.py sample_factory_pong.py --python /tmp/sample-factory/bin/python`
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
# What Sample Factory calls the convolutions of a network, and the units after them.
NETWORKS = {"nature": ("convnet_atari", 512), "impala": ("convnet_impala", 256)}
SETTINGS = {
    # Stable-Baselines3's defaults for Atari.
    "stable_baselines3_pong.py": {"envs": 8, "length": 128, "batch": 256, "epochs": 4, "network": "nature"},
    # Where Sample Factory is fast on two cores: one pass, in few large batches.
    "sample_factory_pong.py": {"envs": 64, "length": 64, "batch": 2048, "epochs": 1, "network": "impala"},
}


def command_of_peer(script, python, settings, seconds):
    own = {name: settings[name] for name in ("length", "batch", "epochs")}
    if script.startswith("sample_factory"):
        # Two workers; what comes in before an update is as many rows as ours.
        network, units = NETWORKS[settings["network"]]
        own |= {"envs-per-worker": settings["envs"] // 2, "network": network, "units": units}
        own |= {"batches-per-epoch": settings["envs"] * settings["length"] // settings["batch"], "seconds": seconds}
    else:
        own |= {"envs": settings["envs"]}
    return [python, str(HERE / script), *(f"--{name}={value}" for name, value in own.items())]


def rate(command):
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode:
        sys.exit(f"{' '.join(command)} ended with {output.returncode}:\n{output.stderr[-2000:]}")
    return json.loads(output.stdout.splitlines()[-1])["steps_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=SETTINGS)
    parser.add_argument("--python", required=True, help="of the peer's virtual environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=120, help="of a round, of each that can be told how long")
    for name in ("envs", "length", "batch", "epochs"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--network", choices=NETWORKS)
    args = parser.parse_args()
    settings = {name: getattr(args, name) or value for name, value in SETTINGS[args.peer].items()}
    if args.peer.startswith("sample_factory") and settings["envs"] % 4:
        parser.error(f"--envs is {settings['envs']}; Sample Factory's two workers need a multiple of 4")
    if args.peer.startswith("stable") and settings["network"] != "nature":
        parser.error("Stable-Baselines3 has the Nature network only")
    ours = [sys.executable, str(HERE / "podracer_pong.py"), f"--seconds={args.seconds}"]
    commands = {
        "podracer": [*ours, *(f"--{name}={value}" for name, value in settings.items())],
        args.peer: command_of_peer(args.peer, args.python, settings, args.seconds),
    }
    rates = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, command in commands.items():
            rates[name].append(rate(command))
            print(f"{name}: {rates[name][-1]:,.0f} steps/s", file=sys.stderr, flush=True)
    ratios = [a / b for a, b in zip(rates["podracer"], rates[args.peer], strict=True)]
    print(json.dumps({"settings": settings, "steps_per_second": rates, "ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
