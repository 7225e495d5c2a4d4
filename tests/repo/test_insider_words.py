"""Insider words: the pages that a newcomer reads first, and `--help`, do without them.

`insider_words.txt` has the list. A word in code font is allowed: it is a key, a metric or a file.
"""

import re

import pytest
from pages import PAGES, ROOT
from typer.testing import CliRunner

from flowrl.cli.main import COMMANDS, app

NAMES_OF_START = ("index", "install", "quickstart", "what_happened", "coming_from", "choose_reward")
START = ["README.md", *(f"docs/{page}.md" for page in NAMES_OF_START)]
START += sorted(page for page in PAGES if re.match(r"docs/(recipes\w*|train/\w+)\.md", page))
MOST_WORDS = 7800  # of all start pages together, without the tables of recipes
NAMES = [name for commands in COMMANDS.values() for name in commands]
CODE = re.compile(r"^(`{3,}).*?^\1$|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.M | re.S)
TABLE = re.compile(r"<!-- recipes.*?<!-- /recipes -->", re.S)
LIST = (ROOT / "tests/repo/insider_words.txt").read_text(encoding="utf-8")
PLAIN = dict(line.split(": ") for line in LIST.splitlines() if not line.startswith("#"))


def insiders(text, where):
    """(page:line, word, plain word) of each insider word in a text, code and link targets aside."""
    text = CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
    longest = sorted(PLAIN, key=len, reverse=True)  # "told apart" before "told"
    words = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in longest)
    for found in re.finditer(rf"\b({words})s?\b", text, re.I):
        word = " ".join(found[1].lower().split())
        plain = {name.lower(): other for name, other in PLAIN.items()}[word]
        yield f"{where}:{text[: found.start()].count(chr(10)) + 1}", word, plain


@pytest.mark.parametrize("page", START)
def test_a_start_page_has_no_insider_word(page):
    assert not [*insiders(PAGES[page], page)]


def test_the_start_pages_are_short():
    words = [word for page in START for word in TABLE.sub("", PAGES[page]).split()]
    assert len(START) == 13 and len(words) <= MOST_WORDS


@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_help_text_has_no_insider_word(name):
    done = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="flowrl")
    assert done.exit_code == 0 and len(done.output) > 100
    assert not [*insiders(done.output, f"flowrl {name} --help")]


def test_an_insider_word_is_found_with_its_line_and_one_in_code_is_not():
    text = "A sample.\n\nEach `leaf` counts.\n```sh\nleaf\n```\nRead the [page](leaf.md).\n"
    assert not [*insiders(text, "page.md")]
    text += "Two network\nrows.\n"
    assert [*insiders(text, "page.md")] == [
        ("page.md:8", "network row", "sample that the network takes")
    ]


def test_the_list_is_sorted_and_the_glossary_is_too():
    assert list(PLAIN) == sorted(PLAIN, key=str.lower) and len(PLAIN) > 20
    terms = re.findall(r"^\*\*(.+?)\*\*", PAGES["docs/glossary.md"], re.M)
    assert terms == sorted(terms, key=str.lower) and len(terms) > 50


def test_every_term_of_the_glossary_links_to_a_page():
    entries = re.split(r"^(?=\*\*)", PAGES["docs/glossary.md"], flags=re.M)[1:]
    assert not [entry for entry in entries if not re.search(r"\]\([\w/#.-]+\)", entry)]
