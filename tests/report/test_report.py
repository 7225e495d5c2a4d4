"""report.html: what is in a run folder is on the page, what is missing is said, nothing is fetched,
text is escaped."""

import base64
import hashlib
import io
import json
import re
import shlex
from html import unescape

import finished
import pytest
from finished import EVALUATION, interval, page_of, row
from rich.console import Console

from flowrl.config.load import diff, dump, load_config
from flowrl.report import answers, run_page, terminal


@pytest.fixture
def run(tmp_path):
    return finished.write(tmp_path / "my-run")


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
        ("samples/after.npz", "samples/after.npz is missing or damaged: a run that ended early"),
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
    assert "LoRA of the peak" in text and "lora/" in text and "lora-peak/" in text


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
    assert "Never changed: policy/kl 2.00" in page.text and "All rows:" not in page.text
    assert "policy/kl" not in html.partition('<details class="constant">')[0]
