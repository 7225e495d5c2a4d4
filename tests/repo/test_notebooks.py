"""The notebooks of docs/notebooks run as a reader runs them, and hold what they showed; and the
algorithm that they and docs/extending.md show: one file, one import, outside the package."""

import ast
import re
import shlex
import shutil

import nbformat
import notebooks
import pytest
import small
import torch
from pages import PAGES, ROOT
from toy import ToyPolicy, advantages_of, gradient, rewards_of, roll_out

from flowrl.algorithms.common.find import algorithm_class
from flowrl.types import Rewards

RANKS = ROOT / "docs" / "examples" / "ranks.py"
MACHINE = re.compile(r"/(tmp|root|home|work|usr|Users|private)/\w")  # paths of some machine


def read(name):
    return nbformat.read(notebooks.NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds(book):
    """The kinds of what each cell shows, but for warnings."""
    shown = [[o for o in cell.outputs if o.get("name") != "stderr"] for cell in code(book)]
    return [[(o.output_type, *sorted(o.get("data", ()))) for o in own] for own in shown]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_holds_what_all_its_cells_showed_and_nothing_of_a_machine(name):
    path, book = notebooks.NOTEBOOKS / f"{name}.ipynb", read(name)
    nbformat.validate(book)
    text = re.sub(r"base64,[\w+/=]*", "", path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000 and not MACHINE.search(text)
    assert [cell.execution_count for cell in code(book)] == [*range(1, len(code(book)) + 1)]
    assert not any("error" in kind for cell in kinds(book) for kind in cell)
    for link in re.findall(r"\]\(([^)#]+)", "".join(c.source for c in book.cells)):
        assert (path.parent / link).exists(), link


def test_the_page_lists_the_notebooks_and_the_first_has_thirty_lines():
    assert (
        len(notebooks.NAMES)
        == 4
        == len(set(re.findall(r"\((notebooks/\w+)", PAGES["docs/notebooks.md"])))
    )
    lines = [line for cell in code(read("align")) for line in cell.source.splitlines()]
    assert sum(map(bool, lines)) <= 30
    assert (
        code(read("algorithm"))[0].source == f"%%writefile ranks.py\n{RANKS.read_text().rstrip()}"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_runs_in_a_kernel_of_its_own(name, tmp_path):
    assert kinds(notebooks.run(name, tmp_path)) == kinds(read(name))


def test_the_own_algorithm_is_a_file_with_one_import():
    text = RANKS.read_text()
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert len(text.splitlines()) <= 40 and [n.module for n in imports] == ["flowrl.algorithms"]


def make(**options):
    cls = algorithm_class(f"{RANKS}:Ranks")
    return cls(cls.Config(**options))


def test_its_advantages_are_places_among_the_samples_of_a_prompt():
    """Prompt 0: 1, 2, 90 -> -1, 0, 1. Prompt 1, between them: 5, failed, 5 -> 0, NaN, 0."""
    total = torch.tensor([1.0, 5.0, 2.0, torch.nan, 90.0, 5.0])
    rewards = Rewards(raw={}, weights={}, total=total, valid=total.isfinite())
    adv = make().leaf_advantages(rewards, torch.tensor([0, 1, 0, 1, 0, 1]))
    assert adv.tolist() == pytest.approx([-1, 0, 0, torch.nan, 1, 0], nan_ok=True)


@pytest.mark.parametrize("margin", [0.0, 1e6])
def test_its_gradient_is_that_of_its_formula(margin):
    """A grad e for good samples; for bad ones A grad e below the margin, and 0 beyond it."""
    policy, method = ToyPolicy(0.3), make(margin=margin)
    rollout = roll_out(policy, method)
    reward = rewards_of(torch.randn(24, generator=torch.Generator().manual_seed(0)))
    rows = method.columns(rollout, advantages_of(method, rollout, reward), seed=0, iteration=0)
    method.loss(method.score(policy, rollout, rows), rows).loss.backward()
    got = gradient(policy.net)
    policy.zero_grad()
    kept = rows.adv if margin else rows.adv.clamp(min=0)
    (kept * method.score(policy, rollout, rows)["error"]).sum().backward()
    assert torch.allclose(got, gradient(policy.net), rtol=1e-4, atol=1e-6) and got.abs().max() > 0


def test_the_command_of_the_page_trains_with_it_from_another_folder(tmp_path, monkeypatch):
    shutil.copy(RANKS, tmp_path)
    monkeypatch.chdir(tmp_path)
    line = re.search(r"^flowrl (train algorithm=ranks.py.*)$", PAGES["docs/extending.md"], re.M)
    tiny = ["batch.prompts=2", "batch.group=4", "sampler.steps=4", "iterations=2", "trackers=[]"]
    quick = ["data.eval=null", "model.self_check=false", "guard.check_rewards=false"]
    result = small.invoke(*shlex.split(line[1]), *tiny, *quick, "output=run")
    assert result.exit_code == 0, result.output
    rows = small.lines("run")
    assert [row["policy/rows"] for row in rows] == [16, 16] and rows[0]["policy/error"] > 0
    assert "margin: 0.5" in (tmp_path / "run" / "config.yaml").read_text()
    assert (tmp_path / "run" / "lora").is_dir()  # of weights that were stepped


def test_an_own_loss_that_is_nan_stops_the_run_with_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS.read_text().replace("batch.adv.abs()", "float('nan')"))
    monkeypatch.chdir(tmp_path)
    words = [w for w in small.words("run", "nft", data__eval="null") if "algorithm" not in w]
    result = small.invoke("train", *words, "algorithm=ranks.py:Ranks", "guard.nonfinite=1")
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "Traceback" not in said
    assert "1 updates in a row had a non-finite loss or gradient; lower optimizer.lr" in said
