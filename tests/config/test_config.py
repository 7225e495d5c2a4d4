"""Configs compose, round-trip, and answer mistakes with sentences: what is wrong, and the nearest
right thing."""

import copy
import itertools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import methods_by_kind
import pytest
import small
import yaml
from small import NAMED

from flowrl.config import build, compose, load
from flowrl.config import schema as config_schema
from flowrl.config.compose import ConfigError, options
from flowrl.config.facts import of_config
from flowrl.config.gone import GONE, without_gone
from flowrl.config.load import load_config, read_config
from flowrl.config.run_rules import has_tokens
from flowrl.config.schema import Config
from flowrl.samplers import sigmas
from flowrl.training import identity
from flowrl.types import Solver


def problems(*overrides, name=None):
    with pytest.raises(ConfigError) as error:
        load_config(name, overrides)
    return str(error.value).splitlines()


def test_the_default_run_is_nft_on_the_embedded_world():
    cfg = load_config()
    assert (
        cfg.model.source == "package:flowrl.shapes/weights"
        and cfg.algorithm["name"] == "nft"
        and cfg.data.train == "shapes:train"
    )
    assert cfg.reward == {"shapes": {"weight": 1.0}} and cfg.trackers == ["tensorboard"]


@pytest.mark.parametrize("key", ["algorithm", "reward"])
@pytest.mark.parametrize("damage", [{}, {"model": "shapes"}, {"model": None}, {"data": []}])
def test_a_runs_config_that_lacks_its_algorithm_or_its_reward_is_refused(tmp_path, key, damage):
    stated = yaml.safe_load(load.dump(load_config())) | damage
    stated.pop(key)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stated))
    with pytest.raises(ConfigError, match=f"no {key} is named; (add|choose) {key}="):
        read_config(tmp_path / "config.yaml")


def test_an_evaluation_takes_every_solver_of_a_plan():
    assert config_schema.EvalConfig.model_fields["solver"].annotation == Solver


FOUR_STEPS = ("flux.2-klein-4b", "sd3.5-large-turbo", "sdxl-turbo")


def pairs():
    """(model, method) of what ships, where both are of tokens or both are of flows."""
    every = itertools.product(options("model"), options("algorithm"))
    return [(m, a) for m, a in every if bool(has_tokens(m)) == methods_by_kind.unmasks(a)]


@pytest.mark.parametrize(("model", "algorithm"), pairs())
def test_every_model_goes_with_every_algorithm(model, algorithm):
    """No command `model=M algorithm=A` is refused: the plan fits the model's steps, and the batch
    whole copies of the plan."""
    words = small.NEEDED.get(algorithm, [])
    if model in FOUR_STEPS and algorithm in ("flow_grpo_fast", "flow_dppo"):
        words = ["algorithm.window.high=3"]  # as docs/models.md says
    cfg = load_config(overrides=[f"model={model}", f"algorithm={algorithm}", *NAMED, *words])
    made = build.make_algorithm(cfg)
    steps = cfg.sampler.steps
    grid = sigmas.unmasking(64, steps) if made.unmasks else sigmas.linear(steps)
    plan = made.plan(grid, sampler=cfg.sampler, iteration=0, seed=cfg.seed)
    made.check(plan)
    of_config(cfg, method=made, processes=1, plan=plan)
    schema = config_schema.algorithm_schema(cfg.algorithm["name"])
    assert (
        cfg.algorithm
        == {"name": cfg.algorithm["name"], "label": algorithm}
        | schema(**config_schema.options_of(cfg.algorithm)).model_dump()
    )


