"""Methods that no other test trains through the loop, and what is said of options nothing reads."""

import logging
import math
import re

import pytest
import small
import torch

from flowrl.config import build
from flowrl.config.compose import ConfigError, options
from flowrl.config.facts import of_config
from flowrl.config.load import flatten, load_config
from flowrl.config.schema import Config, algorithm_schema
from flowrl.runtime.log import logger
from flowrl.runtime.registry import choices
from flowrl.runtime.rule import conditions
from flowrl.samplers import sigmas

SMALL = {  # what makes each small enough, of four steps
    "branch_grpo": {"batch.group": "4", "algorithm.tree.splits": "[0, 1]"},
    "branch_grpo_mix": {
        "batch.group": "4",
        "algorithm.tree.splits": "[0, 1]",
        "algorithm.window.size": "1",
        "algorithm.window.every": "1",
    },
    "dense_grpo": {"batch.group": "8"},
    "tempflow_grpo": {"batch.group": "6", "algorithm.tree.children": "2"},
    "granular_grpo": {
        "batch.group": "4",
        "algorithm.tree.children": "2",
        "algorithm.tree.steps": "[0]",
        "algorithm.tree.strides": "[1, 2]",
    },
    "grpo_guard": {},
    "ddpo": {},
    "dpok": {},
    "texforce": {},
    "mix_grpo_flash": {"algorithm.window.size": "1", "algorithm.window.every": "1"},
    "pref_grpo": {"batch.group": "4"},
}

QUICK = {
    "data__eval": "null",
    "batch__micro": "256",
    "guard__check_rewards": "false",
    "model__self_check": "false",
}


@pytest.mark.parametrize("name", SMALL)
def test_a_method_trains_lora_for_two_iterations(name, tmp_path, monkeypatch):
    monkeypatch.setitem(small.ALGORITHMS, name, SMALL[name])
    made = small.trainer(tmp_path / "run", name, iterations="2", **QUICK)
    before = {key: p.detach().clone() for key, p in made.parts.weights.parameters.items()}
    assert made.cfg.train.mode == "lora" and made.parts.setup.plan.sde == made.cfg.algorithm["sde"]
    first, second = list(made)
    for it in (first, second):
        assert it.metrics["policy/rows"] > 0
        assert it.metrics["policy/skipped"] == 0
        assert it.metrics["policy/grad_norm"] > 0
        assert all(math.isfinite(value) for value in it.metrics.values())
        forked = made.parts.setup.plan.leaves > 1 and name != "dense_grpo"
        assert ("tree/variance/0" in it.metrics) == forked  # completions are no siblings
    assert second.metrics["optimizer/step"] == 2 and first.metrics["policy/ratio_error"] < 1e-4
    assert any(not torch.equal(before[key], p) for key, p in made.parts.weights.parameters.items())


# --- options without effect


def said(*words, spare=5):
    """What start-up says of a run with these words."""
    cfg = load_config(None, ["reward=jpeg", *words])
    algorithm, steps = build.make_algorithm(cfg), cfg.sampler.steps
    grid = sigmas.unmasking(64, steps) if algorithm.unmasks else sigmas.shifted(steps, 3)
    plan = algorithm.plan(grid, sampler=cfg.sampler, iteration=0, seed=cfg.seed)
    return of_config(cfg, method=algorithm, plan=plan, spare=spare).warnings()


@pytest.mark.parametrize("name", options("algorithm"))
def test_all_options_of_a_shipped_file_are_read(name):
    assert said(f"algorithm={name}", *small.needed(name)) == []


