"""What plan, data or policy cannot serve is refused at start-up, and nothing is written."""

import json
import logging
from types import SimpleNamespace

import pytest
import small
import torch
from toy import GRID, SAMPLER

from flowrl.algorithms.grpo import ALGORITHM as GRPO
from flowrl.algorithms.nft import ALGORITHM as NFT
from flowrl.config.compose import ConfigError
from flowrl.config.load import load_config
from flowrl.data import media
from flowrl.rollouts import draw
from flowrl.runtime.log import logger
from flowrl.training import checks

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


@pytest.mark.parametrize("init", ["group", "batch"])
def test_methods_without_noisy_steps_refuse_one_noise_for_all_samples_of_a_prompt(tmp_path, init):
    sentence = (
        f"sampler.init_noise={init} starts all samples of a prompt.*use sampler.init_noise=sample"
    )
    refused(tmp_path, "nft", sentence, sampler__init_noise=init)
    # samples nothing
    small.trainer(
        tmp_path / "offline",
        "nft",
        data__offline=pictures(tmp_path / "folder"),
        sampler__init_noise=init,
    )


def test_raft_refuses_to_train_every_sample_whatever_its_reward(tmp_path):
    changes = {"algorithm__steps": "2", "batch__group": "4"}
    refused(
        tmp_path,
        "raft",
        "algorithm.top=4 of batch.group=4 trains every sample",
        algorithm__top="4",
        **changes,
    )
    small.trainer(tmp_path / "best", "raft", algorithm__top="3", **changes)
    # the folder's choice is the reward's
    offline = {
        "data__offline": pictures(tmp_path / "folder"),
        "algorithm__top": "4",
    }
    small.trainer(tmp_path / "offline", "raft", **changes | offline)


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


def test_balance_and_best_of_n_refuse_samples_that_share_steps(tmp_path):
    small.ALGORITHMS["tree_grpo"] = {"algorithm.window.size": "1", "batch.group": "3"}
    refused(
        tmp_path,
        "tree_grpo",
        "draw.mode=balance chooses whole samples, and plan=tree forks",
        draw__mode="balance",
    )
    refused(tmp_path, "tree_grpo", "algorithm.keep=2 leaves out whole samples", algorithm__keep="2")


def test_balance_refuses_what_needs_whole_groups(tmp_path):
    refused(
        tmp_path,
        "nft",
        "draw.mode=balance and algorithm.keep=2 both choose",
        draw__mode="balance",
        algorithm__keep="2",
    )
    refused(
        tmp_path,
        "dgpo",
        "dgpo needs advantages that add up to 0",
        draw__mode="balance",
        algorithm__steps="2",
    )
    refused(
        tmp_path,
        "dpo",
        "dpo trains the best and the worst of each group whatever algorithm.keep=2 says",
        algorithm__keep="2",
    )


@pytest.mark.parametrize("credit", ["depth", "siblings", "granular"])
def test_balance_refuses_credit_whose_baseline_would_be_of_the_samples_kept(credit):
    """Their statistics are those of what is trained, not of all draws, on plans that do not fork
    too."""
    cfg = load_config(
        None, ["algorithm=ddpo", "reward=jpeg", "draw.mode=balance", f"algorithm.credit={credit}"]
    )
    with pytest.raises(
        ValueError, match=f"draw.mode=balance has a baseline of all draws, and credit={credit}"
    ):
        checks.check_balance(cfg, frozenset())


def test_dgpo_refuses_half_groups():
    with pytest.raises(
        ConfigError,
        match=(
            "dgpo needs advantages that add up to 0 over a group, of which algorithm.keep=2 trains"
            " a part"
        ),
    ):
        load_config(None, ["algorithm=dgpo", "reward=jpeg", "algorithm.keep=2"])


def test_settings_without_effect_are_refused(tmp_path):
    refused(
        tmp_path,
        "mix_grpo",
        "algorithm.reference=ema is read only with algorithm.kl_weight",
        algorithm__reference="ema",
    )
    refused(
        tmp_path,
        "raft",
        "algorithm.reference=reset is read only with algorithm.kl_weight",
        algorithm__reference="reset",
    )
    refused(tmp_path, "nft", "algorithm.error=eps has no effect", algorithm__error="eps")
    refused(
        tmp_path,
        "raft",
        "algorithm.first and range choose levels of the schedule",
        algorithm__first="1",
    )
    guided = {
        "algorithm__reference_guidance": "2",
        "algorithm__steps": "2",
        "model__pipeline__guidance_scale": "1.0",
    }
    refused(tmp_path, "dgpo", "guidance=2.0 needs an unconditional branch", **guided)


def test_no_sde_step_and_an_only_child_are_refused(tmp_path):
    refused(tmp_path, "flow_grpo", "GRPO needs SDE steps.*sampler.eta > 0", sampler__eta="0")
    refused(tmp_path, "flow_grpo", "GRPO needs SDE steps.*sampler.steps >= 2", sampler__steps="1")
    small.ALGORITHMS["tempflow_grpo"] = {"batch.group": "3"}
    refused(
        tmp_path,
        "tempflow_grpo",
        "algorithm.tree.children=1 leaves credit=siblings nothing to compare",
        algorithm__tree__children="1",
    )


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
        (NFT, "shapes-sd3", "FlowMatchEulerDiscreteScheduler", False),
        (GRPO, "stabilityai/sdxl-turbo", "EulerDiscreteScheduler", False),
    ],
)
def test_a_distilled_model_is_warned_of_in_forward_methods(
    algorithm, source, scheduler, warned, caplog
):
    policy = SimpleNamespace(pipe=SimpleNamespace(scheduler=type(scheduler, (), {})()))
    logger.propagate = True
    with caplog.at_level(logging.WARNING):
        checks.warn_distilled(algorithm(algorithm.Config()), policy, source)
    assert ("few-step distilled model" in caplog.text) == warned
