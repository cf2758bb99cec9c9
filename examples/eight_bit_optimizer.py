"""An 8-bit AdamW from bitsandbytes, on a CPU: a bad batch costs one step, and a checkpoint keeps the 8-bit state.

Run: python examples/eight_bit_optimizer.py
"""

import tempfile
import warnings

import bitsandbytes
import torch
from torch import nn

import nanscan


def make() -> tuple[nn.Module, nanscan.GuardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    inner = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=3e-3)  # tensors below 4096 elements stay in 32 bits
    return model, nanscan.wrap(inner, model, clip_norm=1.0)


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # it is printed here instead
    model, optimizer = make()
    inputs = torch.rand(2048, 16)
    targets = inputs.square().sum(1, keepdim=True)
    inputs[777, 3] = float("nan")

    for epoch in range(10):
        for rows in torch.arange(2048).split(64):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            loss.backward()
            optimizer.step()
            if optimizer.step_was_skipped and epoch == 0:
                print(f"rows {rows[0]}..{rows[-1]}: {optimizer.last_report.bad[0].describe()}")

    state = optimizer.state[model[0].weight]
    elements = state["state1"].numel() + state["state2"].numel()
    print(f"skipped {optimizer.skipped_steps} of 320 steps; loss {loss.item():.4f}")
    print(f"state of '0.weight': {elements} elements of {state['state1'].dtype}")

    with nanscan.CheckpointManager(tempfile.mkdtemp()) as manager:
        manager.save(320, model=model, optimizer=optimizer)
        manager.flush()
        again, resumed = make()
        manager.restore(model=again, optimizer=resumed)
    same = torch.equal(resumed.state[again[0].weight]["state1"], state["state1"])
    print(f"8-bit state restored bit for bit: {same}")


if __name__ == "__main__":
    main()
