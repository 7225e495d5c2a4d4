"""docs/results.md and its plots from the cells of scripts/bench/algorithms.py, as far as they are
there; every number is a cell's."""

from __future__ import annotations

import functools
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import algorithms as bench

from flowrl.data.prompts import load_prompts
from flowrl.runtime.statistics import paired_bootstrap

PAGE = bench.FOLDER.parent / "results.md"
IMAGES = 348  # of an evaluation: eval.images of bench.COMMON
BEGIN, END = (
    "<!-- results: written by scripts/bench/algorithms.py table -->",
    "<!-- end of results -->",
)
Cell = dict[str, Any]


def write() -> None:
    """Make the page anew."""
    done = {m: r for m in bench.METHODS if (r := results(bench.finals(m)))}
    claims = {name: r for name in bench.CLAIMS if (r := results(bench.claims(name)))}
    proxies = [c for name in list(claims) if name.startswith("proxy_") for c in claims.pop(name)]
    texts = texts_of("shapes:eval", IMAGES)
    parts = [
        HEAD.format(
            budget=f"{bench.BUDGET:,}",
            third=f"{bench.BUDGET // 3:,}",
            images=IMAGES,
            prompts=len(set(texts)),
        )
    ]
    if done:
        parts += ["## What each method buys", ABOUT_TABLE, main_table(done), plots(done)]
        parts += ["## At equal cost", ABOUT_EQUAL, equal_table(done)]
    parts += ["## Settings", ABOUT_SETTINGS, settings_table()]
    parts += ["## Tuning", ABOUT_TUNING, tuning_table()]
    if claims:
        parts += ["## Runs for the papers' claims", ABOUT_CLAIMS, claims_table(claims)]
    if proxies:
        parts += [
            "## Training on a proxy",
            ABOUT_PROXY,
            proxy_table(proxies),
            proxy_difference(proxies),
        ]
    verdicts = bench.FOLDER / "claims.txt"
    if verdicts.exists():
        parts.append(verdicts.read_text().strip())
    PAGE.write_text("\n\n".join(parts) + "\n")
    for method, cells in done.items():
        few = claims.get(f"{method}_few", [])
        fill(
            PAGE.parent / "algorithms" / f"{method}.md",
            "\n\n".join([run_said(method, cells), *(few_said(method, c) for c in few)]),
        )
    print(PAGE)


HEAD = """# Results

One table for all methods: the same embedded model (`shapes-sd3`), prompts, strict 0/1 reward, LoRA (rank 16) and optimizer, and the same
budget of {budget} network rows, in which the forward of a rollout or a reference counts 1 and the forward and backward of a trained row 3.
Eight steps, eight prompts an iteration, no guidance, groups of 16 (28 and 48 where a plan has that many leaves). What is the paper's own
stays the paper's: SDE, noise level, KL, statistics, and the number of updates, all as in `configs/algorithm`; windows, trees and the noise
levels of a sample are cut to eight steps, as [Settings](#settings) lists.

Three learning rates, and at the best of them a second clip where there is one, were tried for each method, with one seed and {third} rows,
and judged by images of training prompts (the first {images} of them, in which `color_attr` is missing and counting frequent); `raft` and
`rwr`, which the usual rates ruin, got two lower ones more. The runs then take a third of the best rate, for all methods alike, since they
take three times as many steps; that rule was chosen after two runs at the full rate (`nft` and `dgpo`, seed 1), judged by held-out images,
had fallen again after their first third. A run ends with the iteration that passes the budget; its rows include the few that measure
winners.

Scores are strict accuracy on {images} held-out images of {prompts} texts, sampled without guidance from averaged weights. Intervals are
95%, by resampling texts; over several seeds, of the mean over seeds. This page is written by `python scripts/bench/algorithms.py table`
from the cells in `docs/results/cells`; `tune`, `run`, `claims` and `time` make those that are missing."""

ABOUT_TABLE = """Rows are sorted by gain. *Rows trained* are terms of the loss. *Seconds* are those of training without evaluation:
network rows times the seconds a row of a few iterations that had the machine to themselves (`time`). *Winner gain* is the last
`policy/winner_gain`; its unit is the method's. One seed is no ranking."""

ABOUT_EQUAL = (
    "Strict accuracy at shares of the same runs' budget (mean over seeds; evaluated at the first"
    " iteration past the mark)."
)

