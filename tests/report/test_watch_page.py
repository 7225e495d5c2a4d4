"""The report's section on a watched run."""

import re

from flowrl.report import watch_page
from flowrl.report.charts import against_chart

PEAK = {
    "held_out": "fair",
    "iteration": 2.5,
    "value": 0.4,
    "last": 0.1,
    "checkpoint": "step-000002",
    "lora": "lora-peak",
}
LINES = [
    {"iteration": i + 1, "reward/total": 10.0 * i, "reward/fair/mean": held_out, "watch/drift": i}
    for i, held_out in enumerate((0.2, 0.4, 0.4, 0.0))
]


def paths(svg):
    """Places of each curve, in percent."""
    found = re.findall(r'class="line" d="M([^"]+)"', str(svg))
    return [[tuple(map(float, p.split())) for p in path.split(" L")] for path in found]


def test_curves_go_from_their_own_lowest_to_their_own_highest_value():
    """Iterations 1 to 4 lie at 0 to 100 percent, 0 to 1 at 100 to 0."""
    svg = watch_page.against(LINES, PEAK)
    trained, held_out = paths(svg)
    assert trained == [(0, 100), (33.3, 66.7), (66.7, 33.3), (100, 0)]
    assert held_out == [(0, 50), (33.3, 0), (66.7, 0), (100, 100)]
    assert 'class="mark" d="M50.0 0v100"' in svg and "peak 0.4" in svg
    assert "trained 0 to 30.0" in svg and "fair, held out 0 to 0.400" in svg
    assert "iteration 4: 30.0" in svg  # on hover


def test_nothing_is_drawn_of_a_run_without_a_peak_or_without_a_curve():
    assert watch_page.against(LINES, {}) == "" == watch_page.sentence({})
    assert against_chart("title", {"a": [(1, 2.0)], "b": [(1, float("nan"))]}) == ""
    assert paths(against_chart("title", {"a": [(1, 2.0), (2, 2.0)]})) == [[(0, 50), (100, 50)]]


def test_detectors_are_drawn_and_numbers_of_the_peak_are_not():
    lines = [line | {"watch/peak": 2.5, "watch/below": 0} for line in LINES]
    drawn = watch_page.detectors(lines)
    assert "watch/drift" in drawn and drawn.count("<svg") == 1


def test_the_sentence_says_where_the_weights_are():
    assert "its LoRA is in lora-peak." in watch_page.sentence(PEAK)
    assert watch_page.sentence(PEAK | {"lora": None}).endswith("step-000002, is kept.")
