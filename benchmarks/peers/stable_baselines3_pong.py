"""Stable-Baselines3's PPO on Pong: agent steps per second."""

import argparse
import json
import time

import ale_py
import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack


class Clock(BaseCallback):
    """Times whole iterations, rollout and update, after the first."""

    def __init__(self):
        super().__init__()
        self.marks = []

    def _on_rollout_start(self):
        self.marks.append((time.perf_counter(), self.num_timesteps))

    def _on_step(self):
        return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--processes", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    gymnasium.register_envs(ale_py)
    kind = {"vec_env_cls": SubprocVecEnv} if args.processes else {}
    environment = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=args.envs, seed=0, **kind), 4)
    model = PPO(
        "CnnPolicy", environment, n_steps=args.length, batch_size=args.batch, n_epochs=args.epochs, device="cpu"
    )
    clock = Clock()
    model.learn(args.envs * args.length * (args.iterations + 1), callback=clock)
    (began, steps), (ended, all_steps) = clock.marks[1], clock.marks[-1]
    environment.close()
    print(
        json.dumps(
            vars(args) | {"library": "stable-baselines3", "steps_per_second": (all_steps - steps) / (ended - began)}
        )
    )


if __name__ == "__main__":
    main()