ABOUT_PROXY = """Two ways to train `mix_grpo_flash` on the tiny CLIP's cosine, for twice the budget: `proxy_points` as it is, `proxy_wins`
by win rates within the group (`algorithm.outcome=win_rate`, what Pref-GRPO does). The strict verifier is read and never trained on."""
ABOUT_SETTINGS = """What the runs set beside their file in `configs/algorithm` and the settings that all share (`COMMON` in
`scripts/bench/algorithms.py`). A method that is missing here sets nothing more."""
ABOUT_CLAIMS = """Runs beside those of the main table, at their method's best setting where *settings* does not say otherwise; names without
a section are of `algorithm`. *Budget* is in network rows. `*_few` train on the eight prompts of `docs/results/few_prompts.jsonl` and are
read on them, with intervals over images; `*_steps` sample with so few steps in training and in evaluation."""
ABOUT_TUNING = """Strict accuracy on images of training prompts after a third of the budget, seed 0. The best of each row, at a third of
its rate, is what the runs use."""


def named(words: list[str]) -> str:
    """Settings as a table shows them: the last value of each key, without `algorithm.`; what is
    trained on has a name of its own."""
    last = dict(word.split("=", 1) for word in words if not word.startswith("data."))
    return " ".join(f"`{key.removeprefix('algorithm.')}={value}`" for key, value in last.items())


def run_said(method: str, cells: list[Cell]) -> str:
    """What a method's runs say, for its page."""
    change, low, high = gain(cells)
    before = cells[0]["before"]["shapes/strict"]["mean"]
    after = ", ".join(f"{bench.score(c):.3f} (seed {c['seed']})" for c in cells)
    own = named([*bench.METHODS[method], *cells[0]["words"]])
    return f"""Strict accuracy on held-out prompts of `shapes-sd3`, at the budget and settings that all methods share, with {own}:
{before:.3f} before, {after} after; gain {change:+.3f} [{low:+.3f}, {high:+.3f}]. [Results](../results.md) compares the methods.

    python scripts/bench/algorithms.py run {method}"""


def few_said(method: str, c: Cell) -> str:
    """What its run on the prompts of few_prompts.jsonl says."""
    change, low, high = few_change(c)
    share = c["budget"] / bench.BUDGET
    return f"""Trained on the eight prompts of `docs/results/few_prompts.jsonl` and read on them, for {share:g} of that budget and with
{named([*bench.METHODS[method], *c["words"]])}: gain {change:+.3f} [{low:+.3f}, {high:+.3f}], to {bench.score(c):.3f}.

    python scripts/bench/algorithms.py claims {method}_few"""


def few_change(c: Cell) -> tuple[float, float, float]:
    """Gain of a run on few prompts, and its interval over images: eight texts are all that it is
    about."""
    change = paired_bootstrap(marks(c["images_before"]), marks(c["images"]))
    return change.difference, *change.ci


def fill(path: Path, text: str) -> None:
    """Put a text between the marks of a page."""
    page = path.read_text()
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no lines {BEGIN!r} and {END!r} around its results")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["-"] * len(head), *rows])


def results(cells: list[Cell]) -> list[Cell]:
    """Of those that were run."""
    return [r for c in cells if (r := bench.result(c))]


@functools.cache
def texts_of(source: str, images: int) -> list[str]:
    """The text of each image: what an interval resamples, since held-out data holds some texts
    several times."""
    prompts = load_prompts(source)
    return [prompts[i % len(prompts)]["prompt"] for i in range(images)]


def setting(c: Cell) -> str:
    """Learning rate and clip of a cell."""
    values = dict(
        word.split("=", 1)
        for word in c["words"]
        if word.startswith(("optimizer.lr", "algorithm.clip"))
    )
    return f"{values['optimizer.lr']}" + (
        f", {values['algorithm.clip']}" if "algorithm.clip" in values else ""
    )


def gain(cells: list[Cell]) -> tuple[float, float, float]:
    """Mean over seeds of after - before, and its interval over texts."""
    pairs = [(marks(c["images_before"]), marks(c["images"])) for c in cells]
    before = [statistics.mean(b[i] for b, _ in pairs) for i in range(len(pairs[0][0]))]
    after = [statistics.mean(a[i] for _, a in pairs) for i in range(len(pairs[0][0]))]
    result = paired_bootstrap(before, after, groups=texts_of("shapes:eval", len(before)))
    return result.difference, *result.ci


def marks(text: str) -> list[float]:
    """A missing verdict counts as wrong: the reward's own rule for what it cannot judge."""
    return [float(c == "1") for c in text]


