"""Transitions of two checkouts, side by side: means, stds, log-probs and gradients.

    git worktree add ../before main
    python scripts/bench/same_samplers.py ../before .

Prints the largest relative difference over published schedules; exit code 1 beyond 1e-5.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from same_runs import package_of

LIMIT = 1e-5
# Run in each checkout: {sampler/number: tensor of all its steps}.
TAKE = """
import sys, torch
from flowrl.samplers import cps, dance_sde, ddim, dpmpp, flow_sde, ode, sigmas
grids = [sigmas.linear(n) for n in (4, 10, 25, 50)] + [sigmas.shifted(28, 3.0), sigmas.sd3(10)]
samplers = dict(flow_sde=flow_sde, dance_sde=dance_sde, cps=cps, ddim=ddim)
out, make = {}, torch.Generator().manual_seed(0)
def add(name, value):
    out.setdefault(name, []).append(value.detach().flatten())
for grid in grids:
    for i in range(len(grid) - 2):
        x, v, noise = (torch.randn(3, 4, 8, 8, generator=make) for _ in range(3))
        sigma, sigma_next = grid[i].expand(3), grid[i + 1].expand(3)
        add("ode/mean", ode.transition(v, x, sigma, sigma_next).mean)
        for name, sampler in samplers.items():
            own = {"sigma_cap": grid[1]} if name == "flow_sde" else {}
            v = v.detach().requires_grad_()
            step = sampler.transition(v, x, sigma, sigma_next, eta=0.7, **own)
            y = (x + 0.1 * noise).detach()
            log_prob = getattr(sampler, "log_prob", type(step).log_prob)(step, y)
            add(f"{name}/mean", step.mean), add(f"{name}/std", step.std)
            add(f"{name}/log_prob", log_prob)
            add(f"{name}/gradient", torch.autograd.grad(log_prob.sum(), v)[0])
    x = torch.randn(2, 4, 8, 8, generator=make)
    add("dpmpp/sample", dpmpp.sample(lambda z, s: z.tanh() + float(s), x, grid))
torch.save({name: torch.cat(values) for name, values in out.items()}, sys.argv[1])
"""


def take(checkout: Path, folder: Path) -> dict[str, torch.Tensor]:
    """What the samplers of a checkout give."""
    package, file = package_of(checkout.resolve(), folder), folder / "taken.pt"
    env = os.environ | {"PYTHONPATH": str(package)}
    subprocess.run([sys.executable, "-c", TAKE, str(file)], env=env, cwd=folder, check=True)
    return torch.load(file, weights_only=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        old = take(args.old, Path(made) / "old")
        new = take(args.new, Path(made) / "new")
    worst = 0.0
    for name, before in old.items():
        gap = float((new[name] - before).abs().max() / before.abs().max())
        worst = max(worst, gap)
        print(f"{name:20} {gap:.1e}")
    return 1 if worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
