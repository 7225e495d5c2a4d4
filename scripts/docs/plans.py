"""Draw the plan of every method, docs/images/plans/NAME.svg: which steps are ODE, which are noisy,
which are trained, and which several samples share.

python scripts/docs/plans.py    # a test checks that the pictures are up to date

A plan is the table of edges that `Algorithm.plan` returns (flowrl/types.py), of the first command
on the method's page, in its first iteration.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from flowrl.algorithms.common.base import Algorithm
from flowrl.config import build, schema
from flowrl.config.load import load_config
from flowrl.samplers import sigmas
from flowrl.samplers.sde import UNMASKING
from flowrl.types import SDE, Plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images" / "plans"
WIDTH, MARGIN = 640, 16  # pixels
TALL = 300  # pixels that all rows take at most
ROW = (5, 28)  # pixels of a row, at least and at most
COLOURS = {False: "#5f6b6d", True: "#b45309"}  # of an ODE step, of a noisy one
LEGEND = (
    "*The plan of the first command below. Noise is on the left, the finished picture on the right."
    " Grey: ODE steps. Orange, dashed: noisy steps. Thick: trained. Lines that fork share what is"
    " before the fork.*"
)
OF_TOKENS = (
    "*The plan of the first command below. All tokens are masked on the left, none on the right."
    " Each step reveals some of them. Thick: trained.*"
)
PLACES = 64  # of a grid of tokens, the embedded model's


def first_command(name: str) -> list[str]:
    """Words after `flowrl train` of the first command on a method's page."""
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    found = re.search(rf"^flowrl train (.*\balgorithm={name}\b.*)$", page, re.M)
    assert found, f"docs/algorithms/{name}.md has no command"
    return shlex.split(found[1], comments=True)


def planned(name: str) -> tuple[Algorithm, Plan]:
    """The method and its plan in iteration 0."""
    cfg = load_config(None, first_command(name))
    method = build.make_algorithm(cfg)
    grid = sigmas.shifted(cfg.sampler.steps, 3)
    if method.unmasks:
        grid = sigmas.unmasking(PLACES, cfg.sampler.steps)
    return method, method.plan(grid, sampler=cfg.sampler, iteration=0, seed=0)


def heights(plan: Plan) -> dict[int, float]:
    """Row of the end of each edge: samples one below the other, forks in their middle."""
    children: dict[int, list[int]] = {}
    for edge, parent in enumerate(plan.parent.tolist()):
        children.setdefault(parent, []).append(edge)
    rows: dict[int, float] = {}

    def place(edge: int) -> float:
        below = children.get(edge)
        if below is None:
            rows[edge] = len([e for e in rows if e not in children])
        else:
            rows[edge] = sum(place(child) for child in below) / len(below)
        return rows[edge]

    for edge in children[-1]:
        place(edge)
    return rows


def drawing(plan: Plan) -> str:
    """The plan as SVG: columns are noise levels, in order; rows are samples."""
    rows, levels = heights(plan), sorted({*plan.sigma.tolist(), *plan.sigma_next.tolist()})
    across = (WIDTH - 2 * MARGIN) / (len(levels) - 1)
    x = {level: WIDTH - MARGIN - i * across for i, level in enumerate(levels)}
    down = min(max(TALL / plan.leaves, ROW[0]), ROW[1])
    tall = 2 * MARGIN + down * (plan.leaves - 1)
    starts = {root: [] for root in plan.root.tolist()}
    for edge, parent in enumerate(plan.parent.tolist()):
        if parent < 0:
            starts[int(plan.root[edge])].append(rows[edge])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall:g}"'
        f' width="{WIDTH}" height="{tall:g}" fill="none" stroke-linecap="round">'
    ]
    for edge, parent in enumerate(plan.parent.tolist()):
        own = starts[int(plan.root[edge])]
        begin = rows[parent] if parent >= 0 else sum(own) / len(own)
        noisy, trained = int(plan.kind[edge]) == SDE, bool(plan.trained[edge])
        ends = [x[plan.sigma[edge].item()], MARGIN + down * begin]
        ends += [x[plan.sigma_next[edge].item()], MARGIN + down * rows[edge]]
        style = f'stroke="{COLOURS[noisy]}" stroke-width="{4 if trained else 1.5}"'
        style += ' stroke-dasharray="7 6"' if noisy else ""
        path = "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*ends)
        lines.append(f'<path d="{path}" {style}/>')
        dot = '<circle cx="{:.1f}" cy="{:.1f}" r="2.2" fill="{}"/>'
        lines.append(dot.format(*ends[2:], COLOURS[False]))
    return "\n".join([*lines, "</svg>"]) + "\n"


def said(name: str, plan: Plan) -> str:
    """What the picture shows, in words: its alternative text."""
    steps = len(set(plan.sigma.tolist()))
    noisy, trained = int((plan.kind == SDE).sum()), int(plan.trained.sum())
    samples = "1 sample" if plan.leaves == 1 else f"{plan.leaves} samples that share steps"
    if plan.sde in UNMASKING:
        return f"Plan of {name}: {samples}, {steps} steps that reveal tokens, {trained} trained"
    return (
        f"Plan of {name}: {samples}, {steps} noise levels, {plan.edges} steps,"
        f" of which {noisy} are noisy and {trained} trained"
    )


def figure(name: str) -> str:
    """The lines of a method's page that show its plan."""
    _, plan = planned(name)
    more = (
        "" if plan.trained.any() else " No step is trained; [Equations](#equations) has the loss."
    )
    legend = OF_TOKENS if plan.sde in UNMASKING else LEGEND
    legend = f"{legend.removesuffix('*')}{more}*"
    return f"![{said(name, plan)}](../images/plans/{name}.svg)\n\n{legend}\n\n"


def pictures() -> dict[Path, str]:
    """Every picture -> its SVG."""
    plans = {name: planned(name)[1] for name in schema.options("algorithm")}
    return {FOLDER / f"{name}.svg": drawing(plan) for name, plan in plans.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, svg in pictures().items():
        path.write_text(svg, encoding="utf-8")
