"""Several runs side by side: the table says what docs/results says of the same runs, intervals are
over seeds only where there are seeds, and what does not compare is said."""

import copy
import csv
import json
import math
import re
import shutil
import time

import cells
import gains
import pytest
import small
import torch
import yaml
from page import Page

from flowrl.report import comparison
from flowrl.runtime import statistics
from flowrl.runtime.yaml_text import flatten

METHODS = ("nft", "flow_grpo", "awm", "dpo")
ITERATIONS = 200
HOW = {"steps": 8, "guidance": "none", "solver": "dpm2", "rlg": 1.0, "seed": 0, "images": 348}


def cell_of(method, seed):
    (path,) = (cells.FOLDER / "cells").glob(f"run-{method}-{seed}-*.json")
    return json.loads(path.read_text())


def write(folder, cell, *, lr=1e-3, how=HOW, iterations=ITERATIONS):
    """A run folder that holds the evaluation of a committed cell."""
    folder.mkdir(parents=True)
    config = {
        "model": {"source": "shapes-sd3"},
        "algorithm": {"name": "grpo", "label": cell["method"]},
        "optimizer": {"lr": lr},
        "data": {"eval": "shapes:eval"},
        "seed": cell["seed"],
        "output": str(folder),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for name, key in (("before", "images_before"), ("after", "images")):
        metrics = {"shapes/strict": cell[name]["shapes/strict"]}
        values = {"shapes/strict": gains.marks(cell[key])}
        texts = gains.texts_of("shapes:eval", 348)
        own = {"name": name, "prompts": texts, "metrics": metrics, "values": values}
        rows.append(own | how)
    paired = {"shapes/strict": cell["paired"]["shapes/strict"]}
    (folder / "evaluation.json").write_text(json.dumps({"rows": rows, "paired": paired}))
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(1, iterations + 1):
            line = {"iteration": i, "reward/total": cell["seed"] / 10 + math.sin(i / 9)}
            line |= {f"reward/part{k}/mean": i * k for k in range(6)} | {"policy/kl": i * 1e-4}
            line |= {"nfe/rollout": 10.0, "nfe/update": 20.0, "nfe/reference": 5}
            line |= {"time/iteration": 0.5, "memory/peak_gb": 1 + cell["seed"]}
            file.write(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    """Four methods, three seeds each."""
    place = tmp_path_factory.mktemp("runs")
    return [
        write(place / f"{method}-{seed}", cell_of(method, seed))
        for method in METHODS
        for seed in (0, 1, 2)
    ]


def compared(*paths, key=None):
    return comparison.grouped(paths, key)


def row(groups, name):
    return comparison.numbers_of("shapes/strict", name, groups[name])


@pytest.fixture(scope="module")
def whole(twelve, tmp_path_factory):
    """The report of all runs: what is printed, its page, its table as CSV."""
    page = tmp_path_factory.mktemp("whole") / "page.html"
    table = page.with_name("table.csv")
    began = time.process_time()
    words = ["--group", "algorithm", "--output", page, "--table", table]
    result = small.invoke("report", *twelve, *words)
    assert result.exit_code == 0 and time.process_time() - began < 10, result.output
    return " ".join(result.output.split()), page.read_text(), table


def test_the_table_of_twelve_runs_is_that_of_docs_results(whole):
    printed, _, table = whole
    for found in csv.DictReader(table.open()):
        runs = [cell_of(found["group"], seed) for seed in (0, 1, 2)]
        texts, seeds = gains.gain(runs), gains.seed_gain(runs)
        numbers = {
            key: float(value) for key, value in found.items() if key not in ("metric", "group")
        }
        of_docs = {"gain": texts.mean, "prompts_low": texts.low, "prompts_high": texts.high}
        of_docs |= {"seeds_low": seeds.low, "seeds_high": seeds.high, "seeds": 3}
        assert {key: numbers[key] for key in of_docs} == pytest.approx(of_docs, abs=1e-9)
        assert f"{texts.mean:+.3f}" in printed and gains.over_seeds(runs)[:8] in printed
        # 10 sampled, 5 read and 20 trained rows an iteration
        assert numbers["network_rows"] == ITERATIONS * (10 + 5 + 3 * 20)
        assert (numbers["seconds"], numbers["peak_gb"]) == (ITERATIONS * 0.5, 3)
    assert sum(1 for _ in csv.reader(table.open())) == 1 + len(METHODS)


def test_the_page_shows_curves_with_bands_tables_and_what_differs(whole):
    _, html, _ = whole
    page = Page(html)
    assert len(html) < 3e6 and not page.src and "default-src 'none'" in html
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    chart = html.partition('aria-label="reward/total"')[2].partition("</svg>")[0]
    assert chart.count('class="line"') == len(METHODS) == chart.count("fill-opacity")
    assert html.count('aria-label="policy/kl"') == 1
    for said in ("12 runs compared", "over seeds [95%]", "nft, iteration", "grpo-2", "15,000"):
        assert said in html, said
    assert "nothing but seed" not in page.text.lower() and "optimizer.lr" not in page.text


def test_markdown_and_latex_hold_the_same_table(twelve):
    groups = compared(*twelve[2:4], key="algorithm")
    expected = comparison.lines(groups, "shapes/strict")
    for suffix in (".md", ".tex"):
        text = comparison.written(groups, suffix)
        found = [line for line in text.splitlines() if re.match(r"(\| )?(nft|flow.*grpo) ", line)]
        plain = [re.split(r" [|&] ", line.strip("|\\ ")) for line in found]
        assert [[re.sub(r"[$\\{}]", "", text) for text in line] for line in plain] == expected
    assert r"flow\_grpo & $1$" in text and "$15{,}000$" in text and r"\bottomrule" in text
    assert text.count(r"\\") == 1 + 2


def test_one_run_has_no_interval_over_seeds_and_two_have_students(twelve):
    alone = row(compared(twelve[0], twelve[3]), str(twelve[0]))
    assert alone["seeds_low"] is None and alone["seeds"] == 1
    paired = cell_of("nft", 0)["paired"]["shapes/strict"]
    assert [alone["prompts_low"], alone["prompts_high"]] == paired["ci"]
    two = row(compared(*twelve[:2], key="algorithm"), "nft")
    found = [cell_of("nft", seed)["paired"]["shapes/strict"]["difference"] for seed in (0, 1)]
    half = 12.7062 * abs(found[0] - found[1]) / 2  # t sqrt(2) |a - b| / sqrt(2) sqrt(2)
    assert two["seeds_high"] - two["gain"] == pytest.approx(half, rel=1e-4)


def test_a_folder_that_was_moved_is_compared_alike(twelve, tmp_path):
    moved = [shutil.copytree(path, tmp_path / "away" / path.name) for path in twelve[:3]]
    there, here = (compared(*paths, key="algorithm") for paths in (moved, twelve[:3]))
    assert row(there, "nft") == row(here, "nft") and comparison.notes(there) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"how": {**HOW, "steps": 25}}, "they differ in steps (25, 8)"),
        ({"how": {**HOW, "guidance": 4.5}}, "they differ in guidance (4.5, none)"),
        ({"how": {**HOW, "prompts": ["a cat"]}}, "they differ in prompts"),
        ({"lr": 1e-2}, "Runs of nft differ in more than the seed: optimizer.lr."),
        ({}, "share a seed, so it has no interval over seeds"),
    ],
)
def test_what_does_not_compare_is_said(twelve, tmp_path, change, said):
    seed = 0 if not change else 1
    other = write(tmp_path / "other", cell_of("nft", seed), iterations=2, **change)
    groups = compared(twelve[0], other, key="algorithm")
    (note,) = comparison.notes(groups)
    assert said in note and (row(groups, "nft")["seeds_low"] is None) == (not change)
    if "prompts" in said:
        assert row(groups, "nft")["prompts_low"] is None
    result = small.invoke(
        "report", twelve[0], other, "--group", "algorithm", "-o", tmp_path / "p.html"
    )
    assert said in " ".join(result.output.split()) and said in (tmp_path / "p.html").read_text()


