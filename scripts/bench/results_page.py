"""docs/results.md and its plots, from the cells that scripts/bench/algorithms.py has written.

    python scripts/bench/results_page.py

Every number is a cell's; results.md.jinja holds the words. The part about a method's runs on its
own page, docs/algorithms/METHOD.md, is written too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import cells
import jinja2
import plots
import results_beyond
import results_models
from cells import Cell
from gains import (
    Gain,
    Runs,
    difference,
    few_gain,
    gain,
    gains_of,
    learns,
    over_seeds,
    results,
    scores_of,
    seconds,
    seed_gain,
    settings_of,
    texts_of,
)

from flowrl.report.tables import markdown as table

PAGE = cells.FOLDER.parent / "results.md"
TEMPLATE = Path(__file__).with_name("results.md.jinja")
BEGIN = "<!-- results: written by scripts/bench/results_page.py -->"
END = "<!-- end of results -->"


def write() -> None:
    """Make the page anew."""
    done = _finished(cells.METHODS, cells.finals)
    claims = _finished(cells.CLAIMS, cells.claims)
    proxies = [c for name in list(claims) if name.startswith("proxy_") for c in claims.pop(name)]
    beyond, hacked, specialists, others, masked = (
        {name: claims.pop(name) for name in names if name in claims}
        for names in (
            cells.BEYOND,
            cells.HACKED,
            cells.TEACHERS,
            cells.OTHER_MODELS,
            cells.MASKED,
        )
    )
    verdicts = cells.FOLDER / "claims.txt"
    tables = {
        "main_table": main_table(done) if done else "",
        "plots": show_plots(done) if done else [],
        "equal_table": equal_table(done) if done else "",
        "settings_table": settings_table(),
        "tuning_table": tuning_table(),
        "claims_table": claims_table(claims) if claims else "",
        "proxy_table": proxy_table(proxies) if proxies else "",
        "proxy_difference": proxy_difference(proxies),
        **results_beyond.tables(done, beyond, hacked, specialists),
        "models_table": results_models.models_table(done, others),
        "masked_table": results_models.models_table({}, masked),
        "verdicts": verdicts.read_text().strip() if verdicts.exists() else "",
    }
    PAGE.write_text(page_of(tables))
    for method, runs in done.items():
        if method in cells.ALGORITHM:  # it stands on the page of its algorithm
            continue
        few = claims.get(f"{method}_few", [])
        others = [m for m, name in cells.ALGORITHM.items() if name == method and m in done]
        said = [run_said(method, runs), *(few_said(method, c) for c in few)]
        said += [run_said(other, done[other]) for other in others]
        fill(PAGE.parent / "algorithms" / f"{method}.md", "\n\n".join(said))
    for method, runs in _finished(cells.CLIMBING, cells.finals).items():
        text = results_beyond.climbing_said(method, runs)
        fill(PAGE.parent / "algorithms" / f"{method}.md", text)
    print(PAGE)


def _finished(names: Iterable[str], cells_of: Callable[[str], list[Cell]]) -> Runs:
    runs = {name: results(cells_of(name)) for name in names}
    return {name: own for name, own in runs.items() if own}


def page_of(tables: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(TEMPLATE.read_text()).render(
        budget=f"{cells.BUDGET:,}",
        third=f"{cells.BUDGET // 3:,}",
        images=cells.IMAGES,
        texts=len(set(texts_of("shapes:eval", cells.IMAGES))),
        **tables,
    )


# ---------------------------------------------------------------------------
# numbers


def winner_gains(runs: list[Cell]) -> list[float]:
    """The last policy/winner_gain of each run that has one."""
    key = "policy/winner_gain"
    series = [[point[key] for point in c["curve"] if key in point] for c in runs]
    return [s[-1] for s in series if s]


def at_shares(c: Cell) -> list[float]:
    """Strict accuracy at the marks and at the end of a run's budget."""
    return [p["strict"] for p in c["curve"] if "strict" in p] + [cells.score(c)]


def ranked(done: Runs) -> list[tuple[str, list[Cell]]]:
    """Methods with their runs, the largest gain first."""
    return sorted(done.items(), key=lambda item: -gain(item[1]).mean)


# ---------------------------------------------------------------------------
# tables


def named(words: list[str]) -> str:
    """Settings as a table shows them: the last value of each key, without `algorithm.`.

    What is trained on has a name of its own.
    """
    last = dict(word.split("=", 1) for word in words if not word.startswith("data."))
    return " ".join(f"`{key.removeprefix('algorithm.')}={value}`" for key, value in last.items())


def setting(c: Cell) -> str:
    """Learning rate and clip of a cell."""
    said = [settings_of(c).get(key) for key in ("optimizer.lr", "algorithm.clip")]
    return ", ".join(value for value in said if value)


