"""The documentation holds: its snippets run, its commands and links exist, its reference is what the schemas say."""

import ast
import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

import flowrl
from flowrl import config
from flowrl.cli import app
from flowrl.rewards import reward_class

ROOT = Path(__file__).resolve().parent.parent
PAGES = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}
FENCE = re.compile(r"^(<!-- run -->\n)?```(\w+)\n(.*?)^```$", re.M | re.S)
BLOCKS = [
    (f"{page}:{text[: m.start()].count(chr(10)) + 1}", m[2], m[3], bool(m[1])) for page, text in PAGES.items() for m in FENCE.finditer(text)
]
PYTHON = {where: code for where, language, code, _ in BLOCKS if language == "python"}
RUN = {where: code for where, _, code, run in BLOCKS if run}
LINES = [(where, line) for where, language, code, _ in BLOCKS if language == "bash" for line in code.splitlines() if line]
COMMANDS = [(where, shlex.split(line, comments=True)) for where, line in LINES]
FLOWRL = [(where, words[1:]) for where, words in COMMANDS if words[0] == "flowrl"]


def test_every_page_has_snippets_or_commands_where_they_are_expected():
    assert {"README.md", "docs/quickstart.md", "docs/rewards.md"} <= {where.split(":")[0] for where in RUN}
    assert len(FLOWRL) > 20 and len(PYTHON) >= len(RUN) >= 6


# --- snippets


@pytest.mark.parametrize("where", PYTHON)
def test_python_snippets_parse_and_name_what_exists(where):
    for node in ast.walk(ast.parse(PYTHON[where])):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                known = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert known, f"{where}: {node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            assert all(importlib.util.find_spec(alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flowrl":
            assert node.attr in flowrl.__all__, f"{where}: flowrl.{node.attr} is not public"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "load_config":
            config.load_config(*(ast.literal_eval(argument) for argument in node.args))


@pytest.mark.parametrize("where", RUN)
def test_snippets_marked_run_do(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(RUN[where], where, "exec"), {"__name__": "snippet"})


def test_the_readme_reward_scores_pictures_and_videos_as_it_says():
    import torch

    code = next(code for code in RUN.values() if "class Redness" in code)
    names = {"__name__": "snippet"}
    exec(code, names)
    red = torch.zeros(2, 3, 4, 4)
    red[0, 0] = 1
    red[1, 1:] = 1
    assert names["REWARD"]()(red, ["", ""]).tolist() == [1.0, -1.0]
    assert flowrl.score(red.view(1, 2, 3, 4, 4), [""], {"redness": names["REWARD"]()}).total.tolist() == [0.0]


# --- commands


@pytest.mark.parametrize(("where", "words"), FLOWRL, ids=[" ".join(words) for _, words in FLOWRL])
def test_commands_exist_take_their_options_and_compose(where, words):
    group = typer.main.get_command(app)
    assert words[0] in group.commands, f"{where}: flowrl has no command {words[0]}"
    command = group.commands[words[0]]
    context = command.make_context(words[0], words[1:])  # parses and checks options; runs nothing
    if words[0] in ("train", "show") and not context.params.get("resume"):
        cfg = config.load_config(None, list(context.params["overrides"] or []))
        reads = {key for label, entry in cfg.reward.items() for key in reward_class(entry.get("name", label)).reads}
        assert not reads or cfg.data.train.startswith("shapes:"), f"{where}: a text file carries no {reads}"


def test_scripts_and_make_targets_exist():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    for where, words in COMMANDS:
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), where
        elif words[0] == "python":
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            unknown = [w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source]
            assert not unknown, f"{where}: {words[1]} has no {unknown}"


# --- links and paths


def slugs(text):
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", PAGES[page], flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            assert anchor in slugs(target.read_text(encoding="utf-8")), f"{page} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`((?:configs|flowrl|rewards|samplers|scripts|tests)/[\w./-]+)`", PAGES[page])
    invented = {"rewards/redness.py", "rewards/NAME.py"}  # the reader's own
    missing = [path for path in named if path not in invented and not (ROOT / path).exists()]
    assert not missing, f"{page} names {missing}"


def test_the_site_lists_every_page_and_only_pages():
    def flat(entries):
        for entry in entries:
            yield from [entry] if isinstance(entry, str) else flat(next(iter(entry.values())))

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert {f"docs/{page}" for page in flat(nav)} == set(PAGES) - {"README.md"}


def test_the_readme_marks_its_results_table():
    table = re.search(r"<!-- results -->\n(.*?)<!-- /results -->", PAGES["README.md"], re.S)
    assert table and "scripts/quickstart_seeds.py" in table[1]


# --- what has to be installed


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = project["dependencies"], project["optional-dependencies"]
    assert {"dev", "docs", "ocr", "video", "xformers", "wandb", "deepspeed", "server"} <= extras.keys()
    declared = {re.split(r"[<>=\[]", entry)[0].lower() for entry in [*core, *sum(extras.values(), [])]}
    found = set()
    for path in [p for folder in ("flowrl", "samplers", "rewards") for p in ROOT.glob(f"{folder}/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found |= {alias.name.split(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
            found |= {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    foreign = found - sys.stdlib_module_names - {"flowrl"}
    names = importlib.metadata.packages_distributions() | {"av": ["av"]}  # an extra, which may be absent
    assert {"yaml", "omegaconf", "torch"} <= foreign
    assert not [name for name in foreign if not {d.lower().replace("_", "-") for d in names.get(name, [])} & declared]


# --- reference


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "scripts" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    ],
)
def test_the_reference_says_in_words_what_a_key_accepts(reference, key, said):
    field = dict(reference.rows(config.Config))[key]
    assert reference.accepts(field.annotation, field.metadata) == said


def test_the_configuration_page_is_what_the_schemas_say(reference):
    assert PAGES["docs/configuration.md"] == reference.page(), "run: python scripts/config_reference.py"
    for key in config.flatten(config.load_config("quickstart").model_dump(mode="json")):
        assert f"`{key}`" in PAGES["docs/configuration.md"] or key.split(".")[0] in ("reward", "algorithm") or "pipeline" in key


@pytest.mark.parametrize("name", config.options("algorithm"))
def test_every_algorithm_has_a_page_with_the_same_sections(name):
    page = PAGES[f"docs/algorithms/{name}.md"]
    assert re.findall(r"^## (.+)$", page, re.M) == ["Usage", "Equations", "Logged metrics", "Departures from paper and code", "Results"]
    assert f"algorithm={name}" in page and "arXiv:" in page


def test_every_metric_that_code_writes_is_explained():
    sources = "".join(p.read_text(encoding="utf-8") for p in [*ROOT.glob("flowrl/*.py"), *ROOT.glob("flowrl/algorithms/*.py")])
    written = set(re.findall(r'"((?:policy|optimizer|reward)/[a-z0-9_]+)"', sources))
    explained = "".join(PAGES.values())
    assert {"policy/clip_fraction", "policy/x0_error", "reward/total", "optimizer/lr"} <= written
    assert not [metric for metric in written if f"`{metric}`" not in explained]
