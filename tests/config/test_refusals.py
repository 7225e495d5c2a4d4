"""Which words a start refuses, with which sentence: no model is loaded, and nothing is written."""

import re
import subprocess
import sys
from dataclasses import replace

import methods_by_kind
import pytest
import small

from flowrl.config import rules, run_rules
from flowrl.config.build import make_algorithm, make_policy
from flowrl.config.compose import options
from flowrl.config.facts import Facts, of_config, plain
from flowrl.config.lighter import Shortage, changed, next_change, starts
from flowrl.config.load import load_config
from flowrl.config.schema import algorithm_schema
from flowrl.data.prompts import load_prompts
from flowrl.data.scored_dataset import NO_MEDIA
from flowrl.rewards import load_set
from flowrl.samplers import sigmas
from flowrl.training.budget.planner import check_known
from flowrl.training.out_of_memory import advised

SHARD, TEAMS = "train.shard=[denoiser]", "train.sequence_parallel=2"
HELPED = "data.sampler.help.after=2 data.sampler.help.guidance=3"
WATCHED = "reward.fair.name=saturation watch.held_out=fair"
CLIMBED = "reward.tiling.mode=grad"
ALIKE = "diversity.features=shapes diversity.redundancy=3 diversity.entropy=0.5"
ENTROPY = "diversity.features=shapes diversity.entropy=0.5"
ANCHORED = "anchor.data.weight=0.1 anchor.data.source=media"
OFFLINE = "data.offline=scored"
TOKENS = f"algorithm=trace_rl {small.TOKENS}"
NAMED = {"method", "processes", "rewards", "prompts", "files", "dataset"}  # facts beside words
NAMED |= {"masks", "anchored", "policy", "plan", "spare", "held_out", "validation"}

