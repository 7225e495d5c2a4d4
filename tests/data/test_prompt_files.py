"""Prompt files are read or refused with one sentence; the prompts of an iteration are a function of
seed and iteration."""

import json
from types import SimpleNamespace

import pytest
import torch

from flowrl.data import prompts as data_prompts
from flowrl.rewards.core import score

PROMPTS = [{"prompt": f"p{i}", "number": i} for i in range(10)]


def test_jsonl_keeps_what_rewards_may_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    prompts = data_prompts.load_prompts(str(path))
    assert prompts == PROMPTS
    batch = data_prompts.select(prompts, torch.tensor([3, 0]))
    assert batch.text == ["p3", "p0"]
    assert batch.meta == [{"number": 3}, {"number": 0}]
    assert batch.ids.tolist() == [3, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "gone.txt does not exist"),
        ("empty.txt", b" \n\n", "empty.txt is empty"),
        (
            "latin.txt",
            "a cat\na caf\xe9\n".encode("latin-1"),
            "latin.txt is not UTF-8: byte 11, in line 2",
        ),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "a.jsonl, line 2 is not JSON"),
        ("b.jsonl", b'{"text": "a"}\n', 'b.jsonl, line 1 needs a "prompt"'),
        ("c.jsonl", b"3\n", 'c.jsonl, line 1 needs a "prompt"'),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="prompt file") as error:
        data_prompts.load_prompts(str(tmp_path / name))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_is_not_a_prompt_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder; make one file: cat .*txt > prompts.txt"):
        data_prompts.load_prompts(str(tmp_path))


def test_the_embedded_world_has_disjoint_prompts_and_a_misspelt_name_is_corrected():
    train, held_out = map(data_prompts.load_prompts, ("shapes:train", "shapes:eval"))
    assert train and held_out and not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    with pytest.raises(ValueError, match='did you mean "shapes:train"'):
        data_prompts.load_prompts("shapes:trian")


def drawn(iteration, size):
    return data_prompts.batch(PROMPTS, iteration=iteration, size=size, seed=1).ids.tolist()


def test_an_epoch_shows_each_prompt_once_and_the_next_is_shuffled_anew():
    batches = [drawn(iteration, size=2) for iteration in range(10)]
    epochs = [sum(batches[:5], []), sum(batches[5:], [])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_a_batch_never_holds_a_prompt_twice_and_remainders_differ():
    batches = [drawn(iteration, size=4) for iteration in range(40)]
    assert all(len(set(b)) == 4 for b in batches)
    # two prompts an epoch are left out, not always the same two
    assert {i for b in batches for i in b} == set(range(10))


def test_a_batch_is_a_function_of_seed_and_iteration():
    first = data_prompts.batch(PROMPTS, iteration=7, size=3, seed=1)
    for i in range(3):
        data_prompts.batch(PROMPTS, iteration=i, size=3, seed=2)
    again = data_prompts.batch(PROMPTS, iteration=7, size=3, seed=1)
    assert first.text == again.text and torch.equal(first.ids, again.ids)
    assert first.text != data_prompts.batch(PROMPTS, iteration=7, size=3, seed=2).text


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="batch.prompts=11 is more than the 10 prompts"):
        data_prompts.batch(PROMPTS, iteration=0, size=11, seed=0)


def test_without_prompts_nothing_is_expected_of_rewards():
    """Offline data without held-out prompts: there is no text whose tokens could be counted."""
    told = []
    reward = SimpleNamespace(reads=frozenset(), complaint=lambda prompt: None, expect=told.append)
    rewards = SimpleNamespace(rewards={"r": reward}, domains={})
    score.check_meta(rewards, {"data.train": [], "data.eval": []})
    assert told == []
    score.check_meta(rewards, {"data.train": PROMPTS[:2], "data.eval": []})
    assert told == [["p0", "p1"]]