def test_runs_without_a_picture_that_both_scored_have_no_interval_over_prompts(twelve, tmp_path):
    places = [shutil.copytree(path, tmp_path / path.name) for path in twelve[:2]]
    for k, place in enumerate(places):
        file = place / "evaluation.json"
        record = json.loads(file.read_text())
        for evaluation in record["rows"]:
            values = evaluation["values"]["shapes/strict"]
            evaluation["values"]["shapes/strict"] = [
                v if i % 2 == k else None for i, v in enumerate(values)
            ]
        file.write_text(json.dumps(record))
    found = row(compared(*places, key="algorithm"), "nft")
    assert found["prompts_low"] is None and found["seeds_low"] < found["gain"]
    alone = copy.deepcopy(compared(places[0])[str(places[0])])
    alone[0].paired["shapes/strict"]["ci"] = None  # it was evaluated on one prompt
    assert comparison.numbers_of("shapes/strict", "a", alone)["prompts_low"] is None


def test_a_run_without_an_evaluation_still_has_curves_and_cost(twelve, tmp_path):
    bare = shutil.copytree(twelve[0], tmp_path / "bare")
    (bare / "evaluation.json").unlink()
    lines = [f'{{"iteration": {i}, "nfe/rollout": 75}}\n' for i in range(200)]  # no reward
    (bare / "metrics.jsonl").write_text("".join(lines))
    words = ["--group", "algorithm", "-o", tmp_path / "p.html"]
    result = small.invoke("report", bare, twelve[1], *words)
    assert result.exit_code == 0, result.output
    assert "has no evaluation before and after" in " ".join(result.output.split())
    only = small.invoke("report", bare, "--table", tmp_path / "t.md", "-o", tmp_path / "q.html")
    assert only.exit_code == 0 and "15,000" in (tmp_path / "t.md").read_text()


