"""Wrong configs of every kind end in sentences: some of the cases of scripts/bench/fuzz.py."""

import importlib
from pathlib import Path

import pytest
import small

from flowrl.policy import load_policy

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
CONTROLS = {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("fuzz_cases")


def test_fuzzed_configs_end_in_sentences(fuzz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = set()
    for number in range(60):
        case = fuzz.config_case(4, number)
        if case.words[0] != "show":
            continue
        case.prepare(tmp_path)
        result = small.invoke(*case.words)
        why = (case.name, case.words, result.output)
        assert result.exit_code in (0, 2) and isinstance(result.exception, SystemExit | None), why
        assert result.exit_code == 0 or result.stderr.startswith("flowrl: "), why
        assert not CONTROLS & set(result.output), why
        kinds.add((case.name.split()[0], result.exit_code))
    assert {("file", 0), ("file", 2), ("words", 2), ("rewards", 2), ("text", 2)} <= kinds


def test_a_case_is_the_same_each_time(fuzz):
    assert fuzz.config_case(3, 14).words == fuzz.config_case(3, 14).words
    assert fuzz.config_case(3, 14).words != fuzz.config_case(4, 14).words


@pytest.fixture(scope="module")
def pipeline():
    return load_policy("shapes-sd3").pipe


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"height": "64"}, "height='64' should be a whole number from 1"),
        ({"height": [64], "width": None}, r"height=\[64\] should be a whole number from 1"),
        ({"height": 7}, "divisible by"),
        ({"guidance_scale": "a[/b]"}, "fails while a call .* the prompts give: guidance_scale='a"),
        ({"max_sequence_length": 10**30}, "should be a whole number from 1 to 65536"),
        ({"max_sequence_length": [2]}, r"max_sequence_length=\[2\] should be a whole number"),
        ({"negative_prompt": {"a": "x" * 5000}}, "the prompts give: negative_prompt=.*"),
        ({"prompt": "a"}, "takes no argument 'prompt', which flowrl gives$"),
        ({"self": 1}, "takes no argument 'self', which flowrl gives"),
        ({"é[b]": 1}, r"takes no argument 'é\[b\]'; choose from .*height"),
        ({"num_images_per_prompt": 2}, "argument 'num_images_per_prompt', which flowrl gives"),
    ],
)
def test_wrong_arguments_of_the_pipelines_call_are_one_sentence(pipeline, call, said):
    with pytest.raises(ValueError, match=said) as raised:
        load_policy(pipeline, **call)
    assert len(str(raised.value)) < 1200


@pytest.mark.parametrize("name", ["dtype", "lora", "device", "source"])
def test_names_of_load_policy_are_no_arguments_of_a_pipeline(name, tmp_path):
    for words in (
        ["check", "shapes-sd3", "--pipeline", f"{name}=a"],
        ["train", *small.words(tmp_path / "run"), f"+model.pipeline.{name}=a"],
    ):
        result = small.invoke(*words)
        assert result.exit_code == 2, result.output
        assert f"model.pipeline.{name} is no argument of a pipeline's call" in result.stderr


def test_pictures_that_no_memory_holds_are_one_sentence():
    result = small.invoke("check", "shapes-sd3", "--pipeline", "height=8000000000000")
    assert result.exit_code == 1 and result.stderr.startswith("flowrl: memory ran out (")