# (algorithm, a model of its paper): sampler.steps T, batch.group G, batch.updates, optimizer.lr,
# sampler.eta as paper or code state them; None: not stated, or another number here, which the
# method's page lists
PAPERS = {
    ("flow_grpo", "sd3.5-medium"): (10, 24, 2, 3e-4, 0.7),
    ("flow_grpo", "flux.1-dev"): (6, 24, 2, 3e-4, None),
    ("flow_grpo", "wan2.1-1.3b"): (20, 4, 2, 1e-4, None),
    ("flow_grpo_fast", "sd3.5-medium"): (10, 24, 2, 3e-4, 0.8),
    ("flow_dppo", "sd3.5-medium"): (10, None, 2, 3e-4, 0.7),
    ("grpo_guard", "sd3.5-medium"): (10, 24, 2, 1e-4, 0.7),
    ("dance_grpo", "flux.1-dev"): (16, 12, None, 3e-4, 0.3),
    ("mix_grpo", "flux.1-dev"): (25, 12, 4, None, 0.7),
    ("mix_grpo_flash", "flux.1-dev"): (25, 12, 4, None, 0.7),
    ("sft", "sd3.5-medium"): (None, 1, 1, 3e-4, None),
    ("opd", "sd3.5-medium"): (10, 1, 1, None, 0.0),
    ("neighbor_grpo", "flux.1-dev"): (None, 12, None, None, None),
    ("mix_dppo", "flux.1-dev"): (25, 12, 4, None, 0.7),  # MixGRPO's
    ("branch_grpo", "flux.1-dev"): (20, 16, None, None, 0.3),
    ("branch_grpo_mix", "flux.1-dev"): (20, 16, None, None, 0.3),
    ("tree_grpo", "sd3.5-medium"): (10, 27, None, None, None),
    ("dense_grpo", "sd3.5-medium"): (None, None, None, None, None),
    ("tempflow_grpo", "sd3.5-medium"): (10, None, None, None, 0.7),
    ("granular_grpo", "flux.1-dev"): (16, 8 * 12 * 3, None, None, 0.7),
    ("pref_grpo", "flux.1-dev"): (25, 8, 2, 1e-5, 0.7),
    ("ddpo", "sd1.5"): (50, None, 4, 3e-4, 1.0),
    ("texforce", "sd1.5"): (50, None, 4, 3e-4, 1.0),
    ("dpok", "sd1.5"): (50, None, None, 1e-5, 1.0),
    ("prdp", "sd1.5"): (50, 16, None, None, None),
    ("nft", "sd3.5-medium"): (10, 24, 1, 3e-4, None),
    ("awm", "sd3.5-medium"): (14, 24, 1, 3e-4, None),
    ("dgpo", "sd3.5-medium"): (10, 24, 1, 3e-4, None),
    ("crd", "sd3.5-medium"): (10, 24, 2, 3e-4, None),
    ("dpo", "sd3.5-medium"): (40, 24, 1, 3e-4, None),
    ("raft", "sd3.5-medium"): (40, 24, 1, 3e-4, None),
    ("rwr", "sd3.5-medium"): (40, 24, 1, 3e-4, None),
    ("draft", "sd1.5"): (None, 1, 1, None, None),
    ("draft_lv", "sd1.5"): (None, 1, 1, None, None),
    ("refl", "sd1.5"): (40, 1, 1, None, None),
    ("alignprop", "sd1.5"): (50, 1, 1, None, None),
    ("reinflow", "sd3.5-medium"): (4, None, None, None, None),
    ("dsrl", "sd3.5-medium"): (None, None, None, 3e-4, None),
    # of language models, with fewer steps and other learning rates here
    ("trace_rl", "amused/amused-256"): (None, 8, 1, None, 1.0),
    ("diffu_grpo", "amused/amused-256"): (None, 6, None, None, None),
    ("unigrpo", "amused/amused-256"): (12, 9, None, None, 1.0),
    ("masked_ce", "amused/amused-256"): (None, None, None, None, None),
}


@pytest.mark.parametrize(("algorithm", "model"), PAPERS)
def test_a_method_runs_with_the_numbers_of_its_paper(algorithm, model):
    cfg = load_config(overrides=[f"model={model}", f"algorithm={algorithm}", *NAMED])
    got = (cfg.sampler.steps, cfg.batch.group, cfg.batch.updates, cfg.optimizer.lr, cfg.sampler.eta)
    stated = PAPERS[algorithm, model]
    assert tuple(g for g, s in zip(got, stated, strict=True) if s is not None) == tuple(
        s for s in stated if s is not None
    )


@pytest.mark.parametrize("model", options("model"))
def test_the_text_encoders_of_texforce_have_no_targets_of_the_denoiser(model):
    lora = load_config(overrides=[f"model={model}", "algorithm=texforce", *NAMED]).train.lora
    assert lora.targets is None and (lora.rank, lora.alpha) == (16, 16)