TRANSITIONS, FORWARD = "algorithm=flow_grpo", "algorithm=awm"
TAUGHT = ["algorithm=opd", *small.NEEDED["opd"]]
WITHOUT_EFFECT = [  # words, and the options that are named (all of one sentence each)
    ([TRANSITIONS, "algorithm.tail=0.5"], ["algorithm.tail=0.5"]),
    ([*TAUGHT, "algorithm.scaled=false"], ["algorithm.scaled=False"]),
    ([*TAUGHT, "algorithm.sde=cps"], ["algorithm.sde=cps"]),
    (["algorithm=mix_grpo", "algorithm.tail_count=code"], ["algorithm.tail_count=code"]),
    (
        [TRANSITIONS, "algorithm.window.size=2", "algorithm.window.low=1"],
        ["algorithm.window.size=2, algorithm.window.low=1"],
    ),
    (["algorithm=branch_grpo", "algorithm.window.size=2"], ["algorithm.window.size=2"]),
    (
        [
            "algorithm=mix_grpo",
            "algorithm.window.rate=0.5",
        ],
        ["algorithm.window.rate=0.5"],
    ),
    (["algorithm=flow_grpo_fast", "algorithm.window.stride=2"], ["algorithm.window.stride=2"]),
    (
        ["algorithm=mix_grpo", "algorithm.window.schedule=random", "algorithm.window.every=3"],
        ["algorithm.window.every=3"],
    ),
    (["algorithm=mix_grpo", "algorithm.tree.children=3"], ["algorithm.tree.children=3"]),
    (["algorithm=tree_grpo", "algorithm.tree.splits=[1]"], ["algorithm.tree.splits=[1]"]),
    (["algorithm=branch_grpo", "algorithm.tree.steps=[1]"], ["algorithm.tree.steps=[1]"]),
    (["algorithm=tempflow_grpo", "algorithm.tree.strides=[1]"], ["algorithm.tree.strides=[1]"]),
    (["algorithm=tree_grpo", "algorithm.tree.noisy=window"], ["algorithm.tree.noisy=window"]),
    (
        ["algorithm=tree_grpo", "algorithm.fusion=path", "algorithm.scope=tree"],
        ["algorithm.fusion=path, algorithm.scope=tree"],
    ),
    ([TRANSITIONS, "algorithm.shrink=2"], ["algorithm.shrink=2"]),
    (["algorithm=branch_grpo", "algorithm.temperature=2"], ["algorithm.temperature=2.0"]),
    ([TRANSITIONS, "algorithm.credit=backup"], ["algorithm.credit=backup"]),
    ([TRANSITIONS, "algorithm.credit=td"], ["algorithm.credit=td"]),
    (["algorithm=mix_grpo", "algorithm.kl=velocity"], ["algorithm.kl=velocity"]),
    ([TRANSITIONS, "algorithm.reference_decay=0.5"], ["algorithm.reference_decay=0.5"]),
    ([TRANSITIONS, "algorithm.reference_every=5"], ["algorithm.reference_every=5"]),
    (["algorithm=branch_grpo", "algorithm.prune.depth=50"], ["algorithm.prune.depth=50"]),
    (["algorithm=branch_grpo", "algorithm.prune.leaves=2"], ["algorithm.prune.leaves=2"]),
    (
        ["algorithm=branch_grpo", "algorithm.prune.width=parent", "algorithm.prune.every=2"],
        ["algorithm.prune.every=2"],
    ),
    (
        ["algorithm=branch_grpo", "algorithm.prune.depth=10", "algorithm.prune.slide=earlier"],
        ["algorithm.prune.slide=earlier"],
    ),
    (
        ["algorithm=branch_grpo", "algorithm.prune.width=extremes", "algorithm.prune.leaves=8"],
        ["algorithm.prune.width=extremes"],
    ),
    ([TRANSITIONS, "algorithm.keep=64"], ["algorithm.keep=64"]),
    (["algorithm=crd", "batch.group=8", "algorithm.keep=8"], ["algorithm.keep=8"]),
    (
        [FORWARD, "algorithm.clip=[0.1,0.1]", "algorithm.ratio=sample"],
        ["algorithm.ratio=sample, algorithm.clip=[0.1, 0.1]"],
    ),
    (
        ["algorithm=crd", "algorithm.kl_weight=0", "algorithm.reference_guidance=4.5"],
        ["algorithm.reference_guidance=4.5"],
    ),
    ([TRANSITIONS, "model.prompt_cache_gb=5"], ["model.prompt_cache_gb=5.0"]),
    (
        ["algorithm=diffu_grpo", *small.needed("diffu_grpo"), "algorithm.mask_from=0.5"],
        ["algorithm.mask_from=0.5"],
    ),
    (["algorithm=raft", "algorithm.temperature=2"], ["algorithm.temperature=2.0"]),
    (["algorithm=dpo", "algorithm.tau=2"], ["algorithm.tau=2.0"]),
    ([FORWARD, "data.crop=center"], ["data.crop=center"]),
    ([FORWARD, "data.labels=soft"], ["data.labels=soft"]),
    ([FORWARD, "data.temperature=2"], ["data.temperature=2.0"]),
    ([FORWARD, "stop.domain=counting"], ["stop.domain=counting"]),
    ([TRANSITIONS, "algorithm.kl_gate.share=0.2"], ["algorithm.kl_gate.share=0.2"]),
    ([FORWARD, "anchor.data.levels=own"], ["anchor.data.levels=own"]),
    (["algorithm=raft", "algorithm.levels=schedule"], ["algorithm.shift=3.0"]),
    (["algorithm=rwr", "algorithm.top=2"], ["algorithm.top=2"]),
    ([FORWARD, "algorithm.weighting=huber", "algorithm.power=0.5"], ["algorithm.power=0.5"]),
    ([FORWARD, "algorithm.ema_weight=0", "algorithm.old_decay=0.5"], ["algorithm.old_decay=0.5"]),
    (
        ["algorithm=dgpo", "algorithm.clip=null", "algorithm.old_slope=0.1"],
        ["algorithm.old_slope=0.1"],
    ),
    (["algorithm=refl", "algorithm.last=3"], ["algorithm.last=3"]),
    (["algorithm=draft", "algorithm.earliest=0.5"], ["algorithm.earliest=0.5"]),
    (
        ["algorithm=draft", "algorithm.mean=0.5", "algorithm.spread=0.2"],
        ["algorithm.mean=0.5, algorithm.spread=0.2"],
    ),
    (["algorithm=draft", "algorithm.target=1"], ["algorithm.target=1.0"]),
    (
        ["algorithm=reinflow", "algorithm.fall=5", "algorithm.floor=0.5", "sampler.eta=0.3"],
        ["algorithm.fall=5, algorithm.floor=0.5", "sampler.eta=0.3"],
    ),
    ([FORWARD, "draw.rounds=2", "draw.spread=0.1"], ["draw.rounds=2", "draw.spread=0.1"]),
    ([FORWARD, "draw.mode=balance", "draw.spread=0.1"], ["draw.spread=0.1"]),
    ([FORWARD, "draw.mode=refill", "draw.positive=0.1"], ["draw.positive=0.1"]),
    ([FORWARD, "data.sampler.target=0.4"], ["data.sampler.target=0.4"]),
    ([FORWARD, "data.sampler=bayes", "data.sampler.rate=0.1"], ["data.sampler.rate=0.1"]),
    ([FORWARD, "data.sampler.success=0.4"], ["data.sampler.success=0.4"]),
    ([FORWARD, "data.sampler.help.guidance=3"], ["data.sampler.help.guidance=3.0"]),
    ([FORWARD, "replay.taper=0.5"], ["replay.taper=0.5"]),
    ([FORWARD, "diversity.threshold=0.5"], ["diversity.threshold=0.5"]),
    ([FORWARD, "diversity.features=shapes", "diversity.weights=x"], ["diversity.weights=x"]),
    ([FORWARD, "diversity.features=shapes", "diversity.above=zero"], ["diversity.above=zero"]),
    ([FORWARD, "watch.patience=3"], ["watch.patience=3"]),
    ([FORWARD, "sampler.eta=0.3"], ["sampler.eta=0.3"]),
    ([FORWARD, "optimizer.options.a=1"], ["optimizer.options.a=1"]),
    ([FORWARD, "optimizer.name=torch.optim.Muon", "optimizer.eps=1"], ["optimizer.eps=1.0"]),
    (["algorithm=flow_grpo", "algorithm.trust.divergence=raw"], ["algorithm.trust.divergence=raw"]),
    (
        ["algorithm=flow_grpo", "algorithm.trust.threshold=1e-5", "algorithm.clip=[0.1,0.1]"],
        ["algorithm.clip=[0.1, 0.1]"],
    ),
    (
        [FORWARD, "diversity.features=shapes", "diversity.temperature=0.5"],
        ["diversity.temperature=0.5"],
    ),
]


