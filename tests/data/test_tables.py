"""Lists of samples as .jsonl, .csv and .parquet: the same entry comes back from each."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import small
from image_files import in_an_empty_folder, lines, noise  # noqa: F401  a fixture for every test

from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data import scored_dataset, tables
from flowrl.data.samples import collect
from flowrl.runtime.install import install_line

arrow = pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="needs pyarrow")
LISTS = [".jsonl", ".csv", pytest.param(".parquet", marks=arrow)]
ENTRIES = [
    {
        "file": "1",
        "prompt": '["two,\\r\\nlines", 3]',
        "scores": {"jpeg": -0.1 - 0.2, "a.b": 1e-300},
        "weights": {"jpeg": 1.0, "a.b": 0.0},
        "total": -0.30000000000000004,
        "tag": "plain text",
        "code": "0042",
        "number": 42,
        "digits": "42",
        "truth": "true",
        "nothing": None,
        "empty": "",
        "not": "NaN",
        "include": [{"class": "Kuh", "count": 2}],
    },
    {
        "file": "ü/b.png",
        "prompt": "=1+1",
        "scores": {"jpeg": 2.0, "a.b": None},
        "weights": {"jpeg": 1.0, "a.b": 0.0},
        "total": 2.0,
    },
]


@pytest.mark.parametrize("suffix", LISTS)
def test_entries_come_back_as_they_were(suffix):
    path = tables.write(Path(f"x{suffix}"), ENTRIES)
    found = tables.read(path)
    assert [entry for _, entry in found] == ENTRIES
    assert all(str(path) in where for where, _ in found)


def test_a_table_has_a_column_for_each_score():
    tables.write(Path("x.csv"), ENTRIES)
    with open("x.csv", newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first["scores.jpeg"] == "-0.30000000000000004" and first["tag"] == "plain text"
    assert second["scores.a.b"] == "" and second["weights.a.b"] == "0.0"


@pytest.mark.parametrize("suffix", LISTS)
def test_score_writes_and_reads_lists_by_their_ending(suffix):
    noise("imgs/a.png", 1), noise("imgs/b.png", 2)
    entries = [{"file_name": f"{n}.png", "prompt": f"p{n}", "k": [1]} for n in "ab"]
    tables.write(Path(f"imgs/metadata{suffix}"), entries)
    words = ["score", "imgs", "--reward", "jpeg"]
    assert small.invoke(*words, "-o", "x.jsonl").exit_code == 0
    path = Path(f"made{suffix}")
    result = small.invoke(*words, "-o", path)
    assert result.exit_code == 0 and f"2 of 2 images: {path}" in result.output
    assert [entry for _, entry in tables.read(path)] == lines("x.jsonl")
    assert scored_dataset.load(path) == scored_dataset.load("x.jsonl")
    assert [s.meta for s in collect([Path("imgs")], prompts=path)] == [{"k": [1]}] * 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("file,prompt\na.png\n", "x.csv, line 2 cannot be read: it does not have the 2 cells"),
        ("file,prompt\na.png,x,y\n", "x.csv, line 2 cannot be read: it does not have the 2 cells"),
        ("file,prompt\na.png,\n", 'x.csv, line 2 needs a "prompt"'),
        ("file,text\na.png,x\n", 'x.csv, line 2 needs a "prompt"'),
        ("name,prompt\na.png,x\n", 'x.csv, line 2 needs a "file"'),
        ("file,file\na,b\n", "x.csv cannot be read: two columns have the same name: file, file"),
        ("file,prompt\n", "x.csv is empty"),
        ("", "x.csv is empty"),
        ('file,prompt\na.png,"x\n', "x.csv cannot be read: unexpected end of data"),
        ("\udcff", "x.csv is not UTF-8: byte 0, in line 1"),
    ],
)
def test_a_broken_table_is_named(text, sentence):
    noise("a.png")
    Path("x.csv").write_bytes(text.encode(errors="surrogateescape"))
    result = small.invoke("score", "a.png", "--prompts", "x.csv", "--reward", "jpeg")
    assert result.exit_code == 2 and sentence in result.stderr, result.output


@arrow
def test_a_broken_parquet_is_named_and_foreign_columns_are_read():
    import pyarrow
    import pyarrow.parquet

    Path("x.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"^x.parquet cannot be read as parquet: "):
        tables.read(Path("x.parquet"))
    rows = [{"file": "a.png", "prompt": "x", "n": 3, "list": ["1", "2"], "text": "[1]"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "x.parquet")
    (found,) = tables.read(Path("x.parquet"))
    assert found == ("x.parquet, row 1", {**rows[0], "text": [1]})


def test_parquet_without_its_extra_names_it_before_anything_is_scored(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    noise("a.png")
    Path("y.parquet").write_text("")
    words = ["score", "a.png", "--reward", "jpeg"]
    for more in (["--prompt", "x", "-o", "x.parquet"], ["--prompts", "y.parquet"]):
        result = small.invoke(*words, *more)
        assert result.exit_code == 2 and install_line("parquet") in result.stderr
        assert "give a .csv or .jsonl file" in result.stderr
    assert not Path("x.parquet").exists()


def test_lists_are_json_of_any_script():
    tables.write(Path("x.jsonl"), [{"file": "a", "prompt": "猫"}])
    assert Path("x.jsonl").read_text() == '{"file": "a", "prompt": "猫"}\n'
    assert json.loads(Path("x.jsonl").read_text())["prompt"] == "猫"