def test_every_method_has_its_papers_numbers_but_reg_grpo_which_is_of_language_models():
    assert {algorithm for algorithm, _ in PAPERS} == {*options("algorithm")} - {"reg_grpo"}


def test_the_quickstart_keeps_its_own_numbers():
    """Whatever DiffusionNFT's paper has: what `make quickstart` takes is what its table was
    measured with."""
    cfg = load_config("quickstart")
    assert (
        cfg.sampler.steps,
        cfg.batch.prompts,
        cfg.batch.group,
        cfg.batch.updates,
        cfg.optimizer.lr,
    ) == (8, 8, 16, 1, 1e-3)


@pytest.mark.parametrize(
    ("group", "option"), [(g, o) for g in ("reward", "experiment") for o in options(g)]
)
def test_every_reward_and_experiment_loads(group, option):
    load_config(overrides=[f"{group}={option}"])


def test_an_experiment_is_loaded_by_name_and_overrides_beat_it():
    assert (
        load_config("quickstart") == load_config(None, ["experiment=quickstart"]) != load_config()
    )
    cfg = load_config("quickstart", ["output=elsewhere", "reward=jpeg", "algorithm.beta=0.5"])
    assert (
        cfg.output == "elsewhere" and list(cfg.reward) == ["jpeg"] and cfg.algorithm["beta"] == 0.5
    )


def test_another_algorithm_replaces_an_experiments_options_for_its_own():
    plain, chosen = (
        load_config(None, ["algorithm=mix_grpo"]),
        load_config("quickstart", ["algorithm=mix_grpo"]),
    )
    assert (
        chosen.algorithm == plain.algorithm
        and chosen.iterations == load_config("quickstart").iterations
    )


def test_every_key_has_a_description_and_every_default_is_valid():
    def walk(schema):
        for name, field in schema.model_fields.items():
            assert field.description and field.description.endswith("."), (
                f"{schema.__name__}.{name}"
            )
            if isinstance(field.annotation, type) and issubclass(
                field.annotation, config_schema.Section
            ):
                walk(field.annotation)
                field.annotation.model_validate(field.annotation().model_dump())

    walk(Config)


def test_numbers_that_yaml_leaves_as_text_are_numbers():
    assert isinstance(yaml.safe_load("lr: 1e-4")["lr"], str)  # the trap
    assert config_schema.OptimizerConfig(lr="1e-4").lr == 1e-4
    assert load_config(overrides=["optimizer.lr=1e-5"]).optimizer.lr == 1e-5
    assert load_config(overrides=["algorithm=flow_grpo_fast"]).algorithm["clip"] == (1e-5, 1e-5)


def test_a_bare_no_in_yaml_means_no_mixed_precision(tmp_path):
    (tmp_path / "mine.yaml").write_text("train: {precision: no}\n")
    assert load_config(tmp_path / "mine.yaml", ["model=sd1.5", *NAMED]).train.precision == "no"


def test_a_dumped_config_reads_back_equal(tmp_path):
    cfg = load_config(
        overrides=[
            "model=sd3.5-medium",
            "algorithm=mix_grpo",
            "data=ocr",
            "reward=jpeg",
            "reward.jpeg.quality=50",
        ]
    )
    path = tmp_path / "config.yaml"
    path.write_text(load.dump(cfg))
    assert read_config(path) == cfg == load_config(path)
    assert load.diff(cfg, read_config(path)) == []


def test_a_file_states_what_differs_and_the_command_line_beats_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults:\n  - override /algorithm: dance_grpo\nreward: {jpeg: 0.5}\niterations: 3\nbatch:"
        " {group: 4}\n"
    )
    cfg = load_config(path, ["batch.group=6"])
    assert cfg.reward == {"jpeg": {"weight": 0.5}}  # the default reward does not shine through
    assert cfg.algorithm["sde"] == "dance_sde" and cfg.iterations == 3 and cfg.batch.group == 6
    assert load_config(path, ["reward=clip"]).reward == {"clip": {"weight": 1.0}}


