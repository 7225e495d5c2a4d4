"""The journal of scores: exact, keyed by what was scored, and whole after a kill."""

import json
import math
import threading

import pytest
import torch

from flowrl.rewards.server.journal import ScoreJournal, keys
from flowrl.runtime.store import lines

PROMPTS = ["a cat", "a dog", "a cat"]


def test_scores_come_back_as_the_same_floats(tmp_path):
    scores = {
        str(i): value
        for i, value in enumerate(
            [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, *torch.randn(50).tolist()]
        )
    }
    ScoreJournal(tmp_path / "run" / "scores.jsonl").add(scores)
    again = ScoreJournal(tmp_path / "run" / "scores.jsonl")
    assert [again.get(key).hex() for key in scores] == [value.hex() for value in scores.values()]
    assert again.get("another") is None


def test_a_torn_last_line_is_skipped_and_what_follows_it_is_kept(tmp_path):
    path = tmp_path / "scores.jsonl"
    ScoreJournal(path).add({"a": 0.25, "b": 0.5})
    path.write_bytes(path.read_bytes()[:-9])  # the kill came inside the line of b
    torn = ScoreJournal(path)
    assert (torn.get("a"), torn.get("b")) == (0.25, None)
    torn.add({"b": 0.5, "c": 1.0})
    assert ScoreJournal(path).scores == {"a": 0.25, "b": 0.5, "c": 1.0}
    assert len(path.read_text().splitlines()) == 3


def test_several_journals_of_one_file_lose_nothing(tmp_path):
    path = tmp_path / "scores.jsonl"
    journals = [ScoreJournal(path) for _ in range(4)]

    def write(number):
        for i in range(25):
            journals[number].add({f"{number}-{i}-{j}": float(j) for j in range(4)})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    lines = [
        line for line in path.read_text().splitlines() if line
    ]  # one that looks while another writes may start a line too early
    assert len(ScoreJournal(path).scores) == 400 == len({json.loads(line)["key"] for line in lines})


def test_memory_holds_the_newest(tmp_path):
    journal = ScoreJournal(tmp_path / "scores.jsonl", keep=3)
    for i in range(5):
        journal.add({str(i): float(i)})
    assert (
        list(journal.scores) == ["2", "3", "4"] == list(ScoreJournal(journal.path, keep=3).scores)
    )
    assert len(ScoreJournal(journal.path).scores) == 5
    # what is older is not even read: a file may have grown for months
    journal.path.write_bytes(b"no json\n" * 3 + journal.path.read_bytes())
    newest = list(lines.read(journal.path, newest=2))
    assert [line.number for line in newest] == [7, 8] and all(line.row for line in newest)


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(
        ValueError, match="metrics.jsonl is not a journal of scores.*name another file"
    ):
        ScoreJournal(path)
    assert path.read_text() == '{"step": 1}\n'


def test_a_key_tells_apart_everything_that_a_score_depends_on():
    media, meta = torch.rand(3, 3, 4, 4), [{"n": 1}, {"n": 2}, {"n": 3}]
    first = keys("v", media, PROMPTS, {"meta": meta})
    assert len(set(first)) == 3 and all(len(key) == 64 for key in first)
    assert keys("v", media[[2, 0]], ["a cat", "a cat"], {"meta": [meta[2], meta[0]]}) == [
        first[2],
        first[0],
    ]  # not the place in a batch
    nudged = media.clone()
    nudged[0, 0, 0, 0] = torch.nextafter(nudged[0, 0, 0, 0], torch.tensor(2.0))
    for other in (
        keys("w", media, PROMPTS, {"meta": meta}),
        keys("v", nudged, PROMPTS, {"meta": meta}),
        keys("v", media.view(3, 3, 2, 8), PROMPTS, {"meta": meta}),
        keys("v", media, ["a Cat", "a dog", "a cat"], {"meta": meta}),
        keys("v", media, PROMPTS, {"meta": [{"n": 1.5}, *meta[1:]]}),
        keys("v", media, PROMPTS, {}),
        keys("v", media, PROMPTS, {"meta": meta, "source": media}),
    ):
        assert other[0] != first[0]
    assert keys("v", nudged, PROMPTS, {"meta": meta})[1:] == first[1:]
    assert keys("v", media, PROMPTS, {"meta": [{"b": 1, "a": 2}] * 3}) == keys(
        "v", media, PROMPTS, {"meta": [{"a": 2, "b": 1}] * 3}
    )


def test_a_score_that_compares_a_group_belongs_to_that_group():
    media = torch.rand(4, 3, 4, 4)
    prompts = ["a", "a", "b", "b"]
    first = keys("v", media, prompts, {"group": torch.tensor([0, 0, 1, 1])})
    # the number of a group means nothing
    assert keys("v", media, prompts, {"group": torch.tensor([7, 7, 5, 5])}) == first
    changed = media.clone()
    changed[1] = 0
    second = keys("v", changed, prompts, {"group": torch.tensor([0, 0, 1, 1])})
    assert second[0] != first[0] and second[1] != first[1] and second[2:] == first[2:]


@pytest.mark.parametrize("meta", [{"x": {1, 2}}, {"x": math.nan}, {"x": torch.zeros(1)}])
def test_meta_that_json_cannot_hold_is_a_sentence(meta):
    with pytest.raises(ValueError, match="cannot travel to a reward server as JSON"):
        keys("v", torch.rand(1, 3, 4, 4), ["a"], {"meta": [meta]})
