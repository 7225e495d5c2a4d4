"""The plots of docs/results.md."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")  # before pyplot is imported
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

matplotlib.rcParams["svg.hashsalt"] = "flowrl"
GAIN = "Gain of every method, its seeds and their 95% interval; hollow: one seed, no interval"
Points = list[tuple[float, float]]  # cost, strict accuracy


def forest(gains: dict[str, list[float]], spans: dict[str, tuple[float, float]]) -> Figure:
    """Gains of each method's seeds and their mean, the largest on top; spans: intervals over seeds.

    A method with one seed has no interval and a hollow mark.
    """
    ranked = sorted(gains.items(), key=lambda item: statistics.mean(item[1]))
    figure, axes = plt.subplots(figsize=(8, 0.26 * len(ranked) + 1))
    for y, (method, seeds) in enumerate(ranked):
        if method in spans:
            axes.plot(spans[method], [y, y], color="C0", linewidth=1.5)
        face = "C0" if method in spans else "white"
        axes.plot(statistics.mean(seeds), y, "o", color="C0", markerfacecolor=face)
        if len(seeds) > 1:
            axes.plot(seeds, [y] * len(seeds), "|", color="black", markersize=7)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(ranked)), [method for method, _ in ranked])
    axes.set(xlabel="gain in strict accuracy, held out (95% interval over seeds)")
    return figure


def curves(series: dict[str, list[Points]], label: str) -> Figure:
    """Means over the seeds of each method at each mark; the band is their range."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    colors = plt.get_cmap("tab20").colors
    axes.set_prop_cycle(color=colors[::2] + colors[1::2])
    for method, seeds in series.items():
        marks = [list(zip(*mark, strict=True)) for mark in zip(*seeds, strict=False)]
        x, y = [statistics.mean(xs) for xs, _ in marks], [ys for _, ys in marks]
        axes.plot(x, [statistics.mean(ys) for ys in y], marker="o", markersize=3, label=method)
        axes.fill_between(x, [min(ys) for ys in y], [max(ys) for ys in y], alpha=0.12, linewidth=0)
    axes.set(xlabel=label, ylabel="strict accuracy, held out (band: range of the seeds)")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    return figure


def saved(figure: Figure, path: Path, text: str) -> str:
    """Write a plot -> the line of docs/results.md that shows it."""
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return f"![{text}](results/{path.name})"