@pytest.mark.parametrize(
    ("name", "overrides", "reward"),
    [
        (
            None,
            ["reward.shapes=0.5", "reward.shapes.reading=strict"],
            {"shapes": {"weight": 0.5, "reading": "strict"}},
        ),
        (
            None,
            ["reward.shapes.reading=strict", "reward.shapes=0.5"],
            {"shapes": {"weight": 0.5, "reading": "strict"}},
        ),
        (None, ["reward.shapes.reading=strict"], {"shapes": {"weight": 1.0, "reading": "strict"}}),
        (
            None,
            ["reward=clip", "reward.clip.pretrained=null"],
            {"clip": {"weight": 1.0, "pretrained": None}},
        ),
        (None, ["~reward.shapes", "reward.jpeg=1"], {"jpeg": {"weight": 1}}),
        ("quickstart", ["reward.shapes=0.5"], {"shapes": {"weight": 0.5, "reading": "strict"}}),
        (
            "quickstart",
            ["reward.jpeg=1"],
            {"shapes": {"weight": 1.0, "reading": "strict"}, "jpeg": {"weight": 1}},
        ),
        ("quickstart", ["~reward", "reward.jpeg=1"], {"jpeg": {"weight": 1}}),
        ("quickstart", ["reward.jpeg=1", "~reward"], {"jpeg": {"weight": 1}}),
        (
            "mine.yaml",
            ["reward.jpeg=0.5"],
            {"jpeg": {"weight": 0.5, "quality": 50}, "shapes": {"weight": 0.25}},
        ),
        (
            "mine.yaml",
            ["reward.jpeg.quality=9"],
            {"jpeg": {"weight": 1.0, "quality": 9}, "shapes": {"weight": 0.25}},
        ),
        ("mine.yaml", ["~reward", "reward.jpeg=1"], {"jpeg": {"weight": 1}}),
    ],
)
def test_weight_and_settings_of_a_reward_never_overwrite_each_other(
    tmp_path, monkeypatch, name, overrides, reward
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("reward: {jpeg: {quality: 50}, shapes: 0.25}\n")
    assert load_config(name, overrides).reward == reward


def test_an_option_file_states_a_weight_that_a_setting_leaves_alone(tmp_path, monkeypatch):
    """As of a reward of one's own: configs/reward/mine.yaml holds `jpeg: 0.25`."""
    shutil.copytree(compose.config_folder(), tmp_path / "configs")
    (tmp_path / "configs" / "reward" / "mine.yaml").write_text("jpeg: 0.25\n")
    monkeypatch.setattr(compose, "config_folder", lambda: tmp_path / "configs")
    assert load_config(None, ["reward=mine", "reward.jpeg.quality=50"]).reward == {
        "jpeg": {"weight": 0.25, "quality": 50}
    }


def test_a_hub_id_or_folder_needs_no_file():
    cfg = load_config(overrides=["model=someone/some-model-1.5", *NAMED])
    assert cfg.model.source == "someone/some-model-1.5" and cfg.model.pipeline == {}


def test_changed_keys_are_named():
    old = load_config()
    assert load.diff(old, load_config(overrides=["optimizer.lr=1e-5", "algorithm.beta=0.5"])) == [
        "algorithm.beta",
        "optimizer.lr",
    ]
    assert load.diff(old, load_config(overrides=["reward=jpeg"])) == [
        "reward.jpeg.weight",
        "reward.shapes.weight",
    ]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("batch.promts=4", 'unknown key "batch.promts"; did you mean "batch.prompts"'),
        ("lr=1e-4", 'unknown key "lr"; did you mean "optimizer.lr"?'),
        ("rewrad=jpeg", 'unknown key "rewrad"; did you mean "reward"'),
        ("algorithm.bta=2", 'unknown key "algorithm.bta"; did you mean "algorithm.beta"'),
        (
            "data.mixture=[{path: a.txt, wieght: 2}]",
            'unknown key "data.mixture.0.wieght"; did you mean "data.mixture.0.weight"',
        ),
        (
            "data.mixture.0.weight=2",
            "data.mixture[0]: the list is shorter; write it whole, as data.mixture=[...]",
        ),
        (
            "train.mode=lorra",
            "train.mode='lorra' should be 'lora' or 'full'; did you mean \"lora\"?",
        ),
        ("model=sd35-medium", 'unknown model "sd35-medium"; did you mean "sd3.5-medium"'),
        ("algorithm=nfd", 'unknown algorithm "nfd"; did you mean "nft"'),
        ("reward=shape", 'unknown reward "shape"; did you mean "shapes"'),
        (
            "experiment=quikstart",
            'unknown experiment "quikstart"; did you mean "quickstart"',
        ),
        ("reward.jpg=1", 'unknown reward "jpg"; did you mean "jpeg"'),
        ("reward.gain=2", '"gain" is no reward; the weight of one is reward.clip.weight=2'),
        ("reward.shapes=high", "reward.shapes='high' should be its weight, a finite number"),
        ("optimizer.lr=fast", "optimizer.lr='fast' should be a number"),
        (
            "train.gradient_checkpointing=1",
            "train.gradient_checkpointing=1 should be true or false or less than 1",
        ),
        ("optimizer.lr=.nan", "optimizer.lr="),
        ("seed=-1", "seed=-1 should be greater than or equal to 0"),
        (
            "data=file",
            "no prompts are named; add data=everyday (or data.train=prompts.txt), for example",
        ),
        ("algorithm.beta=-1", "algorithm.beta=-1 should be greater than 0"),
        ("algorithm.name=nfd", 'unknown algorithm "nfd"; did you mean "nft"?'),
        ("nonsense", '"nonsense" is not key=value'),
        ("optimizer.lr=${nowhere}", "nowhere"),
        ("~reward", "no reward is named; add reward=pickscore, for example"),
        ("~algorithm", "no algorithm is named"),
        (
            "~reward.shape",
            '"~reward.shape": no such reward or setting was chosen; did you mean "shapes"?',
        ),
        (
            "seed=99999999999999999999",
            "seed=99999999999999999999 should be less than 9223372036854775808",
        ),
        ("eval.seed=99999999999999999999", "eval.seed=99999999999999999999 should be less than"),
        ("seed=1,2", '"seed=1,2" gives several values; a run takes one'),
        ("reward.jpeg={80: 1}", "reward.jpeg: 80=80: keys should be strings"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_nearest_right_thing(override, sentence):
    (problem,) = problems(override)
    assert (
        problem.startswith(sentence)
        or override == "optimizer.lr=${nowhere}"
        and sentence in problem
    )


def test_all_problems_are_reported_together():
    wrong = [
        "model=sd35",
        "batch.promts=4",
        "train.mode=lorra",
        "seed=-1",
        "reward.jpeg.qualiti=3",
        "reward.shaps=1",
        "algorithm.bta=1",
    ]
    assert len(problems(*wrong)) == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n", "a config is a mapping"),
        ("a: [1\n", "mine.yaml"),
        ('a: "${"\n', "mine.yaml"),
        ("batch: {promts: 3}\n", 'unknown key "batch.promts"'),
        ("batch: 3\n", "batch=3 should be a valid dictionary"),
        ("model: 1.5\n", "mine.yaml: model=1.5 should be a mapping of keys to values"),
        ("algorithm: true\n", "mine.yaml: algorithm=True should be a mapping"),
        ("reward: [jpeg]\n", "mine.yaml: reward=['jpeg'] should be a mapping"),
        (
            "model: shapes-sd3\n",
            'to choose a file of configs/model, write "defaults: [{override /model: shapes-sd3}]"',
        ),
        ("1: 2\n", '"1" is not a key'),
        ("defaults: 3\n", "defaults=3 should be a list of the files"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, sentence):
    (tmp_path / "mine.yaml").write_text(text)
    (problem,) = problems(name=tmp_path / "mine.yaml")
    assert sentence in problem


def test_the_advice_for_choosing_a_model_in_a_file_works(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [{override /model: sd1.5}]\n")
    cfg = load_config(tmp_path / "mine.yaml", NAMED)
    assert cfg.model.source.endswith("stable-diffusion-v1-5")


def test_leaving_the_reward_out_and_choosing_one_contradict_each_other():
    assert problems("reward=clip", "~reward") == [
        '"~reward" leaves out what reward=clip chooses; give one of the two'
    ]


def test_a_missing_file_or_experiment_is_named(tmp_path):
    assert "gone.yaml" in problems(name=tmp_path / "gone.yaml")[0]
    assert problems(name="quikstart") == [
        'unknown experiment "quikstart"; did you mean "quickstart"?'
    ]


def test_a_batch_that_does_not_divide_offers_the_nearest_sizes():
    cfg = load_config(overrides=["batch.prompts=50", "batch.updates=2", "batch.group=10"])
    of_config(cfg, processes=1, plan=SimpleNamespace(leaves=5))
    with pytest.raises(ConfigError) as error:
        of_config(cfg, processes=8, plan=SimpleNamespace(leaves=4))
    assert str(error.value).splitlines() == [
        "batch.prompts=50 does not divide by 8 processes x 2 updates; try 48 or 64",
        "batch.group=10 is not a multiple of the plan's 4 leaves; try 8 or 12",
    ]
    with pytest.raises(
        ConfigError, match=r"batch.prompts=50 does not divide by 64 processes x 2 updates; try 128$"
    ):
        of_config(cfg, processes=64)


def test_a_config_cannot_be_changed_after_validation():
    with pytest.raises(ValueError, match="frozen"):
        load_config().batch.group = 3


def test_another_method_by_its_name_starts_from_its_own_defaults():
    """As in a YAML file that names its method: nft's file, chosen by config.yaml, holds settings
    that the reward's gradient knows nothing of."""
    composed = load_config(None, ["algorithm.last=2", "algorithm.name=reward_gradient"])
    assert composed.algorithm["name"] == "reward_gradient"
    assert composed.algorithm["last"] == 2
    same = load_config(None, ["algorithm.name=nft"])
    assert same == load_config(None, [])


# a run's config.yaml, as commit 9921b0d wrote it
OLD = Path(__file__).parent / "run_of_9921b0d.yaml"


def test_a_config_that_names_a_setting_which_is_gone_is_read(tmp_path):
    assert "profile_memory: false" in OLD.read_text()
    read = read_config(OLD)
    assert read == load_config(OLD)
    assert (read.algorithm["name"], [*read.reward], read.seed) == ("nft", ["jpeg"], 3)
    edited = tmp_path / "config.yaml"
    edited.write_text(OLD.read_text().replace("profile_memory: false", "profile_memory: true"))
    for read in (read_config, load_config):
        with pytest.raises(ConfigError) as error:
            read(edited)
        assert str(error.value) == (
            f"{edited}: train.profile_memory=true is a setting that is gone since 2026-11-26; leave"
            " it out: scripts/bench/budget.py counts what each phase allocates on a CPU"
        )


def test_every_setting_which_is_gone_is_dropped_at_its_default_and_refused_at_another_value():
    for key, (default, instead) in GONE.items():
        section, *path, setting = key.split(".")
        for value, kept in ((default, {}), ("other", None)):
            tree = {setting: value}
            for name in reversed(path):
                tree, kept = {name: tree}, None if kept is None else {name: kept}
            if kept is not None:
                assert without_gone({section: tree, "seed": 1}) == {section: kept, "seed": 1}
                continue
            with pytest.raises(ValueError, match=rf"{re.escape(key)}=other is a setting that is"):
                without_gone({section: tree})
            assert without_gone({section: tree}, whatever=True) is not None
        assert instead and not instead.endswith(".")


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ({"name": "vr_thinker", "most": 3}, "most"),
        (
            {"name": "win_rate", "judge": "vr_thinker", "judge_settings": {"most": 3}},
            "judge_settings.most",
        ),
        (
            {"name": "ensemble", "members": {"b": {"name": "vr_thinker", "most": 3}}},
            "members.b.most",
        ),
    ],
)
def test_a_reward_is_known_by_its_name_where_a_setting_of_it_is_gone(entry, where):
    with pytest.raises(ValueError, match=f"reward.a.{where}=3 is a setting that is gone"):
        without_gone({"reward": {"a": entry}})
    assert "'most'" not in str(without_gone({"reward": {"a": entry}}, whatever=True))
    same = {"reward": {"most": 3, "vr_thinker": {"name": "clip", "most": 3}}}
    assert without_gone(same) == same


def test_a_run_goes_on_whose_checkpoint_names_a_setting_which_is_gone():
    now = identity.of_config(load_config(OLD))
    kept = copy.deepcopy(now)
    kept["config"]["train"]["profile_memory"] = True
    kept["config"]["reward"]["vr_thinker"] = {"most": 3}
    now["config"]["reward"]["vr_thinker"] = {}
    assert identity.differences(kept, now, Path("runs/old")) == []
