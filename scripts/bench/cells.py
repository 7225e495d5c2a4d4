"""What the benchmark of algorithms runs: a cell is one run, named by all that it is.

All cells share model, prompts, reward, LoRA and budget (COMMON). A cell's result lies in
docs/results/cells/NAME.json, where algorithms.py writes and results_page.py reads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.load import load_config
from flowrl.config.schema import algorithm_schema, options_of

Cell = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"
WEIGHTS = Path(__file__).resolve().parents[2] / "flowrl" / "shapes" / "weights"
IMAGES = 348  # of an evaluation
BUDGET = 75_000  # network rows
MARKS = (1 / 6, 1 / 3, 2 / 3)  # shares of it after which a run is evaluated on its way
COMMON = [
    "model=shapes-sd3",
    "sampler.steps=8",
    "sampler.guidance=none",
    "batch.prompts=8",
    "batch.group=16",
    "batch.micro=128",
    "batch.decode=128",
    "ema.decay=0.8",
    "ema.every=1",
    f"eval.images={IMAGES}",
    "eval.steps=8",
    "eval.solver=dpm2",
    "eval.every=0",
    "eval.baseline_guidance=null",
    "checkpoint.every=100000",
    "iterations=100000",
    "trackers=[]",
    "model.self_check=false",
    "optimizer.warmup=0",
]
WORLD = "shapes"  # its prompts, and the verifier that is trained on and read, strictly
# of 8 steps, about the share that 4 of 25 are, and the same travel
WINDOW = ["algorithm.window.size=2", "algorithm.window.every=4"]
FORWARD = ["algorithm.steps=4"]  # noise levels a sample
FIRST = {
    "flow_grpo": [],
    "dance_grpo": [],
    "mix_grpo": WINDOW,
    "mix_grpo_flash": WINDOW,
    "branch_grpo": ["algorithm.tree.splits=[0,1,2,4]"],
    "tree_grpo": ["algorithm.tree.children=2", "algorithm.window.size=4"],
    "tempflow_grpo": ["algorithm.tree.children=4", "batch.group=28"],
    "nft": FORWARD,
    "awm": [*FORWARD, "algorithm.kl_weight=3e-3"],  # the code's of then
    "dgpo": FORWARD,
    "dpo": FORWARD,
    "raft": FORWARD,
}
SECOND = {
    "flow_grpo_fast": ["algorithm.window.size=2", "algorithm.window.high=4"],
    "branch_grpo_mix": ["algorithm.tree.splits=[0,1,2,4]", "algorithm.window.size=2"],
    "granular_grpo": [
        "algorithm.tree.children=4",
        "algorithm.tree.steps=[0,1,2,3]",
        "batch.group=48",
    ],
    "grpo_guard": [],
    "reg_grpo": [],
    "prdp": [],
    "ddpo": [],
    "dpok": [],
    "pref_grpo": [],
    "crd": FORWARD,
    "rwr": FORWARD,
}
THIRD: dict[str, list[str]] = {"reinflow": [], "dsrl": [], "texforce": []}
# a divergence in place of the clip, and all else as in flow_grpo and in mix_grpo
FOURTH = {
    "flow_dppo": [
        "algorithm.plan=full",
        "algorithm.window.schedule=progressive",
        "algorithm.window.size=4",
        "algorithm.window.high=null",
        "algorithm.kl=flow_grpo",
        "algorithm.kl_weight=0.04",
    ],
    "mix_dppo": WINDOW,
}
# Media and pairs of own_data.py: no rollouts, and what its samples cost is part of the budget
BEST = ["data.offline=build/bench/best", "batch.prompts=64", "batch.group=1"]
PAIRS = ["data.offline=build/bench/pairs.jsonl", "batch.prompts=32", "batch.group=2"]
FIFTH = {
    "sft": [*BEST, "reward.shapes.weight=0"],
    "dpo_pairs": [*PAIRS, "reward.shapes.weight=0", *FORWARD],
}
# A student of two specialists (the claims specialist_*), whose LoRAs algorithms.py keeps there
SPECIALISTS = {
    "first": "[single_object,colors,counting]",
    "second": "[two_object,position,color_attr]",
}
SIXTH = {
    "opd": [
        "batch.prompts=32",
        "batch.group=1",
        "reward.shapes.weight=0",
        "algorithm.route=task",
        *(
            word
            for name, tasks in SPECIALISTS.items()
            for word in (
                f"algorithm.teachers.{name}.adapter=build/bench/specialist_{name}",
                f"algorithm.teachers.{name}.guidance=none",
                f"algorithm.teachers.{name}.domains={tasks}",
            )
        ),
    ],
}
METHODS = FIRST | SECOND | THIRD | FOURTH | FIFTH | SIXTH
ALGORITHM = {"dpo_pairs": "dpo"}  # where a method's name here is not its algorithm's
DRAWN = 256 * 16 * 8  # network rows of own_data.py
# Rewards with a gradient. The verifier has none: it is only read.
PREFERENCE = ["reward=preference", "reward.preference.rounding=false", "reward.shapes.weight=0"]
# one sample a prompt is enough for a gradient, and an update an iteration for so many
SINGLE = [*PREFERENCE, "batch.prompts=32", "batch.group=1"]
CLIMBING = {"draft": SINGLE, "draft_lv": SINGLE, "refl": SINGLE, "alignprop": SINGLE}
TUNING = ["data.eval=shapes:train", "eval.seed=1"]  # what chooses a setting is no test of it
RATES = ["1e-3", "3e-3", "1e-2"]
LADDER = ["1e-5", "3e-5", "1e-4", "3e-4", *RATES, "3e-2", "1e-1"]  # where the best is at an edge
CLIPS = {  # the paper's first; none: the method does not clip, or its clip cannot act
    **dict.fromkeys(FOURTH, ("1e-5", "1e-4")),  # the divergence that takes the clip's place
    **dict.fromkeys(
        ("flow_grpo", "dance_grpo", "mix_grpo", "mix_grpo_flash", "tree_grpo", "tempflow_grpo"),
        ("[1e-4,1e-4]", "[1e-3,1e-3]"),
    ),
    **dict.fromkeys(("granular_grpo", "ddpo", "dpok", "pref_grpo"), ("[1e-4,1e-4]", "[1e-3,1e-3]")),
    **dict.fromkeys(("branch_grpo", "branch_grpo_mix"), ("[1e-3,1e-3]", "[1e-4,1e-4]")),
    "flow_grpo_fast": ("[1e-5,1e-5]", "[1e-4,1e-4]"),
    "grpo_guard": ("[2e-6,2e-6]", "[2e-5,2e-5]"),
    "prdp": ("1e-4", "1e-3"),
    "dgpo": ("1e-2", "1e-3"),
}


TWENTY = ["sampler.steps=20"]
BRANCH_20 = [*TWENTY, "algorithm.tree.splits=[0,3,6,9]"]
LONG = ["sampler.steps=25"]
MIX_25 = [*LONG, "algorithm.window.size=4", "algorithm.window.every=2"]
FLASH_25 = [*MIX_25, "algorithm.tail_count=code"]
FLASH_STAR_25 = [*FLASH_25, "algorithm.window.schedule=frozen", "algorithm.tail=0.2"]
DEPTH = ["algorithm.prune.depth=4", "algorithm.prune.every=3"]
SEEN = ["data.train=docs/results/few_prompts.jsonl", "data.eval=docs/results/few_prompts.jsonl"]
EARLY = [  # 8 noisy steps leave no picture
    "algorithm.plan=window",
    "algorithm.window.size=2",
    "algorithm.window.high=4",
    "optimizer.lr=1e-3",
]
PROXY = [  # the verifier is only read
    "reward=clip",
    "reward.clip.preset=shapes",
    "reward.shapes.weight=0",
]


HACKABLE = [  # the planted proxy of hacking.py, paid more: it can be climbed without the verifier
    "reward=scripts/bench/hacking.py:proxy",
    "reward.proxy.pay=30",
    "reward.shapes.weight=0",
]
ANCHORED = ["anchor.data.source=build/bench/scenes", "anchor.data.levels=own"]


class Claim(NamedTuple):
    """A run that a paper's claim needs."""

    method: str  # name of configs/algorithm
    words: list[str]  # settings beside those of the method's best run
    share: float  # of BUDGET
    world: str = WORLD  # whose prompts and verifier


