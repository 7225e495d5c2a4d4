"""Pipelines of diffusers on a device that is not there: are all tensors of a call on one device?

    python scripts/bench/other_device.py [NAME ...]

Each case of tests/helpers/zoo is put on the device of tests/helpers/far.py, which computes on the
CPU and raises where an operator is given tensors of two devices, as a GPU would. There it is loaded
(its call is inferred), compared with the pipeline itself, and asked for a velocity with a gradient
and for media. Exit code 1 where a case that scripts/bench/pipelines.py passes fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import far  # noqa: E402
import pipelines  # noqa: E402
import pytest  # noqa: E402
from zoo import cases  # noqa: E402
from zoo.case import PROMPTS, Case  # noqa: E402


def attempt(case: Case) -> None:
    """All that a case is asked for there; raises where something is elsewhere."""
    policy = pipelines.load(case, case.make())
    policy.self_check()
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    rows, own = torch.tensor([0, 1]), list(case.conditions) or None
    cond, sigmas = policy.encode(list(PROMPTS), own), policy.schedule(8).sigmas
    x = policy.start(far.far(noise), sigmas[0].item(), cond, rows)
    v = policy.velocity(x, sigmas[2].item(), cond, rows)
    v.square().mean().backward()
    media = policy.decode(x, 0.0, cond, rows)
    if not (isinstance(v, far.Far) and isinstance(media, far.Far)):
        raise ValueError("a result is not on the device")


def reason(case: Case) -> str:
    """Why a case fails there, "" where it passes."""
    patches: Any = pytest.MonkeyPatch()
    try:
        with far.whole_runs(patches):
            attempt(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    given, known = parser.parse_args(), cases()
    passing = {r["name"] for r in pipelines.read(pipelines.KEPT) if r["failed"] is None}
    names = given.names or [name for name in known if name in passing]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = 0
    for name in names:
        why = reason(known[name])
        failed += bool(why)
        print(f"{name}  {why or 'passes'}", flush=True)
    print(f"{len(names) - failed} of {len(names)} pass")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