WORDS = [  # over words alone: refused before an algorithm is made
    ("model.encoders=leave train.parts=[text_encoder]", "use model.encoders=stay"),
    ("model.quantize=int8 train.mode=full", "int8 freezes the weights, and train.mode=full"),
    (f"model.quantize=int8 {SHARD}", "are split by train.shard=[denoiser]"),
    ("model.offload=denoiser train.mode=full", "train.mode=full trains them all"),
    (f"model.offload=denoiser {SHARD}", "shard=[denoiser] splits them"),
    ("model.offload=denoiser batch.overlap=2", "batch.overlap=2 others are sampled"),
    (f"{SHARD} train.compile=blocks", "train.compile=blocks compiles them"),
    (f"{SHARD} train.parts=[denoiser,text_encoder]", "a trained text encoder is called between"),
    (f"{TEAMS} {SHARD}", "shard=[denoiser] both split the network"),
    (f"{TEAMS} train.compile=blocks", "hooks blocks that train.compile=blocks would compile"),
    (f"{TEAMS} model.offload=denoiser", "model.offload=denoiser moves them"),
    (f"{TEAMS} model.quantize=int8", "and not with model.quantize=int8"),
    (f"{TEAMS} train.parts=[denoiser,text_encoder]", "trains a text encoder"),
    (f"{SHARD} train.mode=full train.precision=fp16", "the scaler of fp16 looks for overflow"),
    (f"{SHARD} train.mode=full optimizer.name=adamw8bit", "of optimizer.name=adamw8bit are not"),
]
BY_DOMAIN = "data.domain=task reward.jpeg.domains=[counting]"
MIXTURE = "data.mixture=[{path:shapes:train}]"
FURTHER = [  # of a start: over words, and over what they name
    ("train.init_lora=tests train.mode=full", "loads adapters, and train.mode=full trains none"),
    ("train.init_lora=tests/nowhere", "train.init_lora=tests/nowhere does not exist"),
    ("reward.jpeg=0", "every reward has weight 0 (jpeg), so nothing would be trained"),
    # draws and groups
    ("batch.group=1", "batch.group=1: an advantage is a reward minus its group's mean"),
    ("batch.prompts=7 batch.updates=2", "does not divide by 1 process x 2 updates; try 6 or 8"),
    ("algorithm=tree_grpo batch.group=20", "is not a multiple of the plan's 27 leaves; try 27"),
    ("draw.mode=refill algorithm=draft", "draw.mode=refill looks for groups whose rewards differ"),
    ("draw.mode=balance algorithm=tree_grpo", "draw.mode=balance chooses whole samples, and plan="),
    ("draw.mode=balance algorithm.keep=2", "draw.mode=balance and algorithm.keep=2 both choose"),
    ("draw.mode=balance algorithm=dgpo", "dgpo needs advantages that add up to 0"),
    ("draw.mode=balance reward.rank.reward=jpeg", "a reward that compares a group judges one"),
    *(
        (
            f"draw.mode=balance algorithm=ddpo algorithm.credit={credit}",
            f"draw.mode=balance has a baseline of all draws, and credit={credit} one of the sample",
        )
        for credit in ("depth", "siblings", "granular")
    ),
    ("algorithm=raft algorithm.top=4 batch.group=4", "algorithm.top=4 of batch.group=4 trains"),
    *(
        (
            f"algorithm={method} sampler.init_noise={init}",
            f"sampler.init_noise={init} starts all samples of a prompt from one noise",
        )
        for method in ("nft", "dsrl train.parts=[initial_noise]")
        for init in ("group", "batch")
    ),
    ("algorithm=flow_grpo sampler.eta=0", "set sampler.eta > 0"),
    ("algorithm=flow_grpo sampler.steps=1", "sampler.steps >= 2"),
    (
        "algorithm=tempflow_grpo batch.group=3 algorithm.tree.children=1",
        "algorithm.tree.children=1 leaves credit=siblings nothing to compare",
    ),
    # rewards by domain, and prompts of several files
    (f"{BY_DOMAIN} stop.reward=1", "have no common scale; name a domain by stop.domain=color_attr"),
    (f"{BY_DOMAIN} stop.reward=1 stop.domain=countin", 'no prompt has the domain "countin"; did'),
    ("stop.reward=1 stop.domain=counting", "no reward states domains; leave it out"),
    (f"{BY_DOMAIN} draw.mode=balance draw.positive=0.5", "draw.positive=0.5 is one threshold for"),
    (
        f"{BY_DOMAIN} data.sampler.mode=bayes data.sampler.success=0.5",
        "data.sampler.success=0.5 is one threshold for the totals of all prompts",
    ),
    (f"{MIXTURE} data.train=geneval:train", "data.mixture both name prompts; drop one of them"),
    (f"{MIXTURE} data.offline=scored", "replaces the prompts of data.mixture; leave one of the"),
    (f"{MIXTURE} data.sampler.mode=bayes", "data.sampler.mode=bayes by what they have shown"),
    (f"{MIXTURE} draw.mode=refill", "draw.mode=refill by what groups lack; drop one of them"),
    # options of a method
    ("algorithm=tree_grpo algorithm.keep=2", "algorithm.keep=2 leaves out whole samples"),
    ("algorithm=dpo algorithm.keep=2", "of each group whatever algorithm.keep=2 says"),
    ("algorithm=dgpo algorithm.keep=2", "over a group, of which algorithm.keep=2 trains a part"),
    ("algorithm=mix_grpo algorithm.reference=ema", "reference=ema is read only with algorithm.kl"),
    ("algorithm=raft algorithm.reference=reset", "reference=reset is read only with algorithm.kl"),
    ("algorithm=nft algorithm.error=eps", "algorithm.error=eps has no effect"),
    ("algorithm=raft algorithm.first=1", "algorithm.first and range choose levels of the schedule"),
    # steps that draw tokens
    ("algorithm=trace_rl", "trace_rl trains the tokens of masked generators, and the model is a f"),
    (f"{TOKENS} reward.tiling.mode=grad", "algorithm=trace_rl trains tokens, which are drawn, and"),
    (f"{TOKENS} algorithm.plan=window", "algorithm.plan=window is of steps with Gaussian noise"),
    (f"{TOKENS} algorithm.kl=velocity", "algorithm.kl=velocity is of steps with Gaussian noise"),
    (f"{TOKENS} algorithm.ratio=guard", "algorithm.ratio=guard is of steps with Gaussian noise"),
    (f"{TOKENS} algorithm.step_weight=noise", "algorithm.step_weight=noise is of steps with Gau"),
    (
        f"{TOKENS} algorithm.ratio=ppo algorithm.trust.threshold=0.01",
        "trust.threshold=0.01 is of steps with Gaussian noise, and those of algorithm.sde=random",
    ),
    (
        "algorithm=flow_grpo algorithm.ratio=token",
        "algorithm.ratio=token compares the tokens of masked generators, and algorithm.sde=flow",
    ),
    (f"{TOKENS} algorithm.shrink=2 algorithm.credit=td", "shrink=2 scores steps together that cre"),
    (f"{TOKENS} algorithm.shrink=2 algorithm.timestep_fraction=0.5", "use credit=leaf and timeste"),
    (
        "algorithm=diffu_grpo algorithm.draws=2",
        "all masks the same tokens in each of alg",
    ),
    ("algorithm=unigrpo algorithm.draws=1", "algorithm.draws=1 masks all tokens, whatever mask_"),
    # what is trained
    ("algorithm=dsrl train.parts=[denoiser]", "trains initial_noise, which train.parts"),
    ("algorithm=dsrl train.parts=[denoiser,initial_noise]", "leaves the network as it is"),
    ("algorithm=nft train.parts=[denoiser,step_noise]", "nft does not train"),
    ("algorithm=reinflow train.parts=[step_noise]", "trains the network too"),
    ("stop.kl=0.1 algorithm.kl_weight=0", "stop.kl=0.1 needs policy/kl"),
    (f"{SHARD} algorithm=draft", "train.shard=[denoiser]: the gradient of a reward"),
    (f"{TEAMS} algorithm=draft", "the gradient of a reward passes through several calls"),
    (f"{TEAMS} algorithm=reinflow", "reinflow trains a head beside the network"),
    (f"{TEAMS} algorithm=dsrl train.parts=[initial_noise]", "dsrl trains a head beside the"),
    ("algorithm=draft model.offload=all", "model.offload=all: the gradient of a reward"),
    (f"{CLIMBED} model.offload=all", "model.offload=all: the gradient of a reward"),
    *(
        (f"algorithm={name} sampler.rlg=2", "sampler.rlg=2 samples from another distribution")
        for name in ("flow_grpo", "prdp", "draft", "neighbor_grpo")
    ),
    # which prompts
    ("data.sampler=bandit algorithm=draft", "this method has none; use bayes"),
    (f"data.sampler=bayes {OFFLINE}", "data.sampler.mode=bayes learns from new samples, and"),
    ("data.sampler=best", "data.sampler.mode"),
    ("data.sampler.target=1.5 data.sampler.mode=bayes", "data.sampler.target"),
    (f"{HELPED} algorithm=flow_grpo", "algorithm=flow_grpo trains how a sample was made"),
    (f"{HELPED} algorithm=draft", "algorithm=draft trains how a sample was made"),
    (f"{HELPED} data.sampler.help.guidance=null", "says when prompts are helped, but not how"),
    (f"{HELPED} data.sampler.help.column=help_prompt", "no prompt has a text in that column"),
    (f"{HELPED} data.sampler.help.column=prompt", "no prompt has a text in that column"),
    (f"{HELPED} data.sampler.help.column=include", "which is no text"),
    (f"{HELPED} {OFFLINE}", "helps new samples, and data.offline has none"),
    # media beside the samples
    (ANCHORED.partition(" ")[0], "trains media of your own; name them with anchor.data.source"),
    (f"{ANCHORED} algorithm=sft data.offline=scored", "adds the loss of algorithm=sft, which is"),
    (f"{ANCHORED} algorithm=draft", "those of draft are whole samples; use anchor.data.levels=own"),
    (f"{ANCHORED} algorithm=dsrl train.parts=[initial_noise]", "and dsrl leaves it as it is"),
    # old samples
    ("replay.size=2 algorithm=flow_grpo", "algorithm=flow_grpo reads the log-probs of denoising"),
    ("replay.size=2 algorithm=prdp", "algorithm=prdp reads the log-probs of denoising steps"),
    ("replay.size=2 algorithm=neighbor_grpo", "reads the states of denoising steps"),
    ("algorithm=neighbor_grpo sampler.init_noise=group", "algorithm.spread says how; use sampler"),
    ("algorithm=neighbor_grpo algorithm.anchors=13", "and batch.group=12; choose at most as many"),
    (f"replay.size=2 algorithm=trace_rl {small.TOKENS}", "as algorithm=masked_ce, or replay"),
    ("replay.size=2 algorithm=draft", "algorithm=draft climbs rewards of new samples"),
    ("replay.size=2 replay.taper=1.5", "replay.taper"),
    ("replay.size=2 replay.share=0", "replay.share"),
    (f"replay.size=2 {OFFLINE}", "replay.size=2 keeps new samples, and data.offline has none"),
    # how alike samples are
    (f"{ALIKE} algorithm=draft", "diversity.redundancy changes what advantages are made of, and"),
    (f"{ENTROPY} algorithm=dpo", "diversity.entropy=0.5 scales all advantages of a group alike"),
    (f"{ENTROPY} algorithm=dpo", "and dpo reads only the order of samples in their group"),
    (f"{ENTROPY} algorithm=raft", "raft reads only the order of samples in their group; set it"),
    (f"{ENTROPY} algorithm=granular_grpo", "and algorithm.credit=granular divides by a spread"),
    (f"{ALIKE} {OFFLINE}", "features=shapes compares new samples, and data.offline has none"),
    # rewards
    (f"{CLIMBED} algorithm=draft reward.jpeg=0", "algorithm=draft climbs the gradient"),
    (f"{CLIMBED} reward.jpeg=0", "which leaves none to compare samples by; use algorithm=draft"),
    ("reward.jpeg.mode=grad reward.tiling=1", "jpeg as loaded gives none"),
    (f"{CLIMBED} {OFFLINE}", "mode=grad of tiling cannot be taken out of the scores"),
    (
        f"{CLIMBED} reward.rank.reward=jpeg reward.tiling.gate.rank=0.5",
        "rank compares the samples of a group, and the gradient of tiling",
    ),
    ("stop.watch=stop", "stop.watch=stop needs a held-out reward"),
    ("watch.held_out=fair", "watch.held_out=fair is none of the rewards (jpeg)"),
    ("watch.held_out=jpeg", "jpeg is trained on, with weight 1, so that it is not held out"),
    (f"{WATCHED} reward.fair.weight={{0:0,9:1}}", "fair is trained on"),
    (f"{WATCHED} reward.fair=0 reward.jpeg.gate.fair=0.5", "fair decides how reward.jpeg counts"),
]


