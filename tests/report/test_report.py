"""report.html: what is in a run folder is on the page, what is missing is said, nothing is fetched,
text is escaped."""

import base64
import hashlib
import io
import itertools
import json
import math
import re
import shlex
from html import unescape
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from page import Page
from PIL import Image
from rich.console import Console

from flowrl.config.load import diff, dump, load_config
from flowrl.data.media import save
from flowrl.report import answers, charts, described, grids, run_page, terminal


def interval(mean, half):
    return {"mean": mean, "ci": [mean - half, mean + half]}


def row(name, strict, **more):
    metrics = {"shapes": interval(strict + 0.3, 0.02), "shapes/strict": interval(strict, 0.03)}
    tasks = {"shapes/strict": {"counting": strict - 0.1, "two_object": strict + 0.1}}
    own = {"name": name, "guidance": "none", "steps": 10, "images": 512, "nfe": 10}
    return {**own, "metrics": metrics, "tasks": tasks, **more}


CURVES = ("reward", "eval", "policy", "diversity")
EVALUATION = {
    "rows": [
        row("before", 0.21),
        row("before, guidance 3", 0.36, guidance=3.0, nfe=20),
        row("after", 0.49),
    ],
    "paired": {
        "shapes": {"difference": 0.28, "ci": [0.26, 0.30], "p": 0.0002},
        "shapes/strict": {"difference": 0.28, "ci": [0.235, 0.325], "p": 0.0002},
    },
}


@pytest.fixture
def run(tmp_path):
    """A complete run folder."""
    folder = tmp_path / "my-run"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model:\n  name: shapes-sd3\nalgorithm:\n  name: nft\nreward:\n  shapes: 1.0\nseed: 7\n"
    )
    lines = []
    for i in range(1, 41):
        line = {"iteration": i, "reward/total": 0.4 + i / 100, "policy/kl": i * 1e-5}
        line |= {"policy/ratio": None, "nfe/rollout": 64, "nfe/update": 32}
        line |= {"time/rollout": 2.0, "time/update": 6.0, "time/iteration": 10.0}
        line |= {"time/network_work": 7.0, "time/overhead_fraction": 0.3}
        lines.append(json.dumps(line | ({"eval/shapes/strict": i / 100} if i % 10 == 0 else {})))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    pairs = grids.before_after(torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16), ["a", "b"])
    pairs.save(folder / "samples" / "before_after.png")
    (folder / "environment.json").write_text('{"torch": "9.9.9"}')
    return folder


def page_of(run):
    html = run_page.build(run).read_text(encoding="utf-8")
    return html, Page(html)


def test_the_page_says_what_the_run_found(run):
    html, page = page_of(run)
    assert run_page.build(run) == run.resolve() / "report.html"
    assert (
        "+0.280" in page.text
        and "nft improved shapes/strict of shapes-sd3: 0.210 before, 0.490 after" in page.text
    )
    assert "+0.235 to +0.325" in page.text
    for said in ("before, guidance 3", "0.360", "[0.330, 0.390]", "3.0", "512", "20"):
        assert said in page.text, said
    for said in ("my-run", "shapes-sd3", "nft", "9.9.9", "seed: 7"):
        assert said in page.text, said
    assert "name: shapes-sd3" in page.text and "flowrl train" in page.text
    assert re.search(r"two object\s*0\.310\s*0\.460\s*0\.590", re.sub("<[^>]+>", " ", html))
    assert 'class="missing"' not in html and 'class="note"' not in html


def test_the_page_fetches_nothing_and_forbids_it(run):
    html, page = page_of(run)
    assert page.src and all(source.startswith("data:image/webp;base64,") for source in page.src)
    assert not {"link", "iframe", "object"} & set(page.tags) and page.tags.count("script") == 1
    (script,) = re.findall("<script>(.*?)</script>", html, re.S)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'\"" in html
    assert "http" not in html.replace("http-equiv", "")
    assert "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html