def _fraction(share: str) -> list[str]:
    return [f"algorithm.timestep_fraction={share}"]


def _few_steps(method: str, counts: tuple[int, ...]) -> dict[str, Claim]:
    """Runs that sample with few steps, in training and in evaluation."""
    return {
        f"{method}_{t}_steps": Claim(method, [f"sampler.steps={t}", f"eval.steps={t}"], 1 / 3)
        for t in counts
    }


def _samplers(counts: tuple[int, ...]) -> dict[str, Claim]:
    """Runs of flow_grpo whose noisy steps are taken in three ways, at the noise of their papers."""
    ways = {
        "flow_sde": [],
        "precise": ["algorithm.sde=precise", "sampler.eta=1.5"],
        "cps": ["algorithm.sde=cps", "sampler.eta=0.8", "algorithm.clip=[1e-5,1e-5]"],
    }
    return {
        f"noise_{way}_{t}": Claim("flow_grpo", [f"sampler.steps={t}", *words], 1 / 3)
        for t in counts
        for way, words in ways.items()
    }


NOISY = _samplers((4, 8, 16))
READ = ["reward.preference.rounding=false"]  # the preference beside the verifier
GATE = [
    "reward.preference.weight=0",
    "algorithm.kl_gate.main=proxy",
    "algorithm.kl_gate.auxiliary=[preference]",
]
TEACHERS = {
    f"specialist_{name}": Claim("nft", [f"data.train=build/bench/{name}.jsonl"], 1 / 2)
    for name in SPECIALISTS
}
HACKED = {  # what keeps the held-out score where the trained one can be hacked
    "hacked_plain": Claim("nft", HACKABLE, 1 / 2),
    "hacked_kl": Claim("nft", [*HACKABLE, "algorithm.kl_weight=0.1"], 1 / 2),
    "hacked_gate": Claim("nft", [*HACKABLE, *GATE, "algorithm.kl_weight=0.1"], 1 / 2),
    "hacked_anchor": Claim("nft", [*HACKABLE, *ANCHORED, "anchor.data.weight=0.01"], 1 / 2),
    "hacked_anchor_more": Claim("nft", [*HACKABLE, *ANCHORED, "anchor.data.weight=0.1"], 1 / 2),
}
KL = "algorithm.kl_weight="
KLS = ("0", "1e-4", "1e-3", "1e-2", "1", "10")
UNET, EDIT, VIDEO = (["model=shapes-" + name] for name in ("sd", "edit", "wan"))
VIDEO += ["reward.shapes_motion.reading=partial"]  # of nine frames seldom all are right
# as in quickstart-video: at its rate nft without an anchor to the start ends below the start
ANCHORED_NFT = ["std=group", "decay=0", "kl_weight=1", "solver=euler", "steps=2"]
VIDEO_NFT = [*VIDEO, *(f"algorithm.{word}" for word in ANCHORED_NFT), "optimizer.lr=3e-3"]
# what `refl` climbs on shapes-sd3
OTHERS = ["~reward.preference", "~reward.shapes"]
# an edit has one right picture: how near a sample comes to it has a gradient, which no verifier has
NEAR = [f"data.{part}=build/bench/edits/{part}.jsonl" for part in ("train", "eval")]
NEAR += ["reward=reference", "reward.reference.folder=build/bench/edits"]
NEAR += ["reward.reference.metric=ssim", "reward.reference.rounding=false"]
NEAR += ["reward.shapes_edit.weight=0", *OTHERS]
# no verifier has a gradient: the preference model reads each frame beside the whole prompt
FRAMES = ["reward=video", "reward.video.reward=preference", "reward.video.frames=9"]
FRAMES += [
    f"reward.video.reward_settings.{word}" for word in ("rounding=false", "aspect=alignment")
]
FRAMES += ["reward.shapes_motion.weight=0", *OTHERS]
OTHER_MODELS = {  # what was tuned on shapes-sd3, as it is, for another embedded model
    **{f"unet_{m}": Claim(m, UNET, 2 / 3) for m in ("flow_grpo", "nft", "refl", "ddpo")},
    # at the rate of its quickstart
    "edit_nft": Claim("nft", [*EDIT, "optimizer.lr=1e-3"], 2 / 3, "shapes_edit"),
    **{f"edit_{m}": Claim(m, EDIT, 2 / 3, "shapes_edit") for m in ("flow_grpo", "ddpo")},
    "edit_refl": Claim("refl", [*EDIT, *NEAR], 2 / 3, "shapes_edit"),
    "video_nft": Claim("nft", VIDEO_NFT, 1, "shapes_motion"),
    # both pilots on training prompts lost, so a third of the budget has to do
    "video_refl": Claim("refl", ["model=shapes-wan", *FRAMES], 1 / 3, "shapes_motion"),
    # the two of its family that gained most on shapes-sd3 were looked at on training prompts, at a
    # third of the budget: tempflow_grpo gained there, tree_grpo lost
    **{f"video_{m}": Claim(m, VIDEO, 1, "shapes_motion") for m in ("flow_grpo", "tempflow_grpo")},
}
# Masked generators share no setting with the flows above, so that no tuning of theirs is read
# (what is set here was chosen on training prompts)
TOKENS = ["model=shapes-masked", "eval.solver=euler", "optimizer.lr=3e-3"]
REMASKED = ["optimizer.lr=1e-3", "algorithm.draws=8", "algorithm.kl_weight=0.1"]
MASKED = {
    f"masked_{method}": Claim(method, TOKENS + more, 2)
    for method, more in {
        "trace_rl": [],
        "diffu_grpo": [],
        "masked_ce": REMASKED,
        "unigrpo": [],
    }.items()
}
BEYOND = {  # against nft's own runs: what is trained, and on which prompts
    "text_alone": Claim("nft", ["train.parts=[text_encoder]"], 1),
    "text_too": Claim("nft", ["train.parts=[denoiser,text_encoder]"], 1),
    "bayes": Claim("nft", ["data.sampler.mode=bayes"], 1),
    "bandit": Claim("nft", ["data.sampler.mode=bandit", "data.sampler.tag=task"], 1),
    # the counting and position prompts of shapes:train
    "two_tasks": Claim("nft", ["data.train=docs/results/two_tasks.jsonl"], 1),
    # two rewards: the verifier has no gradient, the preference has one
    "verifier": Claim("nft", [*READ, "reward.preference.weight=0"], 1),
    "both_summed": Claim("nft", [*READ, "reward.preference.weight=1"], 1),
    "both_modes": Claim("nft", [*READ, "reward.preference.mode=grad", "gradient.scale=0.03"], 1),
    "preference_nft": Claim("nft", PREFERENCE, 1),
    "preference_tree": Claim("tree_grpo", PREFERENCE, 1),
    # how far from the base: by the weight of the KL while training, or by RLG's after it
    **{f"kl_{weight}": Claim("nft", [KL + weight], 1 / 2) for weight in KLS},
}
RLG = (0.5, 1.0, 1.5, 2.0, 3.0)  # weights at which a kl_* run is read
CLAIMS = {
    "dance_25_14": Claim("dance_grpo", [*LONG, *_fraction("0.5834")], 2),
    "dance_25_4": Claim("dance_grpo", [*LONG, *_fraction("0.1667")], 2),
    "mix_25_4": Claim("mix_grpo", MIX_25, 2),
    "flash_25_4": Claim("mix_grpo_flash", FLASH_25, 2),
    "flash_star_25_4": Claim("mix_grpo_flash", FLASH_STAR_25, 2),
    "dance_20_all": Claim("dance_grpo", [*TWENTY, *_fraction("1.0")], 2),
    "dance_20_0.6": Claim("dance_grpo", TWENTY, 2),
    "branch_20": Claim("branch_grpo", BRANCH_20, 2),
    "branch_20_depth": Claim("branch_grpo", [*BRANCH_20, *DEPTH], 2),
    "branch_20_width": Claim("branch_grpo", [*BRANCH_20, "algorithm.prune.width=parent"], 2),
    "branch_mix_20": Claim("branch_grpo_mix", [*BRANCH_20, "algorithm.window.size=4"], 2),
    "ddpo_few": Claim("ddpo", [*SEEN, *EARLY], 1 / 2),
    "dpok_few": Claim("dpok", [*SEEN, *EARLY], 1 / 2),
    "prdp_few": Claim("prdp", [*SEEN, *EARLY, "algorithm.beta=0.02"], 1 / 2),
    "pref_grpo_few": Claim("pref_grpo", [*SEEN, *EARLY, *_fraction("1")], 1 / 2),
    "ddpo_many": Claim("ddpo", EARLY, 1),
    "prdp_many": Claim("prdp", [*EARLY, "algorithm.beta=0.02"], 1),
    "raft_few": Claim(
        "raft", [*SEEN, "optimizer.lr=3e-4", "algorithm.top=2", "algorithm.steps=8"], 1
    ),
    "rwr_few": Claim("rwr", [*SEEN, "optimizer.lr=3e-4", "algorithm.temperature=0.2"], 1),
    **_few_steps("nft", (1, 2, 4)),
    **_few_steps("awm", (1, 2, 4)),
    **_few_steps("dgpo", (1, 2, 4)),
    **_few_steps("flow_grpo", (2, 4)),
    **_few_steps("dance_grpo", (2, 4)),
    **TEACHERS,
    "nft_fifth": Claim("nft", [], 0.11),  # three iterations, a sixth of Flow-GRPO's 18
    "proxy_points": Claim("mix_grpo_flash", PROXY, 2),
    "proxy_wins": Claim("mix_grpo_flash", [*PROXY, "algorithm.outcome=win_rate"], 2),
    **NOISY,
    **BEYOND,
    **HACKED,
    **OTHER_MODELS,
    **MASKED,
}
SEEDED = ("nft_fifth", "proxy_points", "proxy_wins")  # with three seeds
SEEDED += (*NOISY, *BEYOND, *HACKED, *OTHER_MODELS, *MASKED)
# three left it open, since they differ much: two more, decided on before they were run
FIVE = ("unet_flow_grpo", "masked_trace_rl", "masked_diffu_grpo")
MORE = dict.fromkeys(FIVE, (0, 1, 2, 3, 4))


