"""Several prompt files with weights: shares, epochs, ids, domains and refusals."""

import json
from collections import Counter

import pytest
import torch

from flowrl.config.load import ConfigError, load_config
from flowrl.data.mixture import Mixture
from flowrl.data.prompts import batch, load_training


def rows(name, count):
    return [{"prompt": f"{name}{i}"} for i in range(count)]


def mixture(weights, counts=(40, 20, 10)):
    names = "abc"[: len(weights)]
    return Mixture({n: rows(n, c) for n, c in zip(names, counts, strict=False)}, weights)


def drawn(prompts, size, iterations, seed=0):
    return [batch(prompts, iteration=i, size=size, seed=seed) for i in range(iterations)]


def test_one_file_is_drawn_as_without_a_mixture():
    whole, alone = rows("a", 40), mixture([3.0])
    for before, after in zip(drawn(whole, 6, 20), drawn(alone, 6, 20), strict=True):
        assert torch.equal(before.ids, after.ids) and before.text == after.text


def test_a_file_gives_its_share_rounded_up_or_down_and_exactly_in_the_mean():
    """Shares 5/8, 2/8 and 1/8 of 6 prompts: 3.75, 1.5 and 0.75."""
    counts = [Counter(t[0] for t in b.text) for b in drawn(mixture([5, 2, 1]), 6, 400)]
    assert all(sum(own.values()) == 6 for own in counts)
    for name, low, mean in (("a", 3, 3.75), ("b", 1, 1.5), ("c", 0, 0.75)):
        seen = [own[name] for own in counts]
        assert {*seen} == {low, low + 1} and sum(seen) / 400 == pytest.approx(mean, abs=0.08)


def test_whole_shares_do_not_depend_on_the_iteration():
    for own in drawn(mixture([1, 1]), 8, 50):
        assert Counter(text[0] for text in own.text) == {"a": 4, "b": 4}


def test_a_draw_is_a_function_of_seed_and_iteration_without_a_prompt_twice():
    prompts = mixture([5, 2, 1])
    for own, again in zip(drawn(prompts, 8, 60), drawn(prompts, 8, 60), strict=True):
        assert torch.equal(own.ids, again.ids) and len(own.ids.unique()) == 8
        assert own.text == [prompts[i]["prompt"] for i in own.ids.tolist()]
    assert not torch.equal(drawn(prompts, 8, 1)[0].ids, drawn(prompts, 8, 1, seed=1)[0].ids)
    late = batch(prompts, iteration=59, size=8, seed=0)  # as a resumed run asks for it
    assert torch.equal(late.ids, own.ids)


def test_ids_stay_where_a_file_is_added_at_the_end():
    first, more = mixture([1, 1]), mixture([1, 1, 1])
    assert [*first] == more[:60] and more[60]["prompt"] == "c0"


def test_every_prompt_of_a_file_is_seen_about_as_often():
    seen = Counter(text for own in drawn(mixture([1, 1], (20, 7)), 4, 500) for text in own.text)
    for name, count in (("a", 20), ("b", 7)):
        often = [seen[f"{name}{i}"] for i in range(count)]
        assert sum(often) == 1000 and max(often) - min(often) < 0.4 * 1000 / count


def test_files_are_mixed_within_a_batch():
    """A process or an update takes a part of the batch, in order."""
    halves = [own.text[:4] for own in drawn(mixture([1, 1]), 8, 50)]
    counts = {Counter(text[0] for text in half)["a"] for half in halves}
    assert len(counts) > 2


def config(tmp_path, *words):
    lines = {"a": [{"prompt": "x"}, {"prompt": "y"}], "b": [{"prompt": "z", "domain": "own"}]}
    for name, entries in lines.items():
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return load_config(None, ["reward=jpeg", *(w.replace("AT", str(tmp_path)) for w in words)])


def test_a_domain_of_a_file_is_that_of_its_prompts(tmp_path):
    cfg = config(tmp_path, "data.mixture=[{path: AT/a.jsonl, domain: d}, {path: AT/b.jsonl}]")
    found = load_training(cfg.data)
    assert [row["domain"] for row in found] == ["d", "d", "own"]
    assert isinstance(found, Mixture) and cfg.data.sources[1].endswith("b.jsonl")


def test_a_file_that_is_too_small_or_has_domains_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"b has 20 prompts, and its weight asks for up to 24 of"):
        mixture([1, 3]).drawn(0, 32, 0)
    cfg = config(tmp_path, "data.mixture=[{path: AT/b.jsonl, domain: d}]")
    with pytest.raises(ValueError, match=r'b.jsonl has domain=d, and its prompt "z" has "domain"'):
        load_training(cfg.data)
    cfg = config(tmp_path, "data.mixture=[{path: AT/c.jsonl}]")
    with pytest.raises(ValueError, match=r"c.jsonl does not exist"):
        load_training(cfg.data)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("[{path: a.txt, weight: 0}]", "a.txt has weight 0, which should be above 0"),
        ("[{path: a.txt, weight: -2}]", "a.txt has weight -2, which should be above 0"),
        ("[{path: a.txt}, {path: a.txt}]", "data.mixture: names a file twice"),
        ("[{weight: 1}]", "data.mixture.0.path is missing"),
    ],
)
def test_a_wrong_mixture_is_refused_in_a_sentence(words, sentence):
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["reward=jpeg", f"data.mixture={words}"])
    assert sentence in str(raised.value)