def keep(samples, count, size, *, judged=()):
    """Keep arrays of pairs as an evaluation does. judged: verdicts before and after."""
    rng = np.random.default_rng(0)
    for k, stem in enumerate(("before", "after")):
        images = rng.integers(0, 256, (count, 3, size, size), np.uint8)
        own = {"verdicts.shapes": np.array(judged[k], np.int8)} if judged else {}
        prompts = np.array([f"a <b>{i}" for i in range(count)])
        np.savez(samples / f"{stem}.npz", images=images, prompts=prompts, **own)


def opened(source):
    return Image.open(io.BytesIO(base64.b64decode(source.split(",")[1])))


def test_pairs_are_single_pictures_whose_filter_never_hides_a_broken_one(run):
    keep(run / "samples", 5, 64, judged=([0, 1, 1, 0, -1], [1, 0, 1, 0, 1]))
    html, page = page_of(run)
    kinds = re.findall(r'<figure class="pair (\w+) tiny">', html)
    assert kinds == ["broken", "fixed", "same", "same", "same"]
    with np.load(run / "samples" / "after.npz") as kept:
        assert (np.asarray(opened(page.src[1])) == kept["images"][1].transpose(1, 2, 0)).all()
    for said in ("all 5", "fixed 1", "broken 1", "same 3", "By shapes: fixed is wrong before"):
        assert said in page.text, said
    assert "not judged a <b>4" in page.text and "<b>4" not in html
    style = html.partition("</style>")[0]
    for rule in re.findall(r'\.sift:has\(\[value="\w+"\]:checked\) ([^{,]+)', style):
        assert "broken" not in rule
    # four, two or one in a row
    assert re.findall(r"\.pairs \{[^}]*repeat\((\d)|\.pairs \{[^}]*columns: 1fr", style) == [
        "4",
        "2",
        "",
    ]


def test_runs_without_verdicts_or_prompts_show_pairs_and_damaged_ones_leave_a_sheet(run):
    keep(run / "samples", 2, 128)
    html, page = page_of(run)
    assert html.count('<figure class="pair "') == 2 and 'class="filter"' not in html
    torn = (run / "samples" / "after.npz").read_bytes()[:-40]
    (run / "samples" / "after.npz").write_bytes(torn)
    html, page = page_of(run)
    assert 'class="pair' not in html and len(page.src) == 1


def test_videos_play_in_the_page_and_their_originals_are_linked(run):
    samples = run / "samples"
    keep(samples, 2, 64)
    rng = torch.Generator().manual_seed(0)
    for stem, i in itertools.product(("before", "after"), range(2)):
        save(torch.rand(5, 3, 64, 320, generator=rng), samples / stem / f"{i:02d}.mp4")
    (samples / "after" / "01.mp4").write_bytes(b"torn")
    html, page = page_of(run)
    assert html.count("<video") == 2 == html.count("data:video/mp4") and "media-src data:" in html
    assert [s for s in page.src if not s.startswith("data:")][:2] == [
        "samples/before/00.mp4",
        "samples/after/00.mp4",
    ]
    clip = base64.b64decode(next(s for s in page.src if "video" in s).split(",")[1])
    with av.open(io.BytesIO(clip)) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert max(stream.width, stream.height) == 256 and len([*file.decode(video=0)]) == 5


def test_the_slider_has_a_sheet_for_each_tenth_of_the_run(run):
    for i in (1, *range(3, 43, 3)):
        Image.new("RGB", (40, 20), (i, 0, 0)).save(run / "samples" / f"iteration-{i:06d}.png")
    (run / "samples" / "iteration-000021.png").write_bytes(b"torn")
    html, _ = page_of(run)
    shown = [int(n) for n in re.findall(r"<figcaption>Iteration (\d+)", html)]
    assert shown == [1, 3, 9, 12, 18, 24, 30, 33, 39, 42]
    assert 'max="9" value="9"' in html and html.count("<figure hidden>") == 9