def main_table(done: dict[str, list[Cell]]) -> str:
    rows = []
    for method, cells in sorted(done.items(), key=lambda item: -gain(item[1])[0]):
        mean, low, high = gain(cells)
        last = [c["curve"][-1] for c in cells]
        seeds = ", ".join(f"{bench.score(c):.3f}" for c in cells)
        pace = seconds(method)
        rows.append(
            [
                f"[{method}](algorithms/{method}.md)",
                f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]",
                seeds,
                setting(cells[0]),
                *(
                    f"{statistics.mean(p[key] for p in last):,.0f}"
                    for key in ("iteration", "calls", "rows")
                ),
                f"{pace * statistics.mean(p['calls'] for p in last):.0f}" if pace else "",
                f"{statistics.mean(gains):+.2g}" if (gains := winner_gains(cells)) else "",
            ]
        )
    head = [
        "method",
        "gain [95%]",
        "after, by seed",
        "rate, clip",
        "iterations",
        "network rows",
        "rows trained",
        "seconds",
        "winner gain",
    ]
    first = next(iter(done.values()))[0]
    base = first["before"]["shapes/strict"]["mean"]
    return f"Before training: {base:.3f}.\n\n" + table(head, rows)


def seconds(name: str) -> float:
    """Of a network row of a method or claim, measured alone on the machine; 0: not measured.

    Of a row and not of an iteration: groups without a signal are not trained, so iterations differ
    over a run.
    """
    timed = results(bench.timing(name))
    if not timed:
        return 0.0
    (first, *_), last = timed[0]["curve"], timed[0]["curve"][-1]
    return (last["seconds"] - first["seconds"]) / (last["calls"] - first["calls"])


def winner_gains(cells: list[Cell]) -> list[float]:
    """The last policy/winner_gain of each run that has one."""
    series = [
        [p["policy/winner_gain"] for p in c["curve"] if "policy/winner_gain" in p] for c in cells
    ]
    return [s[-1] for s in series if s]


def at_shares(c: Cell) -> list[float]:
    """Strict accuracy at the marks and at the end of a run's budget."""
    return [p["strict"] for p in c["curve"] if "strict" in p] + [bench.score(c)]


def equal_table(done: dict[str, list[Cell]]) -> str:
    rows = []
    for method, cells in sorted(done.items(), key=lambda item: -gain(item[1])[0]):
        series = [at_shares(c) for c in cells]
        if all(len(s) == len(bench.MARKS) + 1 for s in series):
            rows.append(
                [
                    method,
                    *(f"{statistics.mean(column):.3f}" for column in zip(*series, strict=True)),
                ]
            )
    return table(
        ["method", *(str(Fraction(share).limit_denominator(9)) for share in bench.MARKS), "all"],
        rows,
    )


def settings_table() -> str:
    return table(
        ["method", "settings"],
        [[method, named(words)] for method, words in bench.METHODS.items() if words],
    )


def tuning_table() -> str:
    rows = []
    for method in bench.METHODS:
        if tried := results(bench.tuning(method)):
            best = max(tried, key=bench.score)
            rows.append(
                [
                    method,
                    *(
                        f"{'**' * (r is best)}{bench.score(r):.3f}{'**' * (r is best)}"
                        f" ({setting(r)})"
                        for r in tried
                    ),
                ]
            )
    width = max((len(r) for r in rows), default=1)
    return table(
        ["method", "", "", "", "other clip, or lower", ""][:width],
        [row + [""] * (width - len(row)) for row in rows],
    )


def proxy_table(cells: list[Cell]) -> str:
    """Gain of the proxy that was trained on, and of the verifier that was only read, for each
    run."""
    rows = []
    for c in sorted(cells, key=lambda c: (c["claim"], c["seed"])):
        gains = [c["paired"][key] for key in ("clip", "shapes/strict")]
        said = [f"{g['difference']:+.3f} [{g['ci'][0]:+.3f}, {g['ci'][1]:+.3f}]" for g in gains]
        rows.append(
            [
                c["claim"],
                str(c["seed"]),
                *said,
                f"{max(p.get('strict', 0) for p in c['curve']):.3f}",
                f"{bench.score(c):.3f}",
            ]
        )
    return table(
        [
            "run",
            "seed",
            "proxy gain [95%]",
            "verifier gain [95%]",
            "verifier, best reading on the way",
            "verifier, after",
        ],
        rows,
    )


def proxy_difference(cells: list[Cell]) -> str:
    """What win rates change in the verifier, over the seeds that both ways have."""
    points, wins = (
        {c["seed"]: c for c in cells if c["claim"] == name}
        for name in ("proxy_points", "proxy_wins")
    )
    seeds = sorted(points.keys() & wins.keys())
    if not seeds:
        return ""
    means = [
        [
            statistics.mean(column)
            for column in zip(*(marks(way[s]["images"]) for s in seeds), strict=True)
        ]
        for way in (points, wins)
    ]
    change = paired_bootstrap(*means, groups=texts_of("shapes:eval", len(means[0])))
    each = ", ".join(f"{bench.score(wins[s]) - bench.score(points[s]):+.3f}" for s in seeds)
    low, high = change.ci
    return (
        f"Verifier after win rates minus after points: {change.difference:+.3f} [{low:+.3f},"
        f" {high:+.3f}] over texts; by seed {each},\na spread that the interval does not hold."
    )


