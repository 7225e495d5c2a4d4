"""The part of docs/results.md about what goes beyond policy gradients on the denoiser."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import cells
from cells import Cell
from gains import (
    Runs,
    difference,
    gain,
    gains_of,
    marks,
    over_seeds,
    results,
    scores_of,
    settings_of,
    student,
)

from flowrl.data.prompts import load_prompts
from flowrl.report.tables import markdown as table

TRAINED = ("text_alone", "text_too", "bayes", "bandit", "two_tasks")  # against nft's own runs
REWARDS = ("verifier", "both_summed", "both_modes", "preference_nft", "preference_tree")
AGAINST = "nft"


def tables(done: Runs, beyond: Runs, hacked: Runs, specialists: Runs) -> dict[str, str]:
    """The tables that results.md.jinja shows; "" where no cell is there."""
    climbing = {method: results(cells.finals(method)) for method in cells.CLIMBING}
    found = {name: results(cells.searches(name)) for name in cells.SEARCHES}
    return {
        "trained_table": trained_table(done, beyond),
        "tasks_table": tasks_table(done, beyond),
        "rewards_table": rewards_table({**beyond, **climbing}),
        "distance_table": distance_table(beyond),
        "hacked_table": hacked_table(hacked),
        "specialists_table": specialists_table(done, specialists),
        "search_table": search_table(done, found),
    }


def trained_table(done: Runs, beyond: Runs) -> str:
    """Other weights and other prompts, each against nft's runs."""
    known = {name: beyond[name] for name in TRAINED if beyond.get(name)}
    if not known or not done.get(AGAINST):
        return ""
    head = ["run", "gain", "over seeds [95%]", "after, by seed", "minus nft's"]
    rows = [_trained_row(AGAINST, done[AGAINST], "")]
    for name, runs in known.items():
        change = difference(done[AGAINST], runs).replace("\n", " ").rstrip(".")
        rows.append(_trained_row(name, runs, change))
    return table(head, rows)


def _trained_row(name: str, runs: list[Cell], change: str) -> list[str]:
    return [name, f"{gain(runs).mean:+.3f}", over_seeds(runs), scores_of(runs), change]


def tasks_table(done: Runs, beyond: Runs) -> str:
    """Strict accuracy by task, where all tasks are trained and where two are."""
    if not beyond.get("two_tasks") or not done.get(AGAINST):
        return ""
    rows = {
        "before": by_task(done[AGAINST], "images_before"),
        AGAINST: by_task(done[AGAINST], "images"),
        "two_tasks": by_task(beyond["two_tasks"], "images"),
    }
    tasks = list(rows["before"])
    body = [[name, *(f"{of[task]:.3f}" for task in tasks)] for name, of in rows.items()]
    return table(["run", *tasks], body)


def specialists_table(done: Runs, specialists: Runs) -> str:
    """Strict accuracy by task of a student, of its two teachers, and of training on all tasks."""
    if not done.get("opd"):
        return ""
    known = {**specialists, "opd": done["opd"], AGAINST: done.get(AGAINST)}
    rows = {"before": by_task(done["opd"], "images_before")}
    rows |= {name: by_task(runs, "images") for name, runs in known.items() if runs}
    means = {"before": cells.score(done["opd"][0], "before")}
    means |= {name: statistics.mean(map(cells.score, runs)) for name, runs in known.items() if runs}
    tasks = list(rows["before"])
    body = [
        [name, *(f"{of[task]:.3f}" for task in tasks), f"{means[name]:.3f}"]
        for name, of in rows.items()
    ]
    return table(["run", *tasks, "all images"], body)


def hacked_table(runs: Runs) -> str:
    """Gains of a planted proxy that was trained on, and of the verifier that was only read."""
    rows = []
    for name, own in runs.items():
        proxy = [c["paired"]["proxy"]["difference"] for c in own]
        strict = gains_of(own)
        changes = [text for values in (proxy, strict) for text in (said(values), spread(values))]
        best = [max(point.get("strict", 0) for point in c["curve"]) for c in own]
        set_here = cells.CLAIMS[name].words[len(cells.HACKABLE) :]
        keys = " ".join(f"`{word.removeprefix('algorithm.')}`" for word in set_here)
        rows.append([name, keys, *changes, f"{statistics.mean(best):.3f}", scores_of(own)])
    head = ["run", "settings", "proxy gain", "over seeds [95%]", "verifier gain"]
    head += ["over seeds [95%]", "best on the way", "after, by seed"]
    return table(head, rows) if rows else ""