def test_the_page_of_a_long_run_of_large_pictures_is_small(run):
    """Noise is what compresses worst."""
    keep(run / "samples", 16, 512, judged=([0] * 16, [1] * 16))
    rng = np.random.default_rng(0)
    sheet = Image.fromarray(rng.integers(0, 256, (1100, 1096, 3), np.uint8))
    sheet.save(sheets := io.BytesIO(), "PNG", compress_level=0)
    for i in range(0, 201, 20):
        (run / "samples" / f"iteration-{i or 1:06d}.png").write_bytes(sheets.getvalue())
    lines = []
    for i in range(1, 201):
        line = {f"{part}/m{k}": i * k + math.sin(i) for part in CURVES for k in range(15)}
        lines.append(json.dumps(line | {"iteration": i}))
    (run / "metrics.jsonl").write_text("\n".join(lines))
    html, page = page_of(run)
    assert len(page.src) == 16 * 2 + 11 and html.count("<svg") == 60
    assert len(html.encode()) < 3e6


def test_whole_sheets_stand_in_for_pairs(run):
    _, page = page_of(run)
    pairs = run / "samples" / "before_after.png"
    assert opened(page.src[0]).size == Image.open(pairs).size
    pairs.unlink()
    grids.grid(torch.rand(1, 3, 8, 8)).save(run / "samples" / "before.png")
    html, page = page_of(run)
    assert len(page.src) == 1 and "samples/after.png are missing" in page.text


def test_every_curve_of_the_metrics_is_drawn_with_its_values_on_hover(run):
    html, page = page_of(run)
    for name in ("reward/total", "policy/kl", "eval/shapes/strict"):
        assert html.count(f'aria-label="{name}"') == 1
    assert "iteration 40: 0.800" in html and "iteration 30: 0.300" in html
    assert 'aria-label="time/rollout"' not in html


def test_a_run_that_forks_shows_what_each_step_decides(run):
    """Two iterations: step 0 decides (0.2 + 0.4) / 2, step 3 decides 0.1, where the window lay
    once."""
    assert "decided by each step" not in page_of(run)[0]
    lines = [
        {"iteration": 1, "tree/variance/0": 0.2, "tree/variance/3": 0.1},
        {"iteration": 2, "tree/variance/0": 0.4},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html, _ = page_of(run)
    assert "decided by each step" in html and "step 0: 0.300" in html and "step 3: 0.100" in html


def test_the_ledger_sums_phases_and_names_what_is_left(run):
    """40 iterations of 10 s: rollout 80 s, update 240 s, 80 s between them; network 280 s,
    everything else 120 s."""
    text = page_of(run)[1].text
    for said in ("update60.0%240 s", "rollout20.0%80.0 s", "between phases20.0%80.0 s"):
        assert said in text, said
    assert "network70.0%280 s" in text and "everything else30.0%120 s" in text
    assert "rollout66.7%2,560 rows" in text and "6 min 40 s" in text
    assert "overhead_fraction" not in text


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("evaluation.json", "There is no evaluation.json"),
        ("metrics.jsonl", "metrics.jsonl is missing or holds no curves"),
        ("config.yaml", "Nothing was recorded for “configuration”"),
        ("samples/before_after.png", "samples/before.png and samples/after.png are missing"),
        ("environment.json", "the run itself recorded none"),
    ],
)
def test_a_missing_piece_leaves_a_sentence_in_its_place(run, missing, said):
    (run / missing).unlink()
    assert said in page_of(run)[1].text


@pytest.mark.parametrize(
    "rows", [None, [], [{"name": "before"}], [row("before", 0.2)], [row("after", 0.2)] * 2]
)
def test_a_partial_evaluation_still_makes_a_page(run, rows):
    (run / "evaluation.json").write_text(json.dumps({} if rows is None else {"rows": rows}))
    html, page = page_of(run)
    assert 'class="missing"' in html and "Learning curves" in page.text


def test_before_comes_first_and_after_last_in_whatever_order_they_were_measured(run):
    first, middle, last = EVALUATION["rows"]
    (run / "evaluation.json").write_text(json.dumps(EVALUATION | {"rows": [last, middle, first]}))
    html, page = page_of(run)
    assert "improved shapes/strict of shapes-sd3: 0.210 before, 0.490 after" in page.text
    found = re.findall(r"<tr><td>([^<]+)</td><td>(?:none|3\.0)", html)
    assert found == ["before", "before, guidance 3", "after"]


