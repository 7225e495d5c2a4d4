"""The documentation holds: its snippets run, its files and links exist. Of its commands, see
test_commands.py."""

import ast
import importlib
import importlib.metadata
import importlib.util
import math
import re
import sys
import tomllib

import config_reference as reference
import from_code
import masked
import methods_by_kind
import pytest
import small
import torch
import yaml
from changelog import with_changelog
from pages import OURS, PAGES, ROOT, blocks, commands
from reference_pages import prose
from toy import ToyPolicy, advantages_of, rewards_of, roll_out
from whole_words import unbroken

import flowrl
from flowrl.algorithms import TransitionMethod
from flowrl.algorithms.common.planning import window_start, windowed
from flowrl.cli.main import COMMANDS
from flowrl.config import build, load, schema
from flowrl.samplers import sigmas

# of an algorithm's page
SECTIONS = ["Usage", "Equations", "Logged metrics", "Departures from paper and code", "Results"]
BLOCKS = [block for page, text in OURS.items() for block in blocks(page, text)]
PYTHON = {where: code for where, language, code, _ in BLOCKS if language == "python"}
RUN = {where: code for where, _, code, run in BLOCKS if run}
ALGORITHMS = schema.options("algorithm")


def test_pages_have_snippets_where_they_are_expected():
    assert {"README.md", "docs/quickstart.md", "docs/rewards/write.md"} <= {
        where.split(":")[0] for where in RUN
    }
    assert len(PYTHON) >= len(RUN) >= 6


# --- snippets