@pytest.mark.parametrize(("words", "named"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_named(words, named):
    assert [sentence.partition(" ha")[0] for sentence in said(*words)] == named
    assert all(" no effect" in sentence and "{" not in sentence for sentence in said(*words))


SCHEMAS = {name: algorithm_schema(name) for name in choices("flowrl.algorithms")}
# a file of configs/algorithm for each: their options differ
FILES = {load_config(None, [f"algorithm={f}"]).algorithm["name"]: f for f in options("algorithm")}


def declared(schema):
    """(key, condition) of every declaration that a run with this algorithm has."""
    for key, all_of in (*conditions(Config), *conditions(schema, "algorithm.")):
        for condition in all_of:
            yield key, condition


@pytest.mark.parametrize("name", SCHEMAS)
def test_conditions_name_settings_of_the_run_and_values_that_they_take(name):
    """A misspelled key or value in a declaration would be a KeyError, or a warning of every run."""
    chosen = f"algorithm={FILES[name]}"
    run = flatten(load_config(None, [chosen]).model_dump(mode="json"))
    for key, condition in declared(SCHEMAS[name]):
        assert set(condition.keys) <= run.keys() - {key}
        for named, value in re.findall(r"([a-z_.]+)=([a-z_]+)", condition.words):
            try:
                load_config(None, [chosen, f"{named}={value}"])
            except ConfigError as error:  # of two settings that do not fit
                assert "should be" not in str(error)


def test_every_condition_is_met_by_some_case():
    met = {
        option.partition("=")[0]
        for _, named in WITHOUT_EFFECT
        for part in named
        for option in part.split(", ")
    }
    all_of = {(key, c.words) for schema in SCHEMAS.values() for key, c in declared(schema)}
    hit = [key for key, _ in all_of if any(f"{given}.".startswith(f"{key}.") for given in met)]
    assert {words for _, words in all_of} == {words for key, words in all_of if key in hit}


def test_a_sentence_says_what_would_give_the_options_an_effect():
    assert said(TRANSITIONS, "algorithm.window.size=2", "algorithm.tail=0.5") == [
        "algorithm.window.size=2, algorithm.tail=0.5 have no effect: read only with"
        " algorithm.plan=window or tree, or with algorithm.plan=branch and"
        " algorithm.tree.noisy=window; here algorithm.plan=full and algorithm.tree.noisy=all"
    ]


@pytest.mark.parametrize(
    "words",
    [
        [
            "algorithm=mix_grpo",
            "algorithm.tail=0.5",
            "algorithm.tail_count=code",
            "algorithm.window.low=1",
        ],
        [
            "algorithm=mix_grpo",
            "algorithm.kl_weight=0.1",
            "algorithm.kl=mean",
            "algorithm.reference=ema",
            "algorithm.reference_decay=0.5",
        ],
        [
            "algorithm=mix_grpo",
            "algorithm.window.schedule=exp_decay",
            "algorithm.window.rate=0.5",
        ],
        [
            "algorithm=branch_grpo_mix",
            "algorithm.window.stride=2",
            "algorithm.tree.splits=[1]",
            "algorithm.tail=0.5",
            "batch.group=2",
        ],
        [
            "algorithm=branch_grpo",
            "algorithm.prune.depth=9",
            "algorithm.prune.every=2",
            "algorithm.prune.slide=earlier",
        ],
        ["algorithm=branch_grpo", "algorithm.prune.width=extremes", "algorithm.prune.leaves=7"],
        [
            TRANSITIONS,
            "algorithm.credit=td",
            "sampler.init_noise=group",
        ],  # copies share their first state
        [
            FORWARD,
            "algorithm.off_policy=true",
            "algorithm.clip=[0.1,0.1]",
            "algorithm.ratio=sample",
            "algorithm.keep=8",
        ],
        [FORWARD, "algorithm.old_decay=0.5", "algorithm.power=0.5", "algorithm.weighting=ghuber"],
        [
            "algorithm=dgpo",
            "algorithm.reference_guidance=4.5",
            "algorithm.old_decay=0.5",
            "draw.mode=refill",
            "draw.rounds=2",
        ],
        [
            "algorithm=alignprop",
            "algorithm.spread=0.2",
            "algorithm.objective=distance",
            "algorithm.target=10",
        ],
        [TRANSITIONS, "sampler.eta=0.3", "draw.mode=balance", "draw.positive=0.1", "draw.rounds=2"],
    ],
)
def test_what_is_read_is_not_named(words):
    assert said(*words) == []


def test_start_up_warns_of_refill_without_spare_prompts_and_of_unread_options(tmp_path, caplog):
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    logger.propagate = True
    with caplog.at_level(logging.WARNING):
        small.trainer(
            tmp_path / "run",
            data__train=tmp_path / "prompts.txt",
            draw__mode="refill",
            sampler__eta="0.2",
            **QUICK,
        )
    assert (
        "draw.mode=refill has no effect: too few prompts are left beside those of a batch"
        in caplog.text
    )
    assert "sampler.eta=0.2 has no effect: this method samples without noise" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        small.trainer(tmp_path / "run", draw__mode="refill", **QUICK)
    assert "no effect" not in caplog.text
