"""What plan, data or policy cannot serve is refused at start-up, and nothing is written."""

import json
from types import SimpleNamespace

import pytest
import small
import torch
from toy import GRID, SAMPLER

from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.algorithms.nft import ALGORITHM as NFT
from flowrl.config.compose import ConfigError
from flowrl.config.facts import Facts
from flowrl.data import media
from flowrl.rollouts import draw

PROMPTS = ("a red circle", "a blue square")


def pictures(folder, each=2, size=64):
    """A scored folder with `each` pictures of both prompts."""
    folder.mkdir()
    with (folder / "scores.jsonl").open("w") as lines:
        for p, prompt in enumerate(PROMPTS):
            for i in range(each):
                name = f"{p}-{i}.png"
                noise = torch.rand(
                    3, size, size, generator=torch.Generator().manual_seed(10 * p + i)
                )
                media.save(noise, folder / name)
                lines.write(json.dumps({"file": name, "prompt": prompt, "total": float(i)}) + "\n")
    return folder


def with_reference(folder):
    """A prompt file whose first prompt names a reference image beside it."""
    folder.mkdir()
    media.save(
        torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)), folder / "ideal.png"
    )
    lines = [{"prompt": PROMPTS[0], "reference": "ideal.png"}, {"prompt": PROMPTS[1]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "prompts.jsonl"


def refused(tmp_path, algorithm, match, **changes):
    small.ALGORITHMS.setdefault(algorithm, {})
    raises = pytest.raises((ValueError, ConfigError), match=match)
    with pytest.MonkeyPatch.context() as patch, raises:
        small.load_once(patch)
        small.trainer(tmp_path / "run", algorithm, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", ["flow_grpo", "mix_grpo", "prdp", "reg_grpo"])
def test_transition_methods_refuse_media_from_files(tmp_path, algorithm):
    refused(
        tmp_path,
        algorithm,
        "no denoising steps to train.*algorithm=nft",
        data__offline=pictures(tmp_path / "folder"),
    )
    refused(
        tmp_path,
        algorithm,
        'a prompt with a "reference".*algorithm=nft',
        data__train=with_reference(tmp_path / "data"),
    )


@pytest.mark.parametrize("algorithm", ["nft", "awm", "dgpo", "crd", "dpo", "raft", "rwr"])
def test_forward_methods_train_on_a_folder_and_on_a_group_with_a_reference(tmp_path, algorithm):
    small.ALGORITHMS.setdefault(algorithm, {})
    steps = {"algorithm__steps": "2", "iterations": "1", "data__eval": "null"}
    made = small.trainer(
        tmp_path / "offline", algorithm, data__offline=pictures(tmp_path / "folder"), **steps
    )
    (it,) = list(made)
    assert it.metrics.get("nfe/rollout", 0) == 0
    assert it.metrics["policy/rows"] > 0
    assert it.metrics["optimizer/step"] == 1
    assert it.metrics["reward/total"] == 0.5 and len(it.rollout.leaf) == 4
    made = small.trainer(
        tmp_path / "reference", algorithm, data__train=with_reference(tmp_path / "data"), **steps
    )
    (it,) = list(made)
    of = draw.draw(made.source, 0, made.parts.setup.plan).batch.text.index(PROMPTS[0])
    assert torch.bincount(it.rollout.group)[of] == 3
    assert len(it.rollout.leaf) == 5
    assert it.metrics["policy/rows"] > 0


def test_files_that_cannot_be_trained_on_are_refused(tmp_path):
    refused(
        tmp_path,
        "nft",
        "single image of every prompt",
        data__offline=pictures(tmp_path / "one", each=1),
    )
    refused(
        tmp_path,
        "nft",
        "is 32x32 pixels, but the model makes 64x64",
        data__offline=pictures(tmp_path / "small", size=32),
    )
    refused(
        tmp_path,
        "nft",
        "draw.mode=refill samples again",
        data__offline=pictures(tmp_path / "folder"),
        draw__mode="refill",
    )
    refused(
        tmp_path,
        "nft",
        "draw.mode=balance chooses among samples",
        data__train=with_reference(tmp_path / "data"),
        draw__mode="balance",
    )
    refused(tmp_path, "nft", "does not exist", data__offline=tmp_path / "nowhere")


def test_a_guided_reference_of_a_model_without_guidance_is_refused(tmp_path):
    guided = {
        "algorithm__reference_guidance": "2",
        "algorithm__steps": "2",
        "model__pipeline__guidance_scale": "1.0",
    }
    refused(tmp_path, "dgpo", "guidance=2.0 needs an unconditional branch", **guided)


def test_an_adaptive_window_needs_forks_at_each_of_its_steps():
    """BranchGRPO-Mix forks at its splits, which may lie in the window, but not at its other
    steps."""
    for options in (
        {"plan": "window"},
        {"plan": "branch", "tree": {"splits": (1,), "noisy": "window"}},
    ):
        algorithm = GRPO(GRPO.Config(window={"schedule": "adaptive", "size": 2}, **options))
        with pytest.raises(
            ValueError,
            match=f"plan={options['plan']} does not fork at all of them; set algorithm.plan=tree",
        ):
            algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0)


@pytest.mark.parametrize(
    "options", [{}, {"plan": "window"}, {"plan": "branch", "tree": {"children": 1, "splits": (0,)}}]
)
def test_a_tree_of_one_leaf_is_not_compared_with_itself(options):
    algorithm = GRPO(GRPO.Config(credit="depth", scope="tree", **options))
    with pytest.raises(
        ValueError,
        match=f"algorithm.scope=tree .* a tree of plan={algorithm.config.plan} has a single one",
    ):
        algorithm.plan(GRID, sampler=SAMPLER, iteration=0, seed=0)


@pytest.mark.parametrize(
    ("algorithm", "source", "scheduler", "warned"),
    [
        (NFT, "black-forest-labs/FLUX.1-schnell", "FlowMatchEulerDiscreteScheduler", True),
        (NFT, "stabilityai/sdxl", "LCMScheduler", True),
        (NFT, "Efficient-Large-Model/Sana_Sprint_1.6B", "SCMScheduler", True),
        (NFT, "black-forest-labs/FLUX.2-klein-4B", "FlowMatchEulerDiscreteScheduler", True),
        (NFT, "black-forest-labs/FLUX.2-klein-base-4B", "FlowMatchEulerDiscreteScheduler", False),
        (NFT, "shapes-sd3", "FlowMatchEulerDiscreteScheduler", False),
        (GRPO, "stabilityai/sdxl-turbo", "EulerDiscreteScheduler", False),
    ],
)
def test_a_distilled_model_is_warned_of_in_forward_methods(algorithm, source, scheduler, warned):
    policy = SimpleNamespace(pipe=SimpleNamespace(scheduler=type(scheduler, (), {})()))

    def said(dataset):
        facts = Facts({"model": {"source": source}}, algorithm.Config)
        facts.learn(method=algorithm(algorithm.Config()), policy=policy, dataset=dataset)
        return str(facts.warnings())

    assert ("few-step distilled model" in said(None)) == warned
    assert ("or a method on denoising steps" in said(None)) == warned
    files = SimpleNamespace(kind="media", singles=0)  # they have no steps
    assert ("use its base model']" in said(files)) == warned