class Search(NamedTuple):
    """The best of some samples of the untrained model, by a reward."""

    chooser: str  # the reward, as words of the command line name it
    samples: int  # of each prompt
    refined: bool = False  # whether the second sample is of a rephrased prompt and the same noise


STRICT = "shapes.reading=strict"
SEARCHES = {  # 28 samples of each of 348 prompts take about the calls of BUDGET
    "refine": Search(STRICT, 2, refined=True),
    "best_of_2": Search(STRICT, 2),
    "best_of_28": Search(STRICT, 28),
    "best_of_28_preference": Search("preference", 28),
}
TIMED_CLAIMS = [name for name, claim in CLAIMS.items() if {*TWENTY, *LONG} & {*claim.words}]
TIMED_CLAIMS += OTHER_MODELS  # whether a run is done in a quarter of an hour


def cell(
    method: str, words: list[str], *, seed: int, budget: int, kind: str, world: str = WORLD
) -> Cell:
    """A run to make: its name is a hash of what it is."""
    name = ALGORITHM.get(method, method)
    judged = [f"data={world}", f"reward={world}", f"reward.{world}.reading=strict"]
    settings = [f"algorithm={name}", *judged, *COMMON, *words_of(method), *words, f"seed={seed}"]
    digest = digest_of(tuple(settings), budget)
    return {
        "name": f"{kind}-{method}-{seed}-{digest}",
        "kind": kind,
        "method": method,
        "words": words,
        "settings": settings,
        "seed": seed,
        "budget": budget,
        **({} if world == WORLD else {"world": world}),
    }