def by_task(runs: list[Cell], key: str) -> dict[str, float]:
    """Share of right images of each task, over all runs."""
    prompts = load_prompts("shapes:eval")
    found: dict[str, list[float]] = {}
    for c in runs:
        for i, value in enumerate(marks(c[key])):
            found.setdefault(prompts[i % len(prompts)]["task"], []).append(value)
    return {task: statistics.mean(values) for task, values in found.items()}


def rewards_table(runs: Runs) -> str:
    """Gains in both rewards, by which of them was trained on and how."""
    known = {name: runs[name] for name in (*REWARDS, *cells.CLIMBING) if runs.get(name)}
    if not known:
        return ""
    head = ["run", "setting", "preference", "over seeds [95%]", "strict", "over seeds [95%]"]
    rows = []
    for name, own in known.items():
        rate = settings_of(own[0])["optimizer.lr"]
        preference = [c["paired"]["preference"]["difference"] for c in own]
        strict = gains_of(own)
        pairs = [text for values in (preference, strict) for text in (said(values), spread(values))]
        rows.append([name, f"{own[0]['method']}, {rate}", *pairs])
    return table(head, rows)


def climbing_said(method: str, runs: list[Cell]) -> str:
    """What the runs of a method that climbs a reward's gradient say, for its page."""
    gains = {
        "the preference": [c["paired"]["preference"]["difference"] for c in runs],
        "strict accuracy": gains_of(runs),
    }
    of = ", ".join(f"{said(v)} {spread(v)} of {name}" for name, v in gains.items())
    rate = settings_of(runs[0])["optimizer.lr"]
    return (
        f"Trained on the tiny preference model of `shapes-sd3` at `optimizer.lr={rate}`, within the"
        f" budget of all methods, {len(runs)} seeds, intervals over them:\n{of}.\n"
        "[Results](../results.md#a-reward-with-a-gradient) says what else was trained on it.\n\n"
        f"    python scripts/bench/algorithms.py run {method}"
    )


def said(values: list[float]) -> str:
    return f"{statistics.mean(values):+.3f}"


def spread(values: list[float]) -> str:
    """Student's interval over seeds."""
    if len(values) < 2:
        return "one seed"
    over = student(values)
    return f"[{over.low:+.3f}, {over.high:+.3f}]"


def distance_table(beyond: Runs) -> str:
    """Strict accuracy and distance from the base, by the weight of the KL and of RLG."""
    known = {kl: runs for kl in cells.KLS if (runs := beyond.get(f"kl_{kl}"))}
    if not known:
        return ""
    head = ["KL weight", *(f"RLG {weight:g}" for weight in cells.RLG)]
    rows = []
    for kl, runs in known.items():
        readings = list(zip(*(c["rlg"] for c in runs), strict=True))
        rows.append([kl, *(f"{mean(r, 'strict')} at {mean(r, 'distance')}" for r in readings)])
    return table(head, rows)


def mean(readings: Iterable[dict[str, Any]], key: str) -> str:
    return f"{statistics.mean(r[key] for r in readings):.3f}"


def search_table(done: Runs, found: Runs) -> str:
    """Samples chosen or made anew, and trained models, by what a picture costs."""
    known = {name: runs for name, runs in found.items() if runs}
    if not known:
        return ""
    rows = [
        [
            name,
            f"{statistics.mean(c['calls'] for c in runs):,.0f}",
            "0",
            f"{gain(runs).mean:+.3f}",
            over_seeds(runs),
        ]
        for name, runs in known.items()
    ]
    for method in (AGAINST, best_grpo(done)):
        if done.get(method):
            own = done[method]
            spent = statistics.mean(c["curve"][-1]["calls"] for c in own)
            rows.append([method, "8", f"{spent:,.0f}", f"{gain(own).mean:+.3f}", over_seeds(own)])
    head = ["way", "calls a picture", "rows of training", "gain", "over seeds [95%]"]
    return table(head, rows)


def best_grpo(done: Runs) -> str:
    """The method of the GRPO family with the largest gain."""
    family = [method for method in done if "grpo" in method]
    return max(family, key=lambda method: gain(done[method]).mean, default="")