def refusal(words):
    """Why a start would refuse these words, before it loads a model; "": it goes on."""
    try:
        cfg = load_config(None, ["reward=jpeg", *words.split()])
        algorithm = make_algorithm(cfg)
        facts = Facts(plain(cfg), type(algorithm.config))
        facts.learn(method=algorithm, processes=1)
        facts.learn(rewards=replace(load_set(cfg.reward), domain_field=cfg.data.domain))
        facts.learn(prompts=load_prompts(cfg.data.train), dataset=None, files=[], masks=[])
        facts.learn(anchored=NO_MEDIA, validation=NO_MEDIA)
        steps = cfg.sampler.steps
        grid = sigmas.unmasking(64, steps) if algorithm.unmasks else sigmas.shifted(steps, 3)
        plan = algorithm.plan(grid, sampler=cfg.sampler, iteration=0, seed=cfg.seed)
        algorithm.check(plan)
        facts.learn(plan=plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("words", "sentence"), [*WORDS, *FURTHER])
def test_words_that_do_not_go_together_are_refused_in_a_sentence(words, sentence):
    assert sentence in refusal(words)


@pytest.mark.parametrize(
    "words",
    [
        *(words.rpartition(" ")[0] for words, _ in WORDS),
        "reward.tiling.mode=grad model.offload=denoiser",
        "algorithm=nft replay.size=2",
        "algorithm=raft algorithm.top=3 batch.group=4",
        "algorithm=raft algorithm.top=4 batch.group=4 data.offline=scored",
        "algorithm=nft sampler.init_noise=group data.offline=scored",
        "algorithm=dpo diversity.features=shapes diversity.novelty=1",
        "algorithm=draft reward.jpeg=0 reward.tiling=1 diversity.features=shapes",
        f"algorithm=rwr {ENTROPY}",
        f"algorithm=nft {ENTROPY} diversity.novelty=1",
        TOKENS,
        f"{TOKENS} algorithm.step_weight=inverse_step",
        f"algorithm=masked_ce {small.TOKENS} replay.size=2",
    ],
)
def test_what_goes_together_is_not_refused(words):
    assert refusal(words) == ""


