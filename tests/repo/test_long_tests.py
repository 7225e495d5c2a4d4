"""The list of tests that make test leaves out: how it is chosen, and that what it names exists."""

import re
from pathlib import Path

import long
import long_tests

TESTS = Path(__file__).parents[1]
LOG = """
3.00s call     tests/a/test_one.py::test_long[a b]
2.00s setup    tests/a/test_one.py::test_long[a b]
0.10s call     tests/a/test_one.py::test_short
4.00s call     tests/a/test_two.py::test_alone
0.50s call     tests/a/test_one.py::test_more
9,499 passed in 9.00s
"""


def test_the_shortest_stay_and_one_of_each_file():
    seconds = long_tests.seconds_of(LOG)
    assert seconds == {
        "tests/a/test_one.py::test_long[a b]": 5,
        "tests/a/test_one.py::test_short": 0.1,
        "tests/a/test_two.py::test_alone": 4,
        "tests/a/test_one.py::test_more": 0.5,
    }
    assert long_tests.chosen(seconds, 10) == []
    assert long_tests.chosen(seconds, 5) == ["tests/a/test_one.py::test_long[a b]"]
    assert len(long_tests.chosen(seconds, 0)) == 2  # not the only one of its file


def test_what_the_list_names_exists():
    for name in long.LISTED:
        file, _, test = name.partition("::")
        function = re.escape(test.partition("[")[0].rpartition("::")[2])
        text = (TESTS.parent / file).read_text()
        assert re.search(rf"^ *def {function}\(", text, re.MULTILINE), name


def test_a_listed_test_is_marked(monkeypatch):
    class Item:
        marks = ()

        def __init__(self, nodeid):
            self.nodeid = nodeid

        def add_marker(self, mark):
            self.marks += (mark,)

    items = [Item("tests/x.py::test_y[z]"), Item("tests/x.py::test_y[w]")]
    monkeypatch.setattr(long, "LISTED", frozenset({items[0].nodeid}))
    long.mark_listed(items)
    assert [item.marks for item in items] == [("long", "listed"), ()]