def exists(module, name):
    """Whether a module has this attribute or submodule."""
    loaded = importlib.import_module(module)
    return hasattr(loaded, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("where", PYTHON)
def test_python_snippets_parse_and_name_what_exists(where):
    for node in ast.walk(ast.parse(PYTHON[where])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known = exists(node.module, alias.name)
                assert known, f"{where}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(alias.name) for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "flowrl"
        ):
            assert node.attr in flowrl.__all__, f"{where}: flowrl.{node.attr} is not public"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load_config":
            load.load_config(*(ast.literal_eval(argument) for argument in node.args))


@pytest.mark.parametrize("where", RUN)
def test_snippets_marked_run_do(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(RUN[where], where, "exec"), {"__name__": "snippet"})


def test_the_example_of_a_reward_scores_pictures_and_videos_as_it_says():
    code = next(code for code in RUN.values() if "def redness" in code)
    names = {"__name__": "snippet"}
    exec(code, names)
    reward, red = {"redness": names["redness"]}, torch.zeros(2, 3, 4, 4)
    red[0, 0] = 1
    red[1, 1:] = 1
    video = red.view(1, 2, 3, 4, 4)
    assert flowrl.score(red, ["", ""], reward).total.tolist() == [1.0, -1.0]
    assert flowrl.score(video, [""], reward).total.tolist() == [0.0]


# --- links and paths


def slugs(text):
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(page):
    text = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]*`", "", PAGES[page], flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            assert anchor in slugs(target.read_text(encoding="utf-8")), (
                f"{page} links to {link}: no such heading"
            )


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = re.findall(
        r"`((?:configs|flowrl|rewards|samplers|scripts|tests)/[\w./-]+)`", PAGES[page]
    )
    invented = {
        "rewards/NAME.py",
        "flowrl/algorithms/rloo.py",
        "configs/algorithm/rloo.yaml",
        "tests/algorithms/test_rloo.py",
    }
    missing = [path for path in named if path not in invented and not (ROOT / path).exists()]
    assert not missing, f"{page} names {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_import_names_that_a_page_gives_exist(page):
    for name in re.findall(r"`flowrl\.([\w.]+)[`(]", PAGES[page]):
        module, _, last = f"flowrl.{name}".rpartition(".")
        assert exists(module, last), f"{page} names {module}.{last}"


def test_the_site_lists_every_page_and_only_pages():
    def flat(entry):
        """Pages of an entry: a page, a page with its title, or a section."""
        if isinstance(entry, str):
            return [entry]
        entries = entry if isinstance(entry, list) else entry.values()
        return [page for inner in entries for page in flat(inner)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))  # no Python tags
    listed = [f"docs/{page}" for page in flat(site["nav"])]
    assert sorted(listed) == sorted(set(PAGES) - {"README.md"})
    assert flowrl.__version__ in site["copyright"]


def test_the_quickstart_marks_its_results_table():
    table = re.search(
        r"<!-- results -->\n(.*?)<!-- /results -->", PAGES["docs/quickstart.md"], re.S
    )
    assert table and "scripts/bench/quickstart_seeds.py" in table[1]


# --- what has to be installed


def imports():
    """Top-level names of the packages that the code imports."""
    found = set()
    for path in [
        p for top in ("flowrl", "samplers", "rewards") for p in ROOT.glob(f"{top}/**/*.py")
    ]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module.split(".")[0]}
    return found


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = project["dependencies"], project["optional-dependencies"]
    known = {"dev", "docs", "ocr", "video", "xformers", "wandb", "server"}
    assert known <= extras.keys()
    entries = [*core, *sum(extras.values(), [])]
    declared = {re.split(r"[<>=\[]", entry)[0].lower() for entry in entries}
    foreign = imports() - sys.stdlib_module_names - {"flowrl"}
    assert {"yaml", "omegaconf", "torch"} <= foreign
    maybe_absent = {name: [name] for name in ("av", "paddleocr", "lpips")}
    packages = importlib.metadata.packages_distributions() | maybe_absent
    for name in foreign:
        given = {package.lower().replace("_", "-") for package in packages.get(name, [])}
        assert given & declared, f"{name} is imported, and no package that is declared has it"


# --- reference


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("batch.group", "int > 0"),
        ("ema.decay", "float >= 0 and < 1"),
        ("model.dtype", "fp32, bf16, fp16"),
        ("sampler.guidance", "float, none, pipeline"),
        ("stop.kl", "float > 0 or null"),
        ("optimizer.betas", "[float >= 0 and < 1, float >= 0 and < 1]"),
        ("train.lora.targets", "list of str or null"),
        ("algorithm.std", "group, global, null"),
        ("algorithm.keep", "int >= 2 or null"),
        ("algorithm.clip", "[float > 0, float > 0]"),
        ("algorithm.window.high", "int > 0 or null"),
        ("algorithm.tree.splits", "list of int"),
        ("algorithm.tree.strides", "list of int > 0"),
        ("algorithm.tree.steps", "list of int or null"),
    ],
)
def test_the_reference_says_in_words_what_a_key_accepts(key, said):
    field = dict(
        [
            *reference.fields(schema.Config),
            *reference.fields(schema.algorithm_schema("grpo"), "algorithm."),
        ]
    )[key]
    assert reference.accepts(field.annotation, field.metadata) == said


def test_the_configuration_pages_are_what_the_schemas_say():
    made = {f"docs/configuration/{file}": text for file, text in reference.pages().items()}
    there = {page: text for page, text in PAGES.items() if page.startswith("docs/configuration")}
    assert there == made, "run: python scripts/docs/config_reference.py"
    for key in load.flatten(load.load_config("quickstart").model_dump(mode="json")):
        section = key.split(".")[0] if "." in key else "run"
        assert (
            section in ("reward", "algorithm")
            or f"`{key}`" in PAGES[f"docs/configuration/{section}.md"]
            or "pipeline" in key
        )


def test_every_section_of_the_configuration_has_a_page_that_names_others():
    sections = {name for name, _ in reference.sections()}
    assert sections == reference.MORE.keys() and {"run", "model", "reward", "together"} <= sections
    for name in sections:
        assert f"({name}.md)" in PAGES["docs/configuration/index.md"]


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in (ROOT / "flowrl/algorithms").glob("[!_]*.py")})
)
def test_shared_and_own_tables_together_are_an_algorithms_options(name):
    """Each option stands once with the default that holds: in the algorithm's own table, or in one
    of those that it names."""
    page = PAGES["docs/configuration/algorithm.md"]
    section = page.split(f"## algorithm.name = {name}\n")[1].split("\n## ")[0]
    shared = [
        page.split(f"## Options {title}\n")[1].split("\n## ")[0]
        for title in re.findall(r"\[(of [\w ]+)\]\(#", section)
    ]
    alone = dict.fromkeys(("dsrl", "neighbor", "opd", "reward_gradient"), 1) | {"remask": 2}
    assert len(shared) == alone.get(name, 3)
    cells = re.compile(r"^\| `(algorithm\.[\w.]+)` \| `([^`]*)` \|", re.M)
    said = dict(row for table in [*shared, section] for row in cells.findall(table))
    options = reference.rows(schema.algorithm_schema(name), "algorithm.")
    assert said == {row.key: row.default for row in options}


def test_every_method_stands_once_in_the_taxonomy():
    families = PAGES["docs/which_method.md"].split("## Taxonomy\n")[1]
    named = re.findall(r"\[`(\w+)`\]\(algorithms/\1\.md\)", families)
    assert sorted(named) == sorted(ALGORITHMS)


# --- pages that are made from code


def test_the_python_page_has_every_public_name_with_what_its_docstring_says():
    page = PAGES["docs/api.md"]
    names = re.findall(r"^### flowrl\.(\w+)$", page, re.M)
    assert sorted([*names, "__version__"]) == flowrl.__all__
    assert "    steps: int = 28,\n" in page and "    **pipeline_kwargs: Any\n) -> Policy" in page
    assert "\n* `resume`: the folder of a run.\n" in page and "| `velocity` | Predict v" in page
    assert "    stopped: str | None = None  # reason" in page  # a field with its comment


def test_a_docstring_becomes_paragraphs_and_a_list_of_arguments():
    doc = "Do *it*.\n\nsteps, seed: of a run. on: a name\nthat is none. size: see a_b; out: x"
    assert [*prose(doc, ("steps", "seed", "size", "out"))] == [
        r"Do \*it\*.",
        "",
        "* `steps`, `seed`: of a run. on: a name that is none.",
        r"* `size`: see a\_b;",
        "* `out`: x",
        "",
    ]


def test_the_page_of_commands_has_the_help_of_each():
    page = PAGES["docs/commands.md"]
    names = [name for group in COMMANDS.values() for name in group]
    assert re.findall(r"^### flowrl (\w+)$", page, re.M) == names
    assert page.count("Usage: flowrl ") == len(names) == page.count("-h, --help")


def test_the_changelog_page_has_the_changelog_with_links_that_hold():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    page = with_changelog(PAGES["docs/changelog.md"], changelog)
    assert page.count("\n# ") == 0 and page.startswith("# ") and "\n## 0.1.0" in page
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
    assert len(links) > 5
    for link in links:
        path, _, anchor = link.partition("#")
        assert f"docs/{path}" in PAGES, link
        assert not anchor or anchor in slugs(PAGES[f"docs/{path}"]), link
    assert with_changelog("# A page\n", changelog) == "# A page\n"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page_with_the_same_sections(name):
    page = PAGES[f"docs/algorithms/{name}.md"]
    assert re.findall(r"^## (.+)$", page, re.M) == SECTIONS
    assert "arXiv:" in page
    chosen = [
        words
        for _, words in commands(name, page)
        if words[0] == "train" and f"algorithm={name}" in words
    ]
    models = [next((w for w in words if w.startswith("model=")), "") for words in chosen]
    embedded = small.TOKENS if methods_by_kind.unmasks(name) else ""  # none is named: shapes-sd3
    assert 0 < models.count(embedded) < len(models), (
        "a command for the embedded model and one for a model of the hub"
    )


def test_every_metric_that_code_writes_is_explained():
    files = [p for folder in ("flowrl", "rewards") for p in ROOT.glob(f"{folder}/**/*.py")]
    sources = "".join(p.read_text(encoding="utf-8") for p in files)
    written = set(re.findall(r'"((?:policy|optimizer|reward)/[a-z0-9_]+)"', sources))
    written |= {
        f"time/{phase}" for phase in re.findall(r'(?:\.phase|\.add_time)\("(\w+)"', sources)
    }
    explained = "".join(PAGES.values())
    assert {
        "policy/clip_fraction",
        "policy/x0_error",
        "reward/total",
        "optimizer/lr",
        "time/advantages",
    } <= written
    assert not [metric for metric in written if f"`{metric}`" not in explained]


def test_words_of_other_trainers_and_the_files_of_methods_are_those_of_the_code():
    made = {path.relative_to(ROOT).as_posix(): text for path, text in from_code.pages().items()}
    wrong = [page for page, text in made.items() if PAGES[page] != text]
    assert not wrong, f"{wrong}: run python scripts/docs/from_code.py"
    grpo = "`flowrl/algorithms/grpo.py`, `flowrl/algorithms/common/transitions.py`"
    assert f"{grpo}, `samplers/flow_sde.py`.\n" in made["docs/algorithms/flow_grpo.md"]
    assert "| `learning_rate`, `unet_lr` | optimizer.lr |" in made["docs/coming_from.md"]
    assert "`flowrl train experiment=qwen-image memory=40gb`" in made["docs/train/qwen_image.md"]
    assert made["docs/papers.md"].count("(https://arxiv.org/abs/") == len(ALGORITHMS)
    trained = sum(page.startswith("docs/train/") for page in made)
    assert trained == 5 and len(made) == 5 + trained + len(ALGORITHMS)


def test_the_readme_cites_what_citation_cff_says():
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entry = PAGES["README.md"].split("```bibtex\n")[1].split("```")[0]
    for key in ("title", "version", "license"):
        assert f"  {key} = {{{said[key]}}}" in entry
    assert said["authors"][0]["name"] in entry and said["version"] == flowrl.__version__


def test_words_of_code_with_a_hyphen_are_not_broken():
    page = '<p>a-b</p><code class="a-b">go <b>x-y</b> --dry-run &lt;k=sd3.5-m&gt; -o</code>'
    whole = '<span class="whole">{}</span>'.format
    words = f"go <b>{whole('x-y')}</b> {whole('--dry-run')} &lt;{whole('k=sd3.5-m')}&gt; -o"
    assert unbroken(page) == f'<p>a-b</p><code class="a-b">{words}</code>'
    long = f"<code>{'x' * 30}-wide</code>"
    assert unbroken(long) == long


def test_each_cell_of_the_comparison_links_what_was_read_at_a_commit():
    page = PAGES["README.md"]
    table = page.split("## Beside other trainers\n")[1].split("\n\n[")[0]
    rows = [line.strip("|").split(" | ")[1:] for line in table.splitlines() if line[:2] == "| "]
    cells = [cell.strip() for row in rows[1:] for cell in row]
    assert len(cells) == 5 * (len(rows) - 1) > 50
    assert not [cell for cell in cells if cell != "–" and not re.search(r"\](\(|\[)", cell)]
    read = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", page, re.M))
    assert read.keys() == set(re.findall(r"\]\[([\w-]+)\]", table))
    assert all(re.search(r"/(?:tree|blob)/[0-9a-f]{7,}(?:/|$)", link) for link in read.values())


# --- the overview of algorithms


OVERVIEW = PAGES["docs/algorithms/index.md"]
COST = {
    name: re.findall(r"`([^`]+)`", rest)
    for names, rest in re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (`[^|]+` \| `[^|]+` \| `[^|]+`) \|$", OVERVIEW, re.M
    )
    for name in re.findall(r"`(\w+)`", names)
}


def example(name, copies=1, prompts=2):
    """The first command of an algorithm's page, on a toy flow or masked generator -> config,
    algorithm, policy, rollout, rewards, rows."""
    words = next(words for _, words in commands(name, PAGES[f"docs/algorithms/{name}.md"]))
    cfg = load.load_config(None, words[1:])
    algorithm, steps, group = build.make_algorithm(cfg), cfg.sampler.steps, copies * cfg.batch.group
    how = {"prompts": prompts, "sampler": cfg.sampler}
    if algorithm.unmasks:
        policy = masked.policy(lora={"rank": 2, "alpha": 4})
        rollout = masked.roll_out(policy, algorithm, copies=group, steps=steps, **how)
    else:
        policy, grid = ToyPolicy(0.1), sigmas.shifted(steps, 3)
        leaves = algorithm.plan(grid, sampler=cfg.sampler, iteration=0, seed=0).leaves
        rollout = roll_out(policy, algorithm, copies=group // leaves, grid=grid, **how)
    rewards = rewards_of(torch.randn(len(rollout.leaf)))
    credit = advantages_of(algorithm, rollout, rewards)
    rows = algorithm.columns(rollout, credit, seed=0, iteration=0)
    return cfg, algorithm, policy, rollout, rewards, rows


def copies_of(algorithm, plan):
    """n of the formulas: a sample's noise levels, or its noised copies."""
    if "start" in algorithm.needs:  # one row a sample
        return 1
    if hasattr(algorithm, "drawn_steps"):
        return algorithm.drawn_steps(plan) * algorithm.config.anchors
    if "states" in algorithm.needs:
        return int(plan.trained.sum())
    return algorithm.config.noised if "reward" in algorithm.needs else algorithm.draws(plan)


def letters(c, steps):
    """What the formulas of methods on denoising steps name."""
    start = window_start(c, steps, iteration=0, seed=0, memory={}) if windowed(c) else 0
    tree, w = c.tree, c.window.size
    named = {"K": tree.children, "B": tree.splits, "D": tree.strides, "w": w, "l": start}
    named |= {"f": c.timestep_fraction, "r": c.tail, "s": getattr(c, "shrink", 1)}
    forks = range(steps - 1) if tree.steps is None else tree.steps
    return named | {"S": forks, "noisy": {*tree.splits, *range(start, start + w)}}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_formulas_of_cost_count_the_rollout_and_the_rows(name, copies):
    cfg, algorithm, _, rollout, _, rows = example(name, copies)
    plan, steps = rollout.plan, cfg.sampler.steps
    known = {"T": steps, "G": cfg.batch.group * copies, "floor": math.floor, "ceil": math.ceil}
    on_steps = isinstance(algorithm, TransitionMethod)
    known |= letters(algorithm.config, steps) if on_steps else {"n": copies_of(algorithm, plan)}
    leaves, forwards, most = COST[name]
    assert eval(leaves, dict(known)) == plan.leaves
    known["C"] = known["G"] // plan.leaves
    assert eval(forwards, dict(known)) * 2 == rollout.nfe
    assert eval(most, dict(known)) * 2 == len(rows)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pages_name_the_metrics_that_a_loss_logs_and_no_other(name):
    _, algorithm, policy, rollout, rewards, rows = example(name)
    logged = algorithm.loss(algorithm.score(policy, rollout, rows), rows).metrics
    page = PAGES[f"docs/algorithms/{name}.md"]
    shared = set(
        re.findall(r"`((?:policy|trust)/\w+)`", OVERVIEW.split("## Metrics\n")[1].split("\n## ")[0])
    )
    own = set(re.findall(r"^\| `(policy/\w+)` \|", page, re.M))
    assert own <= logged.keys() <= own | shared and not own & shared
    forks = {name.split("/")[1] for name in algorithm.observe(rollout, rewards)}
    watched = {"reward", "gain", "balance"} if name == "dense_grpo" else {"variance"}
    assert forks == (watched if rollout.plan.leaves > 1 else set())


def test_the_overview_says_of_every_algorithm_what_it_needs():
    table = dict(re.findall(r"^\| \[`(\w+)`\]\(\1\.md\) \|.*\| ([\w, ]+) \|$", OVERVIEW, re.M))
    assert set(table) == set(COST) == set(ALGORITHMS) and f"{len(ALGORITHMS)} files" in OVERVIEW
    for name, needs in table.items():
        algorithm = build.make_algorithm(load.load_config(None, [f"algorithm={name}"]))
        assert set(needs.split(", ")) == algorithm.needs, name
