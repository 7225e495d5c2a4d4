"""Measuring for suites: images of a prompt and a number alone, journals, diversity, checklists."""

import numpy as np
import pytest
import tiny_clip
import torch
from page import Page

from flowrl import load_policy
from flowrl.data.prompts import load_prompts, meta_rows
from flowrl.evaluation import held_out
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.record import add_row
from flowrl.evaluation.suites import measure as suite_measure
from flowrl.evaluation.suites.measure import MeasureJournal, measure
from flowrl.report import run_page
from flowrl.rewards import load_set, readings


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy("shapes-sd3", lora={"rank": 2, "alpha": 2})


def test_an_image_depends_on_its_prompt_and_number_alone_and_no_media_are_kept(policy, monkeypatch):
    prompts = load_prompts("shapes:eval")[20:23]
    rewards, sampling = load_set({"jpeg": 1.0}), Sampling(steps=2, guidance="none")
    whole = measure(policy, prompts, rewards, sampling, images=3)
    assert whole.values["jpeg"].shape == (3, 3)
    assert whole.nfe == 2
    assert whole.values.keys() == {"jpeg"}
    assert len(np.unique(whole.values["jpeg"])) > 6 and (whole.diversity["pixels"] > 0.01).all()
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    parts = measure(
        policy, prompts, rewards, Sampling(steps=2, guidance="none", decode=1, micro=2), images=2
    )
    # a byte of a JPEG may turn over
    np.testing.assert_allclose(parts.values["jpeg"], whole.values["jpeg"][:, :2], rtol=0, atol=2e-4)
    other = measure(policy, prompts, rewards, Sampling(steps=2, guidance="none", seed=1), images=1)
    assert other.diversity == {}
    assert not np.isclose(other.values["jpeg"], whole.values["jpeg"][:, :1], atol=1e-5).any()


def test_a_stopped_evaluation_goes_on_where_it_was(policy, tmp_path, monkeypatch):
    prompts, rewards = load_prompts("shapes:eval")[20:23], load_set({"jpeg": 1.0})
    sampling = Sampling(steps=1, guidance="none")
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    path, original, calls = tmp_path / "s.part.jsonl", suite_measure._chunk, []

    def failing(*arguments):
        calls.append(arguments[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(suite_measure, "_chunk", failing)
    with pytest.raises(KeyboardInterrupt):
        measure(policy, prompts, rewards, sampling, images=2, journal=MeasureJournal(path, "k"))
    path.write_text(path.read_text() + '{"setting": "", "sta')  # cut short
    resumed = measure(
        policy, prompts, rewards, sampling, images=2, journal=MeasureJournal(path, "k")
    )
    assert len(calls) == 4 and calls[2] == calls[3]
    monkeypatch.setattr(suite_measure, "_chunk", original)
    whole = measure(policy, prompts, rewards, sampling, images=2)
    np.testing.assert_array_equal(resumed.values["jpeg"], whole.values["jpeg"])
    assert len(path.read_text().splitlines()) == 4 and MeasureJournal(path, "another").rows == []


def test_diversity_is_the_mean_distance_of_pairs_in_pixels_and_in_the_embedding_of_a_clip(tmp_path):
    media = torch.zeros(3, 3, 64, 64)
    media[2] = 0.6  # distances 0, .6, .6
    features = suite_measure.features_of(load_set({"jpeg": 1.0}), 3)
    assert suite_measure.spread("pixels", features["pixels"](media)).item() == pytest.approx(0.4)
    assert suite_measure.features_of(load_set({"jpeg": 1.0}), 1) == {}
    rewards = load_set({"clip": {"model": tiny_clip.open_clip_name(tmp_path), "pretrained": None}})
    embed = suite_measure.features_of(rewards, 2)["clip"]
    media = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    vectors = embed(media)
    cosine = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    want = 1 - (cosine.sum() - 3) / 6
    assert suite_measure.spread("clip", vectors).item() == pytest.approx(want.item(), abs=1e-6)


def test_a_checklist_is_read_by_dimension_before_parents_zero_answers():
    prompts = [dict(p) for p in load_prompts("shapes:eval")[20:22]]
    no, yes = (
        {"question": "?", "check": "shapes_count", "args": {"shape": "circle", "count": count}}
        for count in (99, 0)
    )
    prompts[0]["checklist"] = [no | {"dimension": "a"}, yes | {"dimension": "b - c", "parent": 0}]
    prompts[1]["checklist"] = [yes | {"dimension": "a"}, yes | {"dimension": "a"}]
    texts, context = meta_rows(prompts, [0, 1], torch.zeros(2, 3, 8, 8))
    rewards = suite_measure.by_dimension(load_set({"checklist": {"binary": True}}))
    found = readings(torch.zeros(2, 3, 64, 64), texts, rewards, context)
    got = {name: value.tolist() for name, value in found.items()}
    assert got["checklist"] == [0.0, 1.0] and got["checklist/dimension/a"] == [0.0, 1.0]
    assert got["checklist/dimension/b - c"][0] == 1.0
    assert np.isnan(got["checklist/dimension/b - c"][1])


def questions(many):
    """One that is answered no, and its child, which is answered yes and zeroed."""
    none = {"question": "Of them, none?", "parent": 0, "args": {"count": 0}}
    both = {"question": many, "args": {"count": 99}}, none
    return [question | {"check": "shapes_count"} for question in both]


def test_answers_of_a_checklist_about_the_first_image_of_each_prompt_are_kept(
    policy, tmp_path, monkeypatch
):
    texts = ("a red circle", "two blue squares", "a green triangle")
    prompts = [{"prompt": text, "checklist": questions("99 <objects>?")} for text in texts]
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    rewards = load_set({"checklist": {}, "jpeg": {}})

    def measured():
        sampling = Sampling(steps=1, guidance="none", decode=1)
        journal = MeasureJournal(tmp_path / "j.jsonl", "k")
        return measure(policy, prompts, rewards, sampling, images=2, journal=journal)

    got = measured()
    assert [(entry["image"], entry["prompt"]) for entry in got.answers["checklist"]] == list(
        enumerate(p["prompt"] for p in prompts)
    )
    assert got.answers.keys() == {"checklist"}
    for entry in got.answers["checklist"]:
        first, second = entry["said"]
        said = {"question": "99 <objects>?", "answer": 0.0, "counted": 0.0, "zeroed": False}
        assert first == said
        assert second["zeroed"] and second["counted"] == 0.0
    assert measured().answers == got.answers  # read from the journal


def test_evaluation_keeps_answers_about_the_pictures_it_shows_and_the_report_escapes_them(
    policy, tmp_path
):
    asked = questions("99 <b>objects</b>?")
    prompts = [{"prompt": f"a {s} & more", "checklist": asked} for s in ("circle", "square")]
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    for name, steps in (("before", 1), ("after", 2)):
        made = held_out.evaluate(
            policy, prompts, load_set({"checklist": 1.0}), images=5, steps=steps, decode=2
        )
        assert [entry["image"] for entry in made.answers["checklist"]] == [0, 1]
        assert len(made.images) == 2
        add_row(tmp_path, name, made, prompts)
    html = run_page.build(tmp_path).read_text()
    shown = "checklist: answers about 2 images", "image 1: a square & more", "99 <b>objects</b>?"
    assert all(text in Page(html).text for text in shown)
    assert "<b>objects" not in html
    assert html.count("counts 0: a parent is no") == 4  # of two images, before and after