@pytest.mark.parametrize("method", ("nft", "flow_grpo", "draft"))
def test_a_folder_of_a_masked_generator_is_refused_for_methods_of_flows(method, tmp_path):
    """By the class in its index, before anything loads; the methods that are named are all of them
    that fit."""
    index = '{\n  "_class_name": "AmusedPipeline",\n  "vqvae": ["diffusers", "VQModel"]\n}'
    (tmp_path / "model_index.json").write_text(index)
    said = refusal(f"algorithm={method} model={tmp_path} data=ocr")
    assert f"algorithm={method} trains flows, and the model is a masked generator" in said
    named = re.split(", | or ", said.partition("; use algorithm=")[2].splitlines()[0])
    assert sorted(named) == methods_by_kind.on_tokens()
    fits = named[0]
    assert refusal(f"algorithm={fits} model={tmp_path} data=ocr") == ""


def test_a_pipeline_that_changes_a_picture_is_refused_by_its_own_name(tmp_path):
    (tmp_path / "model_index.json").write_text('{\n"_class_name": "AmusedInpaintPipeline"\n}')
    said = refusal(f"algorithm=trace_rl model={tmp_path} data=ocr")
    assert said.startswith("AmusedInpaintPipeline makes tokens, and of such pipelines AmusedPipel")


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("shapes-sd3", False),
        ("flux.1-dev", False),  # by configs/architecture
        ("amused/amused-256", None),
        ("no-such-model", None),
        ("tests/file.py:policy", None),
        ("live:Net", None),
    ],
)
def test_a_model_is_known_to_have_tokens_where_its_words_tell(source, tokens):
    assert run_rules.has_tokens(source) is tokens