def claims_table(claims: dict[str, list[Cell]]) -> str:
    rows = []
    for name, cells in claims.items():
        change, low, high = few_change(cells[0]) if name.endswith("_few") else gain(cells)
        ends = [c["curve"][-1] for c in cells]
        iterations = statistics.mean(p["iteration"] for p in ends)
        each, pace = statistics.mean(p["calls"] for p in ends) / iterations, seconds(name)
        rows.append(
            [
                name,
                bench.CLAIMS[name][0],
                named(cells[0]["words"]),
                f"{cells[0]['budget']:,}",
                f"{change:+.3f} [{low:+.3f}, {high:+.3f}]",
                f"{cells[0]['before']['shapes/strict']['mean']:.3f}",
                ", ".join(f"{bench.score(c):.3f}" for c in cells),
                f"{iterations:.0f}",
                f"{each:,.0f}",
                f"{pace * each:.2f}" if pace else "",
            ]
        )
    head = [
        "run",
        "method",
        "settings",
        "budget",
        "gain [95%]",
        "before",
        "after, by seed",
        "iterations",
    ]
    return table([*head, "rows an iteration", "seconds an iteration"], rows)


def curve_of(c: Cell, key: str, scale: float) -> list[tuple[float, float]]:
    """(cost, strict accuracy) before, at the marks and after; seconds are rows times `scale`."""
    of = "calls" if key == "seconds" else key
    points = [(p[of] * scale, p["strict"]) for p in c["curve"] if "strict" in p]
    return [
        (0.0, c["before"]["shapes/strict"]["mean"]),
        *points,
        (c["curve"][-1][of] * scale, bench.score(c)),
    ]


def plots(done: dict[str, list[Cell]]) -> str:
    """The gain of every method with its interval, and curves of the first tier -> the lines that
    show them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flowrl"
    lines = [forest(done)]
    for key, label in (
        ("calls", "network rows"),
        ("seconds", "seconds of training"),
        ("rows", "rows trained"),
    ):
        lines += curves({m: c for m, c in done.items() if m in bench.FIRST}, key, label)
    return "\n\n".join(lines)


def forest(done: dict[str, list[Cell]]) -> str:
    """Gains and their intervals, the largest on top; hollow marks are those of one seed."""
    import matplotlib.pyplot as plt

    ranked = sorted(((gain(cells), m) for m, cells in done.items()), key=lambda item: item[0][0])
    figure, axes = plt.subplots(figsize=(8, 0.26 * len(ranked) + 1))
    for y, ((mean, low, high), method) in enumerate(ranked):
        axes.plot([low, high], [y, y], color="C0", linewidth=1.5)
        axes.plot(
            mean, y, "o", color="C0", markerfacecolor="C0" if len(done[method]) > 1 else "white"
        )
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(ranked)), [method for _, method in ranked])
    axes.set(xlabel="gain in strict accuracy, held out (95% interval)")
    return saved(
        figure, axes, "gain.svg", "Gain of every method, with 95% intervals; hollow: one seed"
    )


def curves(done: dict[str, list[Cell]], key: str, label: str) -> list[str]:
    """Means over seeds at each mark; the band is the range of the seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.set_prop_cycle(
        color=plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]
    )
    for method, cells in done.items():
        scale = seconds(method) if key == "seconds" else 1.0
        if not scale:
            continue
        points = [
            list(zip(*column, strict=True))
            for column in zip(*(curve_of(c, key, scale) for c in cells), strict=False)
        ]
        x, y = [statistics.mean(xs) for xs, _ in points], [ys for _, ys in points]
        axes.plot(x, [statistics.mean(ys) for ys in y], marker="o", markersize=3, label=method)
        axes.fill_between(x, [min(ys) for ys in y], [max(ys) for ys in y], alpha=0.12, linewidth=0)
    if not axes.lines:
        plt.close(figure)
        return []
    axes.set(xlabel=label, ylabel="strict accuracy, held out (band: range of the seeds)")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    return [saved(figure, axes, f"strict-by-{key}.svg", f"Strict accuracy against {label}")]


def saved(figure: Any, axes: Any, name: str, text: str) -> str:
    """Write a plot -> the line that shows it."""
    import matplotlib.pyplot as plt

    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(bench.FOLDER / name, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return f"![{text}](results/{name})"


if __name__ == "__main__":
    write()
