"""A run that can be killed at any moment: start it again, and it ends with the same weights, bit for bit.

Handwritten digits (scikit-learn), dropout, a shuffling loader with a position, a scheduler, a guarded optimizer.
Interrupt it as you like, with Ctrl-C, `kill` or `kill -9`, and run the same command again.

Run: python examples/checkpointed_training.py --out digits-run
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import nanscan
from nanscan.demo.data import load_digits


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    digits = load_digits()
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer = nanscan.wrap(optimizer, model, clip_norm=1.0)
    loader = StatefulDataLoader(TensorDataset(digits.train_images, digits.train_labels), args.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}

    with nanscan.CheckpointManager(
        args.out / "checkpoints", keep=args.keep, every_steps=args.every, background=not args.foreground
    ) as manager:
        restored = manager.restore(**run)
        step, first_epoch = (restored.step, restored.epoch) if restored else (0, 0)
        print(f"resumed from step {step}")
        for epoch in range(first_epoch, args.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                scheduler.step()
                step += 1
                manager.save(step, epoch=epoch, **run)
            print(f"epoch {epoch}: {optimizer.health()}")

    nanscan.save(model.state_dict(), args.out / "final.pt")
    model.eval()
    accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean()
    print(f"step {step}: test accuracy {accuracy:.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("digits-run"), help="folder of the run")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--keep", type=int, default=3, help="how many checkpoints stay")
    parser.add_argument("--foreground", action="store_true", help="wait until each checkpoint is on the disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()
