"""Forks processes that save in a loop, kills each at a random moment, and looks at what is there; prints JSON.

python tests/kill_saves.py FOLDER KILLS NAME
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import torch

import nanscan


def save_until_killed(path: str, ready: int, seed: int) -> None:
    torch.set_num_threads(1)
    for step in range(1, 1_000_000):
        numel = random.Random(f"{seed} {step}").choice((1_000, 300_000, 3_000_000))
        state = {
            "step": step,
            "numel": numel,
            "w": torch.full((numel,), float(step)),
            "b": torch.full((7,), float(step)),
        }
        nanscan.save(state, path)
        if step == 1:
            os.write(ready, b"1")


def fork_and_kill(path: str, dice: random.Random) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(path, write, dice.randrange(1 << 30))
        finally:
            os._exit(1)
    os.read(read, 1)
    time.sleep(dice.random() * 0.05)  # the moment of the kill is what is varied here
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


def look(path: str) -> str:
    state = nanscan.load(path)
    whole = state["w"].numel() == state["numel"] and bool((state["w"] == state["step"]).all())
    return "complete" if whole and bool((state["b"] == state["step"]).all()) else "mixed"


def main(folder: str, kills: int, name: str) -> None:
    dice, found, leftovers = random.Random(0), [], []
    path = os.path.join(folder, name)
    for _ in range(kills):
        fork_and_kill(path, dice)
        found.append(look(path))
        leftovers.append(len(os.listdir(folder)) - 1)
    nanscan.save({"step": 0}, path) if name.endswith(".pt") else nanscan.save({"w": torch.ones(1)}, path)
    print(json.dumps({"found": found, "leftovers": leftovers, "end": os.listdir(folder)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
