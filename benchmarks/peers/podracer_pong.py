"""Podracer's PPO under Sebulba on Pong: agent steps per second, with the settings that the other scripts take."""

import argparse
import json
import time

import jax

from podracer import experiments
from podracer.agents import PPOConfig
from podracer.networks import NetworkConfig
from podracer.sebulba import SebulbaConfig


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--network", default="nature")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    rows = args.envs * args.length
    if rows % args.batch:
        parser.error(f"--batch is {args.batch}; it must divide {args.envs} x {args.length} = {rows}")
    experiment = experiments.get(
        "ppo_pong",
        agent=PPOConfig(
            num_epochs=args.epochs,
            num_minibatches=rows // args.batch,
            reward_clip=1.0,
            network=NetworkConfig(torso=args.network, shared=True),
        ),
        architecture=SebulbaConfig(
            num_envs=args.envs, rollout_length=args.length, threads_per_actor_device=args.threads
        ),
    )
    with experiment.make_architecture() as sebulba:
        state, _ = sebulba.run(sebulba.init(0), 2)
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < args.seconds:
            state, window = sebulba.run(state, 1)
            steps += int(window.env_steps)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - began
    print(json.dumps(vars(args) | {"library": "podracer", "steps_per_second": steps / seconds}))


if __name__ == "__main__":
    main()
