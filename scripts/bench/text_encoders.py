"""Whose text encoders can be trained: the gradient of the replayed call against the pipeline's own.

    python scripts/bench/text_encoders.py [NAME ...]

NAME: a case of tests/helpers/zoo; default: all that can be replayed. LoRA on the text encoders
alone is moved off its start; then the gradient of the sum of squared velocities of two prompts is
taken through the replayed call, and through the pipeline's own loop run with autograd. Relative
differences of both are printed, with the reason where there are none. Exit code 1 if a gradient
differs by more than LIMIT.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flowrl
from flowrl.policy.check import relative

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from zoo import cases  # noqa: E402
from zoo.case import PROMPTS, Case  # noqa: E402

LIMIT = 1e-4
LORA = {"rank": 2, "alpha": 2.0}


def compared(case: Case) -> tuple[float, float, list[str]]:
    """(difference of the velocity, of the gradient, the encoders that are trained)."""
    own = list(case.conditions) or None
    policy = flowrl.load_policy(
        case.make(),
        lora=LORA,
        parts=["text_encoder"],
        example=own[0] if own else None,
        **case.call,
    )
    generator = torch.Generator().manual_seed(0)
    parameters = policy.parts["text_encoder"]
    with torch.no_grad():  # where the second matrices are zero, the first ones have no gradient
        for parameter in parameters.values():
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    x = torch.randn(2, *policy.latent_shape, generator=generator)
    sigma = policy.schedule(8).sigmas[1].item()
    cond, rows = policy.encode(list(PROMPTS), own), torch.tensor([0, 1])
    v, gradient = through(lambda: policy.velocity(x, sigma, cond, rows), parameters)
    expected = through(lambda: policy.reentry(x, sigma, list(PROMPTS), own), parameters)
    if not expected[1].any():
        raise ValueError("the pipeline's own loop gives no gradient")
    trained = sorted({name.split(".")[0] for name in parameters})
    return relative(v, expected[0]), relative(gradient, expected[1]), trained


def through(velocity: Callable[[], Tensor], parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(the velocity, the gradient of its squares, all parameters in a row)."""
    v = velocity()
    v.square().sum().backward()
    each = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    return v.detach(), torch.cat([gradient.flatten() for gradient in each])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    known = cases()
    names = parser.parse_args().names or [name for name, case in known.items() if not case.refused]
    torch.set_num_threads(1)
    table = Table("pipeline", "velocity", "gradient", "trained, or why not")
    passed = differ = 0
    for name in names:
        try:
            velocity, gradient, trained = compared(known[name])
        except ValueError as error:
            table.add_row(name, "", "", str(error))
            continue
        table.add_row(name, f"{velocity:.0e}", f"{gradient:.0e}", ", ".join(trained))
        passed += gradient <= LIMIT
        differ += gradient > LIMIT
    Console(width=120).print(table)
    print(f"{passed} of {len(names)} have the gradient of the pipeline's own loop")
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