def budget_of(method: str) -> int:
    """Network rows of a method's run, without those of the samples and teachers it starts from."""
    if method in SIXTH:  # each of its teachers took as much
        return BUDGET // 2
    return BUDGET - (DRAWN if method in FIFTH else 0)


def words_of(method: str) -> list[str]:
    """A method's own settings."""
    return (METHODS | CLIMBING).get(method, [])


@functools.cache
def digest_of(settings: tuple[str, ...], budget: int) -> str:
    """Hash what the resolved config sets apart from the schema, and the model's weights.

    Where a file of configs/, a value or a weight changes, a cell is another one.
    """
    cfg = load_config(None, settings)
    schema = algorithm_schema(cfg.algorithm["name"])
    stated = schema.model_validate(options_of(cfg.algorithm))
    options = stated.model_dump(mode="json", exclude_defaults=True)
    what = cfg.model_dump(mode="json", exclude_defaults=True)
    what |= {"algorithm": {"name": cfg.algorithm["name"], **options}}
    said = json.dumps([what, budget, weights(cfg.model.source)], sort_keys=True)
    said = said.replace(str(FOLDER.parents[1]), "")  # a file of this checkout, wherever it lies
    return hashlib.sha256(said.encode()).hexdigest()[:8]


@functools.cache
def weights(source: str = "package:flowrl.shapes/weights") -> str:
    """Digest of an embedded model, without the CLIP that lies beside shapes-sd3."""
    folder = WEIGHTS.parent / source.rpartition("/")[2]
    parts = ("transformer", "unet", "text_encoder", "text_encoder_2", "vae")
    files = sorted(path for part in parts for path in (folder / part).glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def path_of(c: Cell) -> Path:
    return FOLDER / "cells" / f"{c['name']}.json"


def result(c: Cell) -> Cell | None:
    return json.loads(path_of(c).read_text()) if path_of(c).exists() else None


def tuning(method: str) -> list[Cell]:
    """Cells of a method's tuning that can be named by now.

    The one with the other clip only once the best rate is known.
    """
    cells = [tune(method, [f"optimizer.lr={rate}"]) for rate in rates(method)]
    results = [result(c) for c in cells]
    if method in CLIPS and all(results):
        best = max(results, key=climbed)
        bound = "algorithm.trust.threshold" if method in FOURTH else "algorithm.clip"
        words = [*best["words"], f"{bound}={CLIPS[method][1]}"]
        cells.append(cell(method, words, seed=0, budget=budget_of(method) // 3, kind="tune"))
    return cells


def rates(method: str) -> list[str]:
    """Learning rates that a method's tuning tries, as far as they are known by now.

    Where the best of them is the lowest or the highest, the next one is tried too.
    """
    first, last = LADDER.index(RATES[0]), LADDER.index(RATES[-1])
    while True:
        tried = LADDER[first : last + 1]
        results = [result(tune(method, [f"optimizer.lr={rate}"])) for rate in tried]
        if not all(results):
            return tried
        best = first + results.index(max(results, key=climbed))
        if best == first > 0:
            first -= 1
        elif best == last < len(LADDER) - 1:
            last += 1
        else:
            return tried


def tune(method: str, words: list[str]) -> Cell:
    """A run that chooses: a third of the budget, on training prompts."""
    return cell(method, [*words, *TUNING], seed=0, budget=budget_of(method) // 3, kind="tune")


def world_of(c: Cell) -> str:
    return c.get("world", WORLD)


def score(r: Cell, when: str = "after") -> float:
    """Strict accuracy on held-out pictures, "before" or "after"."""
    return r[when][f"{world_of(r)}/strict"]["mean"]


def climbed(r: Cell) -> float:
    """What chooses a setting: the reward that was trained on."""
    return r["after"]["preference"]["mean"] if r["method"] in CLIMBING else score(r)


def finals(method: str, seeds: tuple[int, ...] = (0, 1, 2), kind: str = "run") -> list[Cell]:
    """The best setting of a finished tuning, for each seed.

    A third of the rate, for three times as many steps: Adam moves about rate x steps, and at the
    full rate, with the embedded weights of commit 5ec7cac, two of the best fell again after the
    rows that the rate was tuned on (nft, seed 1: from 0.460 to 0.256; dgpo, seed 1).
    """
    tried = tuning(method)
    results = [result(c) for c in tried]
    if not all(results) or len(tried) < len(rates(method)) + (method in CLIPS):
        return []
    rate, *clip = [word for word in max(results, key=climbed)["words"] if word not in TUNING]
    words = [f"optimizer.lr={float(rate.partition('=')[2]) / 3:.3g}", *clip]
    return [cell(method, words, seed=seed, budget=budget_of(method), kind=kind) for seed in seeds]


def claims(name: str, kind: str = "claim") -> list[Cell]:
    """The run of a claim, at its method's best setting if that was looked for."""
    method, words, share, world = CLAIMS[name]
    if name not in MASKED:
        best = finals(method)
        if not best:
            return []
        words = [*best[0]["words"], *words]
    if "_steps" in name and method in ("nft", "awm", "dgpo"):
        words += ["algorithm.steps=1", "algorithm.first=0", "algorithm.range=1.0"]
    seeds = MORE.get(name, (0, 1, 2) if name in SEEDED else (0,))
    what = {"budget": int(BUDGET * share), "kind": kind, "world": world}
    return [cell(method, words, seed=seed, **what) | {"claim": name} for seed in seeds]


def searches(name: str) -> list[Cell]:
    """The cells of a search, for each seed."""
    what = SEARCHES[name]._asdict()
    named = hashlib.sha256(json.dumps([what, weights()], sort_keys=True).encode()).hexdigest()[:8]
    return [
        {"name": f"search-{name}-{seed}-{named}", "kind": "search", "seed": seed, **what}
        for seed in (0, 1, 2)
    ]


def timing(name: str) -> list[Cell]:
    """A few iterations of what a method's or a claim's run does."""
    return (claims(name, kind="time") if name in CLAIMS else finals(name, kind="time"))[:1]