def test_a_worse_or_unclear_result_is_called_so(run):
    what = "shapes/strict of shapes-sd3"
    cases = (
        ([-0.2, -0.1], f"made {what} worse", '"bad"'),
        ([-0.1, 0.2], f"did not change {what}", '""'),
    )
    for ci, said, css in cases:
        paired = {"shapes/strict": {"difference": sum(ci) / 2, "ci": ci, "p": 0.5}}
        (run / "evaluation.json").write_text(json.dumps(EVALUATION | {"paired": paired}))
        html, page = page_of(run)
        assert f"nft {said}" in page.text and f"<strong class={css}>" in html


def test_text_from_the_run_is_escaped(run):
    bad = "<script>alert('x')</script>&\"'"
    folder = run.rename(run.parent / "a<b>&c")
    (folder / "config.yaml").write_text(f"model: {json.dumps(bad)}\n")
    (folder / "environment.json").write_text(json.dumps({bad: bad}))
    first = row(bad, 0.2, tasks={bad: {bad: 0.1}})
    first["metrics"][bad] = interval(0.1, 0.1)
    paired = {bad: {"difference": 0.1, "ci": [0, 0.2]}}
    evaluation = {"rows": [first, row("after", 0.4)], "paired": paired}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    line = {"iteration": 1, f"reward/{bad}": 0.1, f"time/{bad}": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    html, page = page_of(folder)
    assert (
        html.count("<script") == 1 and page.text.count("alert('x')") >= 6 and "a<b>&c" in page.text
    )


@pytest.mark.parametrize("output", ["runs/a run", None, "runs/moved"])
def test_the_command_that_repeats_a_run_composes_to_the_same_config_and_another_folder(
    tmp_path, monkeypatch, output
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a run"
    folder.mkdir(parents=True)
    overrides = ["model=sd1.5", "data=ocr", "algorithm=mix_grpo", "~reward", "seed=3"]
    overrides += ["reward.jpeg=0.5", "reward.jpeg.quality=50"]
    cfg = load_config(None, [*overrides, f"output={output or 'null'}"])
    (folder / "config.yaml").write_text(dump(cfg))
    html = run_page.build(folder).read_text(encoding="utf-8")
    words = shlex.split(unescape(re.search("<pre>(flowrl train .*?)</pre>", html)[1]))
    again = load_config(words[2], words[3:])
    assert diff(cfg, again) == ["output"] and again.seed == 3
    assert not (tmp_path / again.output).exists()
    assert (tmp_path / words[2]).samefile(folder / "config.yaml")


def test_the_page_says_how_many_prompts_were_resampled(run):
    paired = {"shapes/strict": {"difference": 0.28, "ci": [0.2, 0.3], "clusters": 87}}
    (run / "evaluation.json").write_text(json.dumps(EVALUATION | {"paired": paired}))
    assert "the same 87 different prompts and the same noise." in page_of(run)[1].text


def test_a_line_that_is_cut_short_or_damaged_is_noted_and_left_out(run):
    path = run / "metrics.jsonl"
    path.write_text("{oops\n" + path.read_text() + '{"iteration": 41, "rewa')
    text = page_of(run)[1].text
    for number in (1, 42):
        assert f"Line {number} of metrics.jsonl was cut short, edited or damaged (Invalid" in text


def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(run, tmp_path):
    said = "does not hold a run: neither config.yaml nor metrics.jsonl"
    with pytest.raises(ValueError, match=said):
        run_page.build(run / "samples")
    assert not (run / "samples" / "report.html").exists()
    with pytest.raises(ValueError, match="is not a folder"):
        run_page.build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("evaluation.json", "{", "Invalid JSON"),
        ("evaluation.json", "[]", "is not an object"),
        ("config.yaml", "a: [", "edited or damaged (while parsing a flow"),
        ("config.yaml", b"\xff\xfe\xfa", "is not text in UTF-8"),
        ("environment.json", "[1]", "is not an object"),
        ("peak.json", '{"held_out": "fair"}', "iteration: Field required"),
        ("suites/shapes.json", "{}", "was edited or damaged"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(run, caplog, file, text, said):
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    page = page_of(run)[1]
    (note,) = caplog.messages
    assert str(run / file) in note and said in note and note in page.text
    assert "reward/total" in page.text and page.src
    assert ("+0.280" in page.text) == (file != "evaluation.json")


def test_the_folders_of_weights_are_named(run):
    assert "LoRA of the peak" not in page_of(run)[1].text
    (run / "lora").mkdir()
    (run / "lora-peak").mkdir()
    text = page_of(run)[1].text
    assert "LoRA of the peak" in text and "lora-peak" in text


def test_a_table_of_answers_pairs_rows_by_image_and_says_what_failed():
    def said(text, answer):
        return {"question": text, "answer": answer, "counted": answer, "zeroed": False}

    def entry(*answers):
        return {"image": 3, "prompt": "p", "said": list(answers)}

    rows = [
        {"name": "before", "answers": {"c": [entry(said("red?", 0.5))]}},
        {"name": "old"},  # without checklists
        {"name": "after", "answers": {"c": [entry(said("red?", None)), entry(said("blue?", 1.0))]}},
    ]
    text = " ".join(re.sub("<[^>]+>", " ", answers.folded(rows)).split())
    shown = "before after image 3: p blue? yes image 3: p red? 0.50 failed"
    assert text == f"c: answers about 2 images {shown}"
    assert answers.folded(rows[1:2]) == ""


def test_building_again_replaces_the_page_and_leaves_nothing_else(run):
    run_page.build(run)
    (run / "report.html").write_text("old")
    run_page.build(run)
    assert "+0.280" in (run / "report.html").read_text(encoding="utf-8")
    assert not list(run.glob("*.part"))


def test_the_terminal_table_fits_eighty_columns_and_starts_with_the_headline_metric():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal.evaluation_table(EVALUATION))
    text = console.export_text()
    assert "…" not in text and text.index("shapes/strict") < text.index("shapes ")
    for said in ("before, guidance 3", "0.490", "[0.460, 0.520]", "512 images, 10 steps"):
        assert said in text, said
    assert "shapes/strict +0.280 [+0.235, +0.325]" in text
    assert terminal.evaluation_table({}).row_count == 0


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
    drawn = charts.line_chart("x", [(0, 1.0), (1, 2.0)]) + charts.interval_chart([("a", 1, 0, 2)])
    assert "<text" not in drawn and ">0.5<" in drawn


def test_the_line_under_a_chart_is_that_of_the_table_of_metrics(run):
    _, page = page_of(run)
    assert "Mean of the weighted sum of all rewards over the valid samples" in page.text
    assert described.sentence("reward/clip/small/mean").startswith("Mean of one reward")
    assert described.sentence("time/vae_work") != described.sentence("time/rollout")
    assert described.sentence("mine/number") == ""
    assert "mine/number" in charts.line_chart("mine/number", [(0, 1.0)])


# --- charts


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
    chart = charts.line_chart("x", [(0, 0.0), (5, 0.5), (10, 1.0)])
    (d,) = re.findall(r'class="line" d="([^"]+)"', chart)
    points = [tuple(map(float, p)) for p in re.findall(r"([\d.]+) ([\d.]+)", d)]
    assert points[1] == pytest.approx([(points[0][k] + points[2][k]) / 2 for k in (0, 1)], abs=0.06)
    assert points[0][0] < points[2][0] and points[0][1] > points[2][1]  # SVG's y grows downwards


@pytest.mark.parametrize(
    "points", [[(1, 0.5)], [(1, 0.0), (2, 0.0)], [(1, math.nan), (2, 3.0)], [(0, -1e-9), (1, 1e9)]]
)
def test_degenerate_curves_draw_finite_numbers(points):
    chart = charts.line_chart("x", points)
    assert "<svg" in chart and "nan" not in chart and "inf" not in chart


def test_no_finite_point_draws_nothing_and_long_curves_are_averaged():
    assert charts.line_chart("x", [(0, math.nan)]) == "" and charts.line_chart("x", []) == ""
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


def test_a_metric_that_repeats_another_is_shown_once_and_long_names_wrap(capsys):
    values = {"mean": 0.25, "ci": [0.125, 0.375]}
    rows = [
        {"name": name, "images": 4, "metrics": {"shapes/strict": values, "shapes": values}}
        for name in ("before", "evaluate, " * 9)
    ]
    Console(width=60).print(terminal.evaluation_table({"rows": rows}))
    shown = capsys.readouterr().out
    assert shown.count("[0.125, 0.375]") == 2 and "…" not in shown and shown.count("evaluate,") == 9


def test_small_differences_are_not_rounded_away(capsys):
    values = {"mean": -0.00172, "ci": [-0.00174, -0.00170]}
    paired = {"difference": 1.2e-5, "ci": [-1.6e-5, 2.6e-5], "p": 0.6}
    rows = [{"name": "before", "metrics": {"jpeg": values}}]
    table = terminal.evaluation_table({"rows": rows, "paired": {"jpeg": paired}})
    Console(width=100).print(table)
    shown = " ".join(capsys.readouterr().out.split())
    assert "-0.00172" in shown and "[-0.00174, -0.00170]" in shown
    assert "jpeg +0.0000120 [-0.0000160, +0.0000260], p = 0.6" in shown


@pytest.mark.parametrize(
    ("prompts", "after", "said", "verdict"),
    [
        (1, 0.6, "no interval: the 4 images are of 1 prompt; raise eval.images", "too few prompts"),
        (
            9,
            0.6,
            "[+0.000300, +0.000500], no p-value of 9 prompts, 95% paired bootstrap",
            "too few",
        ),
        (10, 0.6, "[+0.000300, +0.000500], p = 0.0002, 95% paired bootstrap", "nft improved r of"),
        (
            10,
            0.5004,
            "[+0.000300, +0.000500], no p-value of means that are equal in the digits shown, 95%"
            " paired bootstrap",
            "r of shapes-sd3 is the same before and after nft, in the digits shown: 0.500 before",
        ),
    ],
)
def test_a_verdict_needs_ten_prompts_and_digits_that_differ(run, prompts, after, said, verdict):
    means = {"before": 0.5, "after": after}
    rows = [
        {"name": name, "images": 4, "metrics": {"r": {**interval(mean, 0.1), "clusters": prompts}}}
        for name, mean in means.items()
    ]
    ends = [3e-4, 5e-4] if prompts > 1 else None
    change = {"difference": 4e-4, "ci": ends, "p": 2e-4, "n": 4, "clusters": prompts}
    evaluation = {"rows": rows, "paired": {"r": change}}
    assert (table := terminal.evaluation_table(evaluation)).caption.removeprefix(
        "r +0.000400"
    ).lstrip(", ") == said
    of = f"4 images of {prompts} text{'s' * (prompts > 1)}"
    assert of in table.title
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    text = page_of(run)[1].text
    assert said in text and verdict in text
    assert ("improved" in text) == ("improved" in verdict)
    assert f"of {prompts} different prompt" in text
    assert ("A verdict needs 10 different prompts" in text) == (prompts < 10)


def test_equal_metrics_are_one_column_and_one_chart_that_names_them_all(run):
    strict = {"shapes/strict": interval(0.2, 0.1), "total": interval(0.2, 0.1)}
    rows = [{"name": name, "metrics": strict} for name in ("before", "after")]
    (run / "evaluation.json").write_text(json.dumps({"rows": rows}))
    lines = [
        {"iteration": i, "reward/total": i, "reward/a/mean": i, "policy/kl": 2} for i in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html, page = page_of(run)
    assert html.count("<th>shapes/strict = total</th>") == 1 and "<th>total" not in html
    assert html.count('aria-label="reward/total = reward/a/mean"') == 1
    assert "Never changed: policy/kl 2.00" in page.text
    assert "policy/kl" not in html.partition('<details class="constant">')[0]
