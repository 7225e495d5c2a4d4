"""What is read back from a run folder is checked; what is wrong is one sentence with its place."""

import json

import numpy as np
import pytest

from flowrl.evaluation import record
from flowrl.policy.weights import lora
from flowrl.report import suite_page
from flowrl.runtime.store import run_folder, side_files
from flowrl.runtime.store.side_files import EvaluationFile


def evaluation(row):
    return json.dumps({"rows": [{"name": "before", **row}]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Invalid JSON"),
        ("\x00\x01", "Invalid JSON"),
        ("[1]", r"\[1\] is not an object"),
        ("[" * 5000, "recursion limit"),
        ('{"rows": {}}', r"rows=\{\}: Input should be a valid array"),
        ('{"rows": [{}]}', "rows.0.name: Field required"),
        (evaluation({"steps": "x"}), "rows.0.steps='x': Input should be a valid integer"),
        (evaluation({"metrics": {"a": {"mean": "x", "ci": [0, 1]}}}), r"rows.0.metrics.a.*='x'"),
        (evaluation({"nfe": 10**400}), "rows.0.nfe=1000"),
        (evaluation({"values": {"a": [float("nan")]}}), "rows.0.values.a.0=nan"),
        ('{"rows": [{"name": "a"}], "n": ' + "1" * 5000 + "}", "Invalid JSON: number out of range"),
    ],
)
def test_a_damaged_evaluation_is_one_sentence(tmp_path, text, said):
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        run_folder.read_evaluation(tmp_path)
    sentence = str(error.value)
    assert sentence.startswith(f"{tmp_path / 'evaluation.json'} was edited or damaged (")
    assert sentence.endswith(
        f"restore it, or delete it and evaluate again: flowrl evaluate {tmp_path}"
    )
    assert len(sentence) < 400


def test_what_a_row_says_besides_is_kept(tmp_path):
    written = {"rows": [{"name": "a", "own": [1, {"x": None}]}], "paired": {}}
    (tmp_path / "x.json").write_text(json.dumps(written))
    assert side_files.read(tmp_path / "x.json", EvaluationFile, again="") == written


@pytest.mark.parametrize("text", ["{}", "[1]", "{oops", '{"rows": [{"name": 1}]}', '{"rows": 3}'])
def test_a_damaged_record_of_a_suite_is_one_sentence(tmp_path, text):
    path = tmp_path / "suites" / "shapes.json"
    path.parent.mkdir()
    path.write_text(text)
    notes = []
    assert suite_page.section(tmp_path, notes) == ""
    assert notes[0].startswith(f"{path} was edited or damaged (") and len(notes) == 1
    assert notes[0].endswith("evaluate again: flowrl evaluate --suite")


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "{}",
        '{"iteration": "1"}',
        '{"iteration": true}',
        '{"iteration": -1}',
        '{"iteration": 1e300}',
        '{"iteration": 2, "loss": NaN}',
        '{"iteration": 2, "loss": 1e999}',
        '{"iteration": 2, "loss": ' + "1" * 400 + "}",
        '{"iteration": 2, "loss": [1]}',
        "[" * 100_000,
    ],
)
def test_a_line_of_metrics_that_is_none_is_named_and_dropped_on_resume(tmp_path, line):
    path, good = tmp_path / "metrics.jsonl", '{"iteration": 1, "loss": 0.5, "kl": null}'
    path.write_text(f"{good}\n{line}\n" + '{"iteration": 3}\n')
    (note,) = run_folder.read(tmp_path).notes
    assert note.startswith("Line 2 of metrics.jsonl was cut short, edited or damaged (")
    assert note.endswith(") and is left out, as when the run is resumed.") and len(note) < 300
    assert [row["iteration"] for row in run_folder.read_metrics(tmp_path)] == [1, 3]
    run_folder.truncate_metrics(tmp_path, 3)
    assert path.read_text() == f"{good}\n" + '{"iteration": 3}\n'


def test_an_iteration_that_was_recorded_twice_counts_once(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "a": 1}\n{"iteration": 1, "a": 2}')
    run_folder.truncate_metrics(tmp_path, 1)
    assert run_folder.read_metrics(tmp_path) == [{"iteration": 1, "a": 2}]


@pytest.mark.parametrize("text", ["[]", '{"rank": 4}', '{"rank": "4", "alpha": 8}', '{"rank": 4'])
def test_settings_of_an_exported_lora_are_checked(tmp_path, text):
    (tmp_path / lora.SETTINGS).write_text(text)
    with pytest.raises(ValueError, match="flowrl.json was edited or damaged .* export the LoRA"):
        lora.read_settings(tmp_path / lora.SETTINGS)


@pytest.mark.parametrize("damage", ["none", "torn", "bits", "shape", "type", "missing"])
def test_damaged_pictures_before_training_are_left_out(tmp_path, damage):
    path = tmp_path / "samples" / "before.npz"
    path.parent.mkdir()
    size = (2, 3, 8, 8) if damage == "shape" else (2, 3, 4, 4)
    images = np.zeros(size, np.float32 if damage == "type" else np.uint8)
    np.savez(path, **{"other" if damage == "missing" else "images": images})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255 * (damage == "bits")
    path.write_bytes(data[: -40 if damage == "torn" else None])
    found = record._kept_before(tmp_path, "images", np.zeros((2, 3, 4, 4), np.uint8))
    assert bool(found) == (damage == "none")
