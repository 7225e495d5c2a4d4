"""Figures that several pages state are the same on each, and are what code or a recorded run says.

docs/LOG.md and CHANGELOG.md say what was so at their time and are not read.
"""

import json
import re
import statistics
from collections import Counter

import pytest
from pages import PAGES, ROOT

from flowrl.config import schema
from flowrl.config.load import load_config
from flowrl.data import media
from flowrl.data.prompts import load_prompts
from flowrl.rewards.core.reward import network_bytes, reward_class
from flowrl.runtime.registry import shipped

TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70}
UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = dict(zip(UNITS, range(1, 10), strict=True)) | TENS
WORDS |= {f"{ten}-{unit}": TENS[ten] + WORDS[unit] for ten in TENS for unit in UNITS}
NUMBER = r"\b([\w,-]*\w)"  # any word: value() knows which are numbers
UNREAD = ("docs/LOG.md", "docs/configuration/")  # history; written from the schemas
TEXTS = {
    page: " ".join(text.split()) for page, text in PAGES.items() if not page.startswith(UNREAD)
} | {"SECURITY.md": " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())}


def tried():
    """Rows of the recorded run of scripts/bench/pipelines.py."""
    path = ROOT / "docs" / "results" / "pipelines.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compared():
    """Methods in the table of docs/results.md, best first."""
    table = PAGES["docs/results.md"].split("## What each method buys")[1].split("\n## ")[0]
    return re.findall(r"^\| \[(\w+)\]\(algorithms", table, re.M)


def held_out():
    """Prompts of one evaluation of the quickstart, an image each."""
    count, prompts = load_config("quickstart").eval.images, load_prompts("shapes:eval")
    return [prompts[i % len(prompts)]["prompt"] for i in range(count)]


FIGURES = {  # what it counts: its value, pages that state it, and how they do
    "methods": (lambda: len(schema.options("algorithm")), 3, r"N \[?(?:methods\]|algorithms\])"),
    "methods compared": (lambda: len(compared()), 1, r"what N of them gain"),
    "rewards": (lambda: len(shipped("flowrl.rewards")), 1, r"N \[rewards\]"),
    "pipeline classes": (
        lambda: len({row["pipeline"] for row in tried() if row["failed"] is None}),
        3,
        r"N (?:pipeline classes|classes pass\])",
    ),
    "pipelines tried": (lambda: len(tried()), 2, r"(?:Of|of) N (?:tiny|cases)"),
    "pipelines that pass": (
        lambda: sum(row["failed"] is None for row in tried()),
        2,
        r"(?:N pass load|N of \d+ cases)",
    ),
    "images of an evaluation": (lambda: len(held_out()), 1, r"N images of \d+ different texts"),
    "texts of shapes:eval": (
        lambda: len(set(held_out())),
        3,
        r"(?:images of|rows and) N (?:different )?texts",
    ),
    "rows of shapes:eval": (lambda: len(load_prompts("shapes:eval")), 1, r"has N rows and"),
    "prompts of geneval:eval": (
        lambda: len(load_prompts("geneval:eval")),
        2,
        r"(?:benchmark's|generator's) N (?:x 4|\()",
    ),
    "prompts of ocr:eval": (
        lambda: len(load_prompts("ocr:eval")),
        2,
        r"(?:`ocr:eval` \(N\)|our generator's N, or)",
    ),
    "prompts of ocr:train": (lambda: len(load_prompts("ocr:train")), 1, r"`ocr:train` \(N prompts"),
    "pixels of a picture": (lambda: media.MAX_PIXELS, 2, r"(?:beyond|more than) N (?:a picture|p)"),
    "pixels of a video": (
        lambda: media.MAX_VIDEO_PIXELS,
        2,
        r"(?:and N a video|more than N in all its frames)",
    ),
}


def value(word):
    """A number in digits or words; None: another word."""
    digits = word.replace(",", "")
    return int(digits) if digits.isdecimal() else WORDS.get(word.lower())


def statements(pattern):
    """(page, value) for each place that matches; N stands for a number."""
    expression = re.compile(pattern.replace("N", NUMBER), re.I)
    found = ((page, m) for page, text in TEXTS.items() for m in expression.finditer(text))
    values = [(page, value(next(filter(None, m.groups())))) for page, m in found]
    return [(page, number) for page, number in values if number is not None]


@pytest.mark.parametrize("what", FIGURES)
def test_every_page_states_the_figure_that_is_so(what):
    true, pages, pattern = FIGURES[what]
    found = statements(pattern)
    assert len(found) >= pages, f"{what}: stated {len(found)} times; does the pattern still fit?"
    assert {page: given for page, given in found if given != true()} == {}, f"{what}: {true()}"


def test_no_count_of_methods_rewards_or_pipelines_escapes_the_table():
    counted = r"(?<![.,%-])N \[?(?:methods|algorithms|rewards|pipelines|pipeline classes)\b"
    large = [(page, given) for page, given in statements(counted) if given >= 20]
    known = [found for _, _, pattern in FIGURES.values() for found in statements(pattern)]
    assert len(large) >= 3 and not set(large) - set(known)


def test_words_of_numbers_are_read():
    assert [value(word) for word in ("Thirty-six", "1,018", "seven", "74")] == [36, 1018, 7, 74]


# --- tables of the same command


def tables(text):
    """((command before it, first line), rows) for each table of a page; a row by its first cell."""
    command = ""
    for block in re.split(r"\n\s*\n", text):
        if named := re.findall(r"python (scripts/[\w./]+\.py(?: [^`\n|]*)?)", block):
            command = named[-1].strip()
        lines = [line for line in block.splitlines() if line.startswith("|")]
        if command and len(lines) > 2 and set(lines[1]) <= set("|- :"):
            yield (command, lines[0]), {line.split("|")[1]: line for line in lines[2:]}


def differing(pages):
    """Rows that two pages give for the same command, and not alike."""
    first, found = {}, []
    for page, text in pages.items():
        for key, rows in tables(text):
            for name, row in rows.items():
                other, before = first.setdefault((*key, name), (page, row))
                found += [f"{other}: {before}\n{page}: {row}"] if row != before else []
    return found


def test_tables_of_one_command_agree_on_all_pages():
    assert not differing({page: text for page, text in PAGES.items() if page != "docs/LOG.md"})


def test_tables_of_one_command_that_differ_are_found():
    page = "By `python scripts/bench/a.py --seeds 0`:\n\n| seed | after |\n|-|-|\n| 0 | 0.716 |\n"
    assert not differing({"one": page, "two": page})
    assert len(differing({"one": page, "two": page.replace("0.716", "0.714")})) == 1
    assert not differing({"one": page, "two": page.replace("--seeds 0", "--seeds 1")})


def seeds_of_the_quickstart():
    """Cells of each seed's row, the first and the last empty."""
    table = PAGES["docs/quickstart.md"].split("<!-- results -->")[1].split("<!-- /results -->")[0]
    return [line.split("|") for line in table.splitlines() if re.match(r"\| \d ", line)]


def test_the_first_screen_states_what_the_tables_say():
    """README: the gain and minutes of the quickstart; memory and hours of FLUX on an RTX 4090."""
    rows = [[cell.strip() for cell in row[2:7]] for row in seeds_of_the_quickstart()]
    said = re.search(r"rises from ([\d.]+) to ([\d.]+) in (\w+) minutes", TEXTS["README.md"])
    mean = [statistics.mean(float(row[column]) for row in rows) for column in (0, 2)]
    assert [f"{value:.2f}" for value in mean] == [said[1], said[2]]
    seconds = statistics.mean(float(row[4]) for row in rows)
    assert WORDS[said[3]] == round(seconds / 60)
    recipe = re.search(
        r"^\| flux.1-dev \| 24 GB \| `[^`]+` \| ([\d.]+) \| .*rtx4090 (\d+:\d+)",
        PAGES["docs/recipes.md"],
        re.M,
    )
    assert f"{recipe[1]} GB, {recipe[2]} h;" in TEXTS["README.md"]


def test_what_just_happened_has_the_numbers_of_the_quickstart():
    cfg, page = load_config("quickstart"), TEXTS["docs/what_happened.md"]
    assert f"these steps {cfg.iterations} times" in page
    assert f"takes {cfg.batch.prompts} prompts and makes {cfg.batch.group} pictures of each" in page
    assert f"the other {cfg.batch.group - 1} of its prompt" in page


def test_the_quickstart_has_one_table_of_seeds_and_one_of_tasks_and_they_agree():
    """A task's mean over seeds counts as often as the evaluation has its images."""
    page = PAGES["docs/quickstart.md"]
    seeds = seeds_of_the_quickstart()
    cells = [[float(cell) for cell in row[2:5]] for row in seeds]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    prompts = load_prompts("shapes:eval")
    images = Counter(
        prompts[i % len(prompts)]["task"] for i in range(load_config("quickstart").eval.images)
    )
    assert len(seeds) == 3 and set(images) == {task for task, *_ in rows}
    for column in range(3):  # before; before, guided; after
        by_seed = statistics.mean(row[column] for row in cells)
        by_task = sum(images[row[0]] * float(row[1 + column]) for row in rows) / images.total()
        assert by_task == pytest.approx(by_seed, abs=0.006), column
    # the page: guided sampling of the untrained model is ahead in relations alone
    assert [task for task, _, guided, after in rows if after <= guided] == ["position"]
    (guided,) = re.findall(r"in place of ([\d.]+)\.", page)
    assert float(guided) == cells[0][1]
    assert "quickstart_seeds.py --seeds 0 1 2" not in PAGES["docs/algorithms/nft.md"]


def test_who_leads_the_comparison_is_said_as_its_table_has_it():
    ranks = [name.replace("_", "") for name in compared()]
    page = TEXTS["docs/quickstart.md"]
    named = re.search(r"others gain more, (\w+), ([\w-]+) and (\w+) first", page)
    assert [name.lower().replace("-", "") for name in named.groups()] == ranks[:3]
    assert ranks.index("awm") < ranks.index("nft")  # docs/quickstart.md says so


def test_the_table_of_rewards_has_every_one_and_no_other():
    table = PAGES["docs/rewards.md"].split("## The rewards that ship")[1].split("\n\nWeights")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == shipped("flowrl.rewards")


def test_the_table_to_choose_a_reward_says_what_the_rewards_do():
    """Its gigabytes and gradients; a gradient passes where images need not be rounded."""
    table = PAGES["docs/choose_reward.md"]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+) \| (yes|no) \|", table, re.M)
    assert len(rows) > 12
    for name, gigabytes, gradient in rows:
        cls = reward_class(name)
        assert float(gigabytes) == round(network_bytes(name) / 1e9, 1), name
        passes = cls.differentiable or "rounding" in cls.Settings.model_fields
        assert gradient == ("yes" if passes else "no"), name


def test_sentences_in_troubleshooting_are_those_of_the_code():
    code = "".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        for folder in ("flowrl", "rewards", "samplers")
        for path in (ROOT / folder).rglob("*.py")
    )
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGES["docs/troubleshooting.md"], re.M)
    ours = [part for said in quoted if "module" not in said for part in re.split(r'[."]{3,}', said)]
    assert len(ours) > 20
    assert not [part for part in ours if part.strip(" :") not in code]