def test_what_differs_are_the_settings_that_show_prints(twelve, tmp_path):
    other = write(tmp_path / "other", cell_of("awm", 1), lr=1e-2, iterations=1)
    found = comparison.differences(compared(twelve[0], other))
    assert found["optimizer.lr"] == ["0.001", "0.01"] and found["algorithm.label"] == ["nft", "awm"]
    assert not {"seed", "output", "model.source", "algorithm", "optimizer"} & found.keys()
    older, size = copy.deepcopy(HOW), {"height": 96, "width": 96}
    runs = [write(tmp_path / "small", cell_of("awm", 1), how=older)]
    runs += [write(tmp_path / "large", cell_of("awm", 2), how=older | size)]
    config = yaml.safe_load((runs[1] / "config.yaml").read_text()) | {"eval": size}
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert comparison.differences(compared(*runs))["eval.height"] == ["unset", "96"]
    said = comparison.notes(compared(*runs))[0]
    assert "not evaluated alike" in said and "height (96, unset), width (96, unset)." in said
    assert flatten({"a": {"b": 1}, "c": {}}) == {"a.b": 1, "c": {}}


MISTAKES = {  # words, with A and B for runs -> what the sentence says
    "A A": "are the same run; name each run once",
    "A nowhere": "nowhere is not a run folder",
    "A B --table out.xlsx": '"out.xlsx": a table ends in .md, .tex, .csv; name it so',
    "A B --table out": '"out": a table ends in',
    "A B -o page.pdf": "the page is an .html file",
    "A B --group algoritm": 'no run has a setting "algoritm"; did you mean "algorithm"',
    "A B --group optimizer.learning": 'no run has a setting "optimizer.learning"',
    "A B --group": "--group needs a value",
    "A B --grup algorithm": "there is no option --grup; did you mean",
    "A B --table nowhere/": "a table ends in",
    "A damaged": "evaluation.json was edited or damaged",
    "A unread": "config.yaml was edited or damaged",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(twelve, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for name, file in (("damaged", "evaluation.json"), ("unread", "config.yaml")):
        folder = shutil.copytree(twelve[1], tmp_path / name)
        (folder / file).write_text("{[")
    runs = {"A": twelve[0], "B": twelve[3]}
    result = small.invoke("report", *(runs.get(word, word) for word in words.split()))
    said = result.output.strip()
    assert result.exit_code == 2 and MISTAKES[words] in said and said.count("\n") == 0
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob("*.md"))


def test_students_quantiles_hold_their_probability():
    """t of 1 degree is tan(pi level / 2), of 2 degrees level sqrt(2 / (1 - level^2))."""
    assert statistics.student_quantile(1) == pytest.approx(math.tan(0.95 * math.pi / 2))
    assert statistics.student_quantile(2, 0.9) == pytest.approx(0.9 * math.sqrt(2 / (1 - 0.81)))
    for freedom in (1, 2, 3, 4, 5, 9, 30):
        t = statistics.student_quantile(freedom)
        grid = torch.linspace(-t, t, 20001, dtype=torch.float64)
        density = torch.distributions.StudentT(torch.tensor(float(freedom), dtype=torch.float64))
        inside = torch.trapezoid(density.log_prob(grid).exp(), grid)
        assert float(inside) == pytest.approx(0.95, abs=1e-6)


def test_an_interval_over_runs_is_that_of_their_mean_without_images_that_lack_a_value():
    """Means over two runs: before 0, 1, 2 and after 2, 1, 4; image 3 lacks a value in one run."""
    before = [[0, 0, 2, 5], [0, 2, 2, 5]]
    after = [[1, 1, 4, math.nan], [3, 1, 4, 6]]
    found = statistics.paired_over_runs(before, after, groups=["a", "b", "b", "c"])
    expected = statistics.paired_bootstrap([0, 1, 2], [2, 1, 4], groups=["a", "b", "b"])
    assert found == expected and found.clusters == 2 and found.difference == pytest.approx(4 / 3)