def main_table(done: Runs) -> str:
    head = ["method", "gain", "over seeds [95%]", "learns", "over texts [95%]", "after, by seed"]
    head += ["rate, clip", "iterations", "network rows", "rows trained", "seconds", "winner gain"]
    before = cells.score(next(iter(done.values()))[0], "before")
    rows = [_main_row(method, runs) for method, runs in ranked(done)]
    return f"Before training: {before:.3f}.\n\n" + table(head, rows)


def _main_row(method: str, runs: list[Cell]) -> list[str]:
    last = [c["curve"][-1] for c in runs]
    spent = {key: statistics.mean(p[key] for p in last) for key in ("iteration", "calls", "rows")}
    pace, gains, over = seconds(method), winner_gains(runs), gain(runs)
    edge = ", edge" if at_edge(method) else ""
    return [
        f"[{method}](algorithms/{cells.ALGORITHM.get(method, method)}.md)",
        f"{over.mean:+.3f}",
        over_seeds(runs),
        learns(runs, over),
        f"[{over.low:+.3f}, {over.high:+.3f}]",
        scores_of(runs),
        setting(runs[0]) + edge,
        *(f"{value:,.0f}" for value in spent.values()),
        f"{pace * spent['calls']:.0f}" if pace else "",
        f"{statistics.mean(gains):+.2g}" if gains else "",
    ]


def equal_table(done: Runs) -> str:
    rows = []
    for method, runs in ranked(done):
        series = [at_shares(c) for c in runs]
        if all(len(s) == len(cells.MARKS) + 1 for s in series):
            means = map(statistics.mean, zip(*series, strict=True))
            rows.append([method, *(f"{mean:.3f}" for mean in means)])
    shares = [str(Fraction(share).limit_denominator(9)) for share in cells.MARKS]
    return table(["method", *shares, "all"], rows)


def settings_table() -> str:
    stated = {method: cells.words_of(method) for method in cells.METHODS}
    rows = [[method, named(words)] for method, words in stated.items() if words]
    return table(["method", "settings"], rows)


def tuning_table() -> str:
    rows = [_tuning_row(m, tried) for m in cells.METHODS if (tried := results(cells.tuning(m)))]
    width = max((len(row) for row in rows), default=1)
    head = ["method", *[""] * (width - 1)]
    return table(head, [row + [""] * (width - len(row)) for row in rows])


def _tuning_row(method: str, tried: list[Cell]) -> list[str]:
    """Scores with their settings, the best in bold and marked where its rate is the last tried."""
    best = max(tried, key=cells.score)
    said = [f"**{cells.score(r):.3f}**" if r is best else f"{cells.score(r):.3f}" for r in tried]
    named = [setting(r) + (", edge" if r is best and at_edge(method) else "") for r in tried]
    return [method, *(f"{score} ({name})" for score, name in zip(said, named, strict=True))]


def at_edge(method: str) -> bool:
    """Whether the best rate is the lowest or the highest tried: a better one may lie beyond."""
    tried = results(cells.tuning(method))
    if not tried:
        return False
    rates = sorted(map(rate_of, tried))
    return rate_of(max(tried, key=cells.score)) in (rates[0], rates[-1])


def rate_of(c: Cell) -> float:
    return float(settings_of(c)["optimizer.lr"])


def by_hand(name: str) -> bool:
    """Whether a claim's run sets what tuning chooses: its rate, or its clip."""
    chosen = ("optimizer.lr=", "algorithm.clip=")
    return any(word.startswith(chosen) for word in cells.CLAIMS[name].words)


def claims_table(claims: Runs) -> str:
    head = ["run", "method", "settings", "rate", "budget", "gain", "over seeds [95%]"]
    head += ["over texts [95%]", "before", "after, by seed"]
    head += ["iterations", "rows an iteration", "seconds an iteration"]
    return table(head, [_claim_row(name, runs) for name, runs in claims.items()])


def _claim_row(name: str, runs: list[Cell]) -> list[str]:
    ends = [c["curve"][-1] for c in runs]
    iterations = statistics.mean(p["iteration"] for p in ends)
    rows, pace = statistics.mean(p["calls"] for p in ends) / iterations, seconds(name)
    method = cells.CLAIMS[name].method
    over = few_gain(runs[0]) if name.endswith("_few") else gain(runs)
    return [
        name,
        method,
        named(runs[0]["words"]),
        "by hand" if by_hand(name) else "tuned, edge" if at_edge(method) else "tuned",
        f"{runs[0]['budget']:,}",
        f"{over.mean:+.3f}",
        over_seeds(runs),
        f"[{over.low:+.3f}, {over.high:+.3f}]",
        f"{cells.score(runs[0], 'before'):.3f}",
        scores_of(runs),
        f"{iterations:.0f}",
        f"{rows:,.0f}",
        f"{pace * rows:.2f}" if pace else "",
    ]


