"""Charts: where points lie, which numbers stand beside them, and colours that can be told apart."""

import math
import re
from pathlib import Path

import finished
import pytest
import torch

from flowrl.report import charts, described


def line_chart(title, points):
    return charts.gallery({title: charts.measured(title, points)})


def test_every_colour_that_charts_name_is_in_the_style_sheet_for_light_and_for_dark():
    style = (Path(charts.__file__).parent / "templates" / "style.css").read_text()
    named = [int(number) for number in re.findall(r"--chart-(\d+):", style)]
    assert named == list(range(charts.COLOURS)) * 2


def luminance(colour):
    """The relative luminance of #rrggbb (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_colours_stand_out_from_panel_and_paper_and_no_text_is_small():
    style = (Path(charts.__file__).parent / "templates" / "style.css").read_text()
    roots = re.findall(r":root \{(.*?)\}", style, re.S)
    for theme in (roots[0] + roots[2], roots[1] + roots[3]):  # light, dark
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        grounds = [luminance(colours.pop(name)) for name in ("paper", "panel")]
        del colours["rule"]
        assert len(colours) == charts.COLOURS + 4
        for name, colour in colours.items():
            for ground in grounds:
                low, high = sorted((ground, luminance(colour)))
                contrast = (high + 0.05) / (low + 0.05)
                assert contrast >= (3 if name.startswith("chart") else 4.5), (name, contrast)
    sizes = re.findall(r"font(?:-size)?:[^;]*?([\d.]+)px", style)
    assert len(sizes) > 10 and min(map(float, sizes)) >= 11
    # a text in an SVG would shrink with the page
    drawn = line_chart("x", [(0, 1.0), (1, 2.0)]) + charts.interval_chart([("a", 1, 0, 2)])
    assert "<text" not in drawn and ">0.5<" in drawn


@pytest.mark.parametrize(("first", "last"), [(1, 2), (1, 3), (5, 15), (1, 200)])
def test_an_axis_of_iterations_has_no_tick_between_them(first, last):
    drawn = line_chart("x", [(first, 0.0), (last, 30.0)])
    # ticks of y are 0, 10, 20, 30
    assert not re.findall(r">\d+\.\d+<", drawn) and f">{last}<" in drawn


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.19, 0.49), (-3.0, 7.0), (1e-5, 3e-4), (0, 12345), (0.4999, 0.5001), (-1, -0.1)],
)
def test_ticks_are_round_even_and_cover_the_data(low, high):
    out = charts.ticks(low, high)
    step = out[1] - out[0]
    assert out[0] <= low + 1e-9 * step and out[-1] >= high - 1e-9 * step and 4 <= len(out) <= 8
    assert all(math.isclose(b - a, step, rel_tol=1e-6) for a, b in zip(out, out[1:], strict=False))
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 2.5, 5)
    assert len({charts.tick_text(t, out) for t in out}) == len(out)


def test_numbers_have_three_digits():
    shown = {0: "0", 0.51234: "0.512", 12.345: "12.3", 123.4: "123", 12345.6: "12,346"}
    shown |= {0.00012: "1.2e-04", -0.5: "-0.500", math.nan: "nan", 20: "20.0", 999.96: "1000"}
    for value, text in shown.items():
        assert charts.number(value) == text


def test_a_line_chart_places_points_linearly():
    chart = line_chart("x", [(0, 0.0), (5, 0.5), (10, 1.0)])
    (d,) = re.findall(r'class="line" d="([^"]+)"', chart)
    points = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", d)]
    assert points[1] == pytest.approx([(points[0][k] + points[2][k]) / 2 for k in (0, 1)], abs=0.06)
    assert points[0][0] < points[2][0] and points[0][1] > points[2][1]  # SVG's y grows downwards


@pytest.mark.parametrize(
    "points", [[(1, 0.5)], [(1, 0.0), (2, 0.0)], [(1, math.nan), (2, 3.0)], [(0, -1e-9), (1, 1e9)]]
)
def test_degenerate_curves_draw_finite_numbers(points):
    chart = line_chart("x", points)
    assert "<svg" in chart and "nan" not in chart and "inf" not in chart


def test_no_finite_point_draws_nothing_and_long_curves_are_averaged():
    assert line_chart("x", [(0, math.nan)]) == "" and line_chart("x", []) == ""
    long = [(i, float(i)) for i in range(1000)]
    assert len(charts.thin(long)) == 250 and charts.thin(long)[0] == (1.5, 1.5)
    assert charts.thin(long[:300]) == long[:300]


def test_smoothing_keeps_constants_and_reduces_noise():
    flat = [(i, 2.0) for i in range(50)]
    assert charts.smooth(flat) == [(i, pytest.approx(y)) for i, y in flat]
    noise = torch.randn(500).tolist()
    smoothed = torch.tensor([y for _, y in charts.smooth(list(enumerate(noise)))])
    assert smoothed[100:].std() < 0.3 * torch.tensor(noise).std()


def test_shares_of_a_stacked_bar_add_up_and_are_ranked():
    html = charts.stacked_bar({"a": 1.0, "b": 3.0}, unit="s")
    assert [float(w) for w in re.findall(r"width: ([\d.]+)%", html)] == [75.0, 25.0]
    assert re.findall(r"</i>(\w)<b>([\d.]+)%", html) == [("b", "75.0"), ("a", "25.0")]


@pytest.fixture
def run(tmp_path):
    return finished.write(tmp_path / "my-run")


def test_the_line_under_a_chart_is_that_of_the_table_of_metrics(run):
    _, page = finished.page_of(run)
    assert "Mean of the weighted sum of all rewards over the valid samples" in page.text
    assert described.sentence("reward/clip/small/mean").startswith("Mean of one reward")
    assert described.sentence("time/vae_work") != described.sentence("time/rollout")
    assert described.sentence("mine/number") == ""
    assert "mine/number" in line_chart("mine/number", [(0, 1.0)])