def test_all_that_is_wrong_is_said_at_once():
    both = refusal(f"{SHARD} train.compile=blocks model.offload=denoiser").splitlines()
    assert len(both) == 2 and "splits them" in both[0] and "compiles them" in both[1]


@pytest.mark.parametrize(("words", "sentence"), WORDS)
def test_a_start_a_policy_and_a_budget_refuse_alike(words, sentence):
    cfg = load_config(None, words.split())
    for refuse in (of_config, make_policy, lambda cfg: check_known(cfg, 2)):
        with pytest.raises(ValueError) as raised:
            refuse(cfg)
        assert sentence in str(raised.value)


def test_a_refusal_comes_before_anything_is_written(tmp_path):
    result = small.invoke("train", *small.words(tmp_path / "run"), "batch.group=1")
    assert result.exit_code == 2 and "batch.group=1: an advantage" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("train", "held_out", "count"),
    [
        (["a cat", "a dog"], ["A  cat", "a bird"], 1),
        (["a cat"], ["a bird"], 0),
        (["a cat"], [], 0),
        ([{"prompt": "a cat", "image": "a.png"}], [{"prompt": "a cat", "image": "b.png"}], 0),
        ([{"prompt": "a cat", "image": "a.png"}], [{"prompt": "a cat", "image": "a.png"}], 1),
        ([{"prompt": "a cat", "tag": 1}], [{"prompt": "a cat", "tag": 2}], 1),
    ],
)
def test_held_out_prompts_that_are_trained_on_are_said(train, held_out, count):
    rows = [
        [{"prompt": r} if isinstance(r, str) else r for r in part] for part in (train, held_out)
    ]
    facts = of_config(load_config(), prompts=rows[0], held_out=rows[1])
    start = f"{count} of the {len(held_out)} prompts of data.eval are in data.train, too, as"
    said = [sentence for sentence in facts.warnings() if "data.eval" in sentence]
    assert [s.startswith(start) for s in said] == [True] * min(1, count)