def proxy_table(runs: list[Cell]) -> str:
    """Gain of the proxy that was trained on, and of the verifier that was only read."""
    head = ["run", "seed", "proxy gain [95%]", "verifier gain [95%]"]
    head += ["verifier, best reading on the way", "verifier, after"]
    rows = []
    for c in sorted(runs, key=lambda c: (c["claim"], c["seed"])):
        changes = [c["paired"][key] for key in ("clip", "shapes/strict")]
        gains = [str(Gain(change["difference"], *change["ci"])) for change in changes]
        best = max(point.get("strict", 0) for point in c["curve"])
        after = cells.score(c)
        rows.append([c["claim"], str(c["seed"]), *gains, f"{best:.3f}", f"{after:.3f}"])
    return table(head, rows)


def proxy_difference(runs: list[Cell]) -> str:
    """What win rates change in the verifier, over the seeds that both ways have."""
    ways = ("proxy_points", "proxy_wins")
    points, wins = ([c for c in runs if c["claim"] == name] for name in ways)
    said = difference(points, wins)
    return said and f"Verifier after win rates minus after points: {said}"


# ---------------------------------------------------------------------------
# a method's own page


def run_said(method: str, runs: list[Cell]) -> str:
    """What a method's runs say, for its page."""
    after = ", ".join(f"{cells.score(c):.3f} (seed {c['seed']})" for c in runs)
    own = named([*cells.words_of(method), *runs[0]["words"]])
    if method in cells.FIFTH:
        own += f" on the data of own_data.py, which took {cells.DRAWN:,} rows of the budget"
    if method in cells.SIXTH:
        own += ", for half of that budget; each teacher took the other half once more"
    return (
        "Strict accuracy on held-out prompts of `shapes-sd3`, at the budget and settings that all"
        f" methods share, with {own}:\n"
        f"{cells.score(runs[0], 'before'):.3f} before, {after} after; gain {said_gain(runs)}."
        " [Results](../results.md) compares the methods.\n\n"
        f"    python scripts/bench/algorithms.py run {method}"
    )


def said_gain(runs: list[Cell]) -> str:
    """A gain in words, with both intervals."""
    over = gain(runs)
    texts = f"{over.mean:+.3f}, [{over.low:+.3f}, {over.high:+.3f}] over texts"
    return f"{texts}, {over_seeds(runs)}{' over seeds' if len(runs) > 1 else ''}"


def few_said(method: str, c: Cell) -> str:
    """What its run on the prompts of few_prompts.jsonl says."""
    own = named([*cells.words_of(method), *c["words"]])
    return (
        "Trained on the eight prompts of `docs/results/few_prompts.jsonl` and read on them, for"
        f" {c['budget'] / cells.BUDGET:g} of that budget and with\n"
        f"{own}: gain {few_gain(c)}, to {cells.score(c):.3f}.\n\n"
        f"    python scripts/bench/algorithms.py claims {method}_few"
    )


def fill(path: Path, text: str) -> None:
    """Put a text between the marks of a page."""
    page = path.read_text()
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r} around its results")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


# ---------------------------------------------------------------------------
# plots


def curve_of(c: Cell, key: str, scale: float) -> list[tuple[float, float]]:
    """(cost, strict accuracy) before, at the marks and after; seconds are rows times `scale`."""
    of = "calls" if key == "seconds" else key
    points = [(p[of] * scale, p["strict"]) for p in c["curve"] if "strict" in p]
    return [(0.0, cells.score(c, "before")), *points, (c["curve"][-1][of] * scale, cells.score(c))]


def show_plots(done: Runs) -> list[str]:
    """The gains of every method's seeds, and curves of the first tier -> their lines."""
    seeds = {method: gains_of(runs) for method, runs in done.items()}
    spans = {m: (g.low, g.high) for m, runs in done.items() if (g := seed_gain(runs))}
    forest = plots.forest(seeds, spans)
    lines = [plots.saved(forest, cells.FOLDER / "gain.svg", plots.GAIN)]
    costs = {"calls": "network rows", "seconds": "seconds of training", "rows": "rows trained"}
    for key, label in costs.items():
        series = {}
        for method in (m for m in done if m in cells.FIRST):
            if scale := seconds(method) if key == "seconds" else 1.0:
                series[method] = [curve_of(c, key, scale) for c in done[method]]
        if series:
            path = cells.FOLDER / f"strict-by-{key}.svg"
            text = f"Strict accuracy against {label}"
            lines.append(plots.saved(plots.curves(series, label), path, text))
    return lines


if __name__ == "__main__":
    write()
