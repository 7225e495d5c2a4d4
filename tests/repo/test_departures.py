"""Every method's settings beside the paper's and the code's: complete, and up to date."""

from dataclasses import replace
from pathlib import Path

import departures
import pytest
import yaml

from flowrl.config.schema import options

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "algorithms"
TEXT = (PAGES / "departures.yaml").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def methods():
    return departures.methods(TEXT)


@pytest.fixture(scope="module")
def now(methods):
    """Our defaults, of every method."""
    return {name: departures.defaults(name, method.model) for name, method in methods.items()}


def test_every_method_has_a_row_for_every_setting_that_it_reads_and_pages_show_them(methods, now):
    assert sorted(methods) == options("algorithm")
    for name, method in methods.items():
        assert not list(departures.problems(name, method, now[name]))
        page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert departures.filled(page, departures.table(method, now[name])) == page, (
            "run: python scripts/docs/departures.py"
        )
    assert not list(departures.unread(TEXT, now))


def test_a_default_that_changes_without_its_row_is_found(methods, now):
    changed = now["flow_grpo"] | {"algorithm.kl_weight": "0.01"}
    assert list(departures.problems("flow_grpo", methods["flow_grpo"], changed)) == [
        "flow_grpo: the row of algorithm.kl_weight says 0.04, and the default is 0.01"
    ]
    off = now["branch_grpo"] | {"ema.decay": "0.9", "ema.every": "8"}  # averaging comes back
    said = sorted(departures.problems("branch_grpo", methods["branch_grpo"], off))
    assert len(said) == 2 and "ema.every=8 has no row" in said[0] and "says 0" in said[1]


def test_a_setting_without_a_row_and_a_row_without_a_setting_are_found(methods, now):
    new = now["nft"] | {"algorithm.brand_new": "1"}
    assert list(departures.problems("nft", methods["nft"], new)) == [
        "nft: algorithm.brand_new=1 has no row in departures.yaml"
    ]
    said = yaml.safe_load(TEXT)
    said["methods"]["nft"]["settings"]["algorithm.kl_wieght"] = 0.1
    said["blocks"]["adamw"]["optimizer.momentum"] = 0.9
    assert sorted(departures.unread(yaml.safe_dump(said), now)) == [
        "adamw: optimizer.momentum is not a setting that any method reads; drop its row",
        "nft: algorithm.kl_wieght is not a setting that the method reads; drop its row",
    ]


def test_a_departure_says_why(methods, now):
    method, key = methods["crd"], "algorithm.reference_guidance"
    silent = replace(method, rows=method.rows | {key: replace(method.rows[key], why=None)})
    assert list(departures.problems("crd", silent, now["crd"])) == [
        f"crd: {key} is none here and 4.5 there; the row should say why"
    ]
    with pytest.raises(ValueError, match="nft: algorithm.beta: a row has no because, but paper"):
        departures.row("nft: algorithm.beta", {"code": 1, "because": "it is"})


@pytest.mark.parametrize(
    ("value", "said"),
    [("1e-4", "0.0001"), (0.0001, "0.0001"), (5, "5"), (5.0, "5"), (None, "null"), (True, "true")]
    + [([1e-5, "1e-5"], "[1e-05, 1e-05]"), ("flow_sde", "flow_sde"), ([], "[]")],
)
def test_equal_values_are_equal_texts(value, said):
    assert departures.text_of(value) == said


def test_a_row_is_shown_with_what_is_said_and_departures_come_first():
    rows = {
        "algorithm.same": departures.row("m", 1),
        "algorithm.other": departures.row("m", {"paper": 3, "code": 2, "ours": 1, "why": "a | b"}),
        "batch.own": departures.row("m", {"own": None}),
    }
    method = departures.Method(code="somebody/code at abc", model="sd1.5", rows=rows)
    now = {"algorithm.same": "1", "algorithm.other": "1", "batch.own": "null"}
    *_, first, second, third = departures.table(method, now).splitlines()
    assert first == "| `other` | `3` | `2` | `1` | a \\| b |"
    assert second == "| `same` | – | `1` | `1` |  |"
    assert third == "| `batch.own` | – | – | `null` | an option of ours, at rest |"
    paper = departures.table(replace(method, code=None), now)
    assert "| `same` | `1` | – | `1` |  |" in paper and "No code of the authors" in paper
    with pytest.raises(ValueError, match="around its settings"):
        departures.filled("a page without marks", paper)