@pytest.mark.parametrize(
    ("images", "domains", "said"),
    [
        (3, "aab", ""),
        (2, "aab", "first 2 of the 3 prompts of data.eval, and none of the domain b; with eval.im"),
        (2, "aba", ""),
        (1, "", ""),
    ],
)
def test_held_out_prompts_that_are_not_evaluated_are_said(images, domains, said):
    held_out = [{"prompt": f"a cat {i}", "domain": d} for i, d in enumerate(domains)]
    facts = of_config(load_config(None, [f"eval.images={images}"]), held_out=held_out)
    found = [sentence for sentence in facts.warnings() if "eval.images" in sentence]
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize("data", [name for name in options("data") if name != "file"])
def test_lists_that_ship_share_no_prompt_between_training_and_evaluation(data):
    cfg = load_config(None, [f"data={data}"])
    prompts, held_out = (load_prompts(part) for part in (cfg.data.train, cfg.data.eval))
    facts = of_config(cfg, prompts=prompts, held_out=held_out)
    assert not [sentence for sentence in facts.warnings() if "are in data.train" in sentence]


def test_every_rule_reads_what_there_is():
    """A misspelled key would leave a rule waiting for good."""
    cfg = load_config()
    words = Facts(plain(cfg), algorithm_schema(cfg.algorithm["name"]))
    for rule in (*rules.RULES, *run_rules.RULES):
        assert all(words[key] is not words for key in rule.reads if key.split(".")[0] not in NAMED)


# ---------------------------------------------------------------------- what is proposed instead


@pytest.mark.parametrize(
    ("words", "phase", "passed_over", "instead"),
    [  # a run has one of two settings; the other one would be next
        (["train.parts=[text_encoder]"], "rollout", "model.encoders", {"model.quantize": "int8"}),
        (["train.compile=blocks"], "optimizer", "train.shard", {"model.quantize": "int8"}),
        (["train.mode=full"], "reward", "model.offload", {"batch.states": "host"}),
        ([SHARD], "optimizer", "model.quantize", {"optimizer.name": "adamw8bit"}),
    ],
)
def test_a_budget_proposes_what_would_start(words, phase, passed_over, instead):
    base = ["batch.decode=1", "model.encoders=leave"] if "encoders" not in passed_over else []
    cfg = load_config(None, [*base, *words])
    assert next_change(cfg, Shortage(phase=phase, gpus=2), modelled=True) == instead
    assert starts(changed(cfg, instead))


def test_a_micro_batch_is_not_halved_below_the_rows_of_one_state():
    words = ["train.gradient_checkpointing=true", "model.quantize=nf4", "batch.states=host"]
    small = ["batch.micro=2", "batch.decode=1", "model.encoders=leave", "model.offload=denoiser"]
    cfg = load_config(None, [*words, *small])
    found = [
        next_change(cfg, Shortage(phase="update", state=state), modelled=True) for state in (1, 2)
    ]
    assert found == [{"batch.micro": 1}, {"optimizer.name": "adamw8bit"}]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train.parts=[text_encoder]"], "set model.quantize=int8"),
        ([SHARD, "train.mode=full", "model.encoders=leave"], "set train.mode=lora"),
        ([SHARD, "model.encoders=leave"], "set optimizer.name=adamw8bit"),
        ([SHARD, "model.encoders=leave", "optimizer.name=adamw8bit"], "ask for smaller pictures"),
    ],
)
def test_the_sentence_of_a_run_out_of_memory_names_what_would_start(words, fix):
    cfg = load_config(None, [*words, "model.dtype=bf16"])
    assert advised(cfg, Shortage(phase="optimizer")).startswith(fix)


def test_rules_over_words_need_no_torch():
    """Also words of a reward's settings, whose kinds a file tells."""
    script = """
import sys
from flowrl.config.facts import Facts
from flowrl.config.load import composed
from flowrl.config.schema import algorithm_schema
words = ["train.shard=[denoiser]", "train.compile=blocks", "reward.clip.model=1980"]
tree, problems = composed(None, words)
assert not problems and tree["reward"]["clip"]["model"] == "1980"
try:
    Facts(tree, algorithm_schema(tree["algorithm"]["name"])).learn()
except ValueError as error:
    print(error)
print("torch" in sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    sentence, imported = answer.stdout.splitlines()
    assert sentence.endswith("train.compile=blocks compiles them; leave one of the two out")
    assert imported == "False"
