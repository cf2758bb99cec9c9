"""An optimizer with a closure: when LBFGS steps out of the domain of a log, the guard puts everything back.

f(x) = sum(x - log x) has its minimum at x = 1 and no value for x < 0. A full step from near 0 lands there: the second
evaluation inside LBFGS is NaN. The guard restores weights and history, and the loop tries again with a smaller step.

Run: python examples/lbfgs_closure.py
"""

import warnings

import torch

import nanscan


def main() -> None:
    warnings.simplefilter("ignore", nanscan.NonFiniteWarning)  # it is printed here instead
    x = torch.nn.Parameter(torch.tensor([0.05, 0.2, 3.0]))
    optimizer = nanscan.wrap(torch.optim.LBFGS([{"params": [x], "param_names": ["x"]}], lr=64.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x - torch.log(x)).sum()
        loss.backward()
        return loss

    for step in range(40):
        optimizer.step(closure)
        if optimizer.step_was_skipped:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            print(f"step {step}: {optimizer.last_report.bad[0].describe()}; lr is now {group['lr']:g}")

    print(f"skipped {optimizer.skipped_steps}; x = {[round(value, 3) for value in x.tolist()]}")


if __name__ == "__main__":
    main()
