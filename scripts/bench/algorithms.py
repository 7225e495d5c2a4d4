"""One table of what each algorithm buys: same model, prompts, reward, LoRA and budget; a queue that
can stop and go on at any time.

    python scripts/bench/algorithms.py tune   [METHOD ...]   learning rate, then clip: one seed, a
    third of the budget
    python scripts/bench/algorithms.py run    [METHOD ...]   the best setting, three seeds for the
    first tier, one for the others
    python scripts/bench/algorithms.py claims [CLAIM ...]    runs that the papers' claims need
    beside those
    python scripts/bench/algorithms.py time   [NAME ...]     seconds a row of each method and claim,
    alone on the machine
    python scripts/bench/algorithms.py table                 docs/results.md and its plots, from the
    cells that are there

A cell is one run, in docs/results/cells/NAME.json; a cell that is there is not run again. The
budget counts network rows: forward of
the rollout and of references 1, forward and backward of a trained row 3. --workers 2 runs two cells
side by side, one thread each. The seconds of the table are rows times the seconds a row that `time`
measured, which takes no --workers: keep the machine free for it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"
BUDGET = 75_000  # network rows
MARKS = (1 / 6, 1 / 3, 2 / 3)  # shares of it after which a run is evaluated on its way
TIMED = 4  # iterations of a timing; the first is left out
COMMON = [
    "model=shapes-sd3",
    "data=shapes",
    "reward=shapes",
    "reward.shapes.reading=strict",
    "sampler.steps=8",
    "sampler.guidance=none",
    "batch.prompts=8",
    "batch.group=16",
    "batch.micro=128",
    "batch.decode=128",
    "ema.decay=0.8",
    "ema.every=1",
    "eval.images=348",
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
WINDOW = [
    "algorithm.window.size=2",
    "algorithm.window.every=4",
]  # of 8 steps, about the share that 4 of 25 are, and the same travel
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
    "awm": FORWARD,
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
METHODS = FIRST | SECOND
TUNING = ["data.eval=shapes:train", "eval.seed=1"]  # what chooses a setting is no test of it
RATES = ["1e-3", "3e-3", "1e-2"]
LOWER = {
    "raft": ["3e-4", "1e-4"],
    "rwr": ["3e-4", "1e-4"],
}  # plain flow matching, which the higher rates ruin
LOGGED = (
    "reward/total",
    "policy/kl",
    "policy/winner_gain",
    "policy/grad_norm",
    "policy/clip_fraction",
    "time/overhead_fraction",
)
CLIPS = {  # the paper's first; none: the method does not clip, or its clip cannot act
    **dict.fromkeys(
        ("flow_grpo", "dance_grpo", "mix_grpo", "mix_grpo_flash", "tree_grpo", "tempflow_grpo"),
        ("[1e-4,1e-4]", "[1e-3,1e-3]"),
    ),
    **dict.fromkeys(("granular_grpo", "ddpo", "dpok", "pref_grpo"), ("[1e-4,1e-4]", "[1e-3,1e-3]")),
    **dict.fromkeys(("branch_grpo", "branch_grpo_mix"), ("[1e-3,1e-3]", "[1e-4,1e-4]")),
    "flow_grpo_fast": ("[1e-5,1e-5]", "[1e-4,1e-4]"),
    "grpo_guard": ("[2e-6,2e-6]", "[2e-5,2e-5]"),
    "prdp": ("1e-4", "1e-3"),
    "dgpo": ("1e-3", "1e-2"),
}


TWENTY = ["sampler.steps=20"]
BRANCH_20 = [*TWENTY, "algorithm.tree.splits=[0,3,6,9]"]
LONG = ["sampler.steps=25"]
MIX_25 = [*LONG, "algorithm.window.size=4", "algorithm.window.every=2"]
FLASH_25 = [*MIX_25, "algorithm.tail_count=code"]
SEEN = ["data.train=docs/results/few_prompts.jsonl", "data.eval=docs/results/few_prompts.jsonl"]
EARLY = [
    "algorithm.plan=window",
    "algorithm.window.size=2",
    "algorithm.window.high=4",
    "optimizer.lr=1e-3",
]  # 8 noisy steps leave no picture
PROXY = [
    "reward=clip",
    "reward.clip.preset=shapes",
    "reward.shapes.weight=0",
]  # the verifier is only read
CLAIMS: dict[str, tuple[str, list[str], float]] = {  # name -> (method, words, share of the budget)
    "dance_25_14": ("dance_grpo", [*LONG, "algorithm.timestep_fraction=0.5834"], 2),
    "dance_25_4": ("dance_grpo", [*LONG, "algorithm.timestep_fraction=0.1667"], 2),
    "mix_25_4": ("mix_grpo", MIX_25, 2),
    "flash_25_4": ("mix_grpo_flash", FLASH_25, 2),
    "flash_star_25_4": (
        "mix_grpo_flash",
        [*FLASH_25, "algorithm.window.schedule=frozen", "algorithm.tail=0.2"],
        2,
    ),
    "dance_20_all": ("dance_grpo", [*TWENTY, "algorithm.timestep_fraction=1.0"], 2),
    "dance_20_0.6": ("dance_grpo", TWENTY, 2),
    "branch_20": ("branch_grpo", BRANCH_20, 2),
    "branch_20_depth": (
        "branch_grpo",
        [*BRANCH_20, "algorithm.prune.depth=4", "algorithm.prune.every=3"],
        2,
    ),
    "branch_20_width": ("branch_grpo", [*BRANCH_20, "algorithm.prune.width=parent"], 2),
    "branch_mix_20": ("branch_grpo_mix", [*BRANCH_20, "algorithm.window.size=4"], 2),
    "ddpo_few": ("ddpo", [*SEEN, *EARLY], 1 / 2),
    "dpok_few": ("dpok", [*SEEN, *EARLY], 1 / 2),
    "prdp_few": ("prdp", [*SEEN, *EARLY, "algorithm.beta=0.02"], 1 / 2),
    "pref_grpo_few": ("pref_grpo", [*SEEN, *EARLY, "algorithm.timestep_fraction=1"], 1 / 2),
    "ddpo_many": ("ddpo", EARLY, 1),
    "prdp_many": ("prdp", [*EARLY, "algorithm.beta=0.02"], 1),
    "raft_few": ("raft", [*SEEN, "optimizer.lr=3e-4", "algorithm.top=2", "algorithm.steps=8"], 1),
    "rwr_few": ("rwr", [*SEEN, "optimizer.lr=3e-4", "algorithm.temperature=0.2"], 1),
    **{
        f"{m}_{t}_steps": (m, [f"sampler.steps={t}", f"eval.steps={t}"], 1 / 3)
        for m in ("nft", "awm", "dgpo")
        for t in (1, 2, 4)
    },
    **{
        f"{m}_{t}_steps": (m, [f"sampler.steps={t}", f"eval.steps={t}"], 1 / 3)
        for m in ("flow_grpo", "dance_grpo")
        for t in (2, 4)
    },
    "nft_fifth": ("nft", [], 0.11),  # three iterations, a sixth of Flow-GRPO's 18
    "proxy_points": ("mix_grpo_flash", PROXY, 2),
    "proxy_wins": ("mix_grpo_flash", [*PROXY, "algorithm.outcome=win_rate"], 2),
}
SEEDED = ("nft_fifth", "proxy_points", "proxy_wins")  # with three seeds
TIMED_CLAIMS = [name for name, (_, words, _) in CLAIMS.items() if {*TWENTY, *LONG} & {*words}]


def cell(method: str, words: list[str], *, seed: int, budget: int, kind: str) -> dict[str, Any]:
    """A run to make: its name is a hash of what it is."""
    settings = [f"algorithm={method}", *COMMON, *METHODS.get(method, []), *words, f"seed={seed}"]
    digest = digest_of(tuple(settings), budget)
    return {
        "name": f"{kind}-{method}-{seed}-{digest}",
        "kind": kind,
        "method": method,
        "words": words,
        "settings": settings,
        "seed": seed,
        "budget": budget,
    }


@functools.cache
def digest_of(settings: tuple[str, ...], budget: int) -> str:
    """Of what the resolved config sets apart from the schema: where a file of configs/ or a value
    changes, a cell is another one."""
    from flowrl.config.load import load_config
    from flowrl.config.schema import algorithm_schema

    cfg = load_config(None, settings)
    schema = algorithm_schema(cfg.algorithm["name"])
    options = schema.model_validate(
        {k: v for k, v in cfg.algorithm.items() if k != "name"}
    ).model_dump(mode="json", exclude_defaults=True)
    what = cfg.model_dump(mode="json", exclude_defaults=True) | {
        "algorithm": {"name": cfg.algorithm["name"], **options}
    }
    return hashlib.sha256(json.dumps([what, budget], sort_keys=True).encode()).hexdigest()[:8]


def path_of(c: dict[str, Any]) -> Path:
    return FOLDER / "cells" / f"{c['name']}.json"


def result(c: dict[str, Any]) -> dict[str, Any] | None:
    return json.loads(path_of(c).read_text()) if path_of(c).exists() else None


def tuning(method: str) -> list[dict[str, Any]]:
    """Cells of a method's tuning that can be named by now: the other clip only once the best rate
    is known."""
    cells = [
        cell(method, [f"optimizer.lr={rate}", *TUNING], seed=0, budget=BUDGET // 3, kind="tune")
        for rate in rates(method)
    ]
    results = [result(c) for c in cells]
    if method in CLIPS and all(results):
        best = max(results, key=score)
        other = [*best["words"], f"algorithm.clip={CLIPS[method][1]}"]
        cells.append(cell(method, other, seed=0, budget=BUDGET // 3, kind="tune"))
    return cells


def rates(method: str) -> list[str]:
    return RATES + LOWER.get(method, [])


def score(r: dict[str, Any]) -> float:
    return r["after"]["shapes/strict"]["mean"]


def finals(
    method: str, seeds: tuple[int, ...] = (0, 1, 2), kind: str = "run"
) -> list[dict[str, Any]]:
    """The best setting of a finished tuning, for each seed; the second tier has seed 0 alone.

    A third of the rate, for three times as many steps: Adam moves about rate x steps, and at the
    full rate the best of them fell
    again after the rows that the rate was tuned on (cells run-nft-1-c7005d47, from 0.460 to 0.256,
    and run-dgpo-1-9d3f79f6).
    """
    tried = tuning(method)
    results = [result(c) for c in tried]
    if not all(results) or len(tried) < len(rates(method)) + (method in CLIPS):
        return []
    rate, *clip = [word for word in max(results, key=score)["words"] if word not in TUNING]
    words = [f"optimizer.lr={float(rate.partition('=')[2]) / 3:.3g}", *clip]
    return [
        cell(method, words, seed=seed, budget=BUDGET, kind=kind)
        for seed in seeds
        if method in FIRST or seed == 0
    ]


def claims(name: str, kind: str = "claim") -> list[dict[str, Any]]:
    """The run of a claim, at its method's best setting."""
    method, words, share = CLAIMS[name]
    best = finals(method)
    if not best:
        return []
    few = (
        ["algorithm.steps=1", "algorithm.first=0", "algorithm.range=1.0"]
        if "_steps" in name and method in ("nft", "awm", "dgpo")
        else []
    )
    seeds = (0, 1, 2) if name in SEEDED else (0,)
    words = [*best[0]["words"], *words, *few]
    return [
        cell(method, words, seed=seed, budget=int(BUDGET * share), kind=kind) | {"claim": name}
        for seed in seeds
    ]


def timing(name: str) -> list[dict[str, Any]]:
    """A few iterations of what a method's or a claim's run does."""
    return (claims(name, kind="time") if name in CLAIMS else finals(name, kind="time"))[:1]


def train(c: dict[str, Any]) -> dict[str, Any]:
    """Run a cell in this process until its budget is spent, or the iterations of a timing are."""
    from flowrl.config.load import load_config
    from flowrl.training.loop import Trainer

    load = round(os.getloadavg()[0], 2)  # before the start: what else was running
    with tempfile.TemporaryDirectory() as folder:
        whole = c["kind"] in ("run", "claim")  # tuning looks at the end only, a timing never
        trainer = Trainer(
            load_config(None, [*c["settings"], f"output={folder}/run", f"eval.at_start={whole}"])
        )
        curve: list[dict[str, float]] = []
        spent = {"calls": 0.0, "rows": 0.0, "seconds": 0.0}
        marks = [c["budget"] * share for share in MARKS if whole]
        for it in trainer:
            m = it.metrics
            spent["calls"] += (
                m["nfe/rollout"] + m.get("nfe/reference", 0) + 3 * m.get("nfe/update", 0)
            )
            spent["rows"] += m["policy/rows"]
            spent["seconds"] += m["time/iteration"]
            point = {"iteration": it.number, **{k: round(v, 1) for k, v in spent.items()}}
            point |= {k: float(f"{m[k]:.4g}") for k in LOGGED if k in m}
            if marks and spent["calls"] >= marks[0]:
                marks = [x for x in marks if x > spent["calls"]]
                read = trainer._evaluate("", trainer.cfg.eval.guidance)
                point["strict"] = read.mean("shapes/strict")
                point |= {"proxy": read.mean("clip")} if "clip" in read.values else {}
            curve.append(point)
            if (
                it.number == TIMED if c["kind"] == "time" else spent["calls"] >= c["budget"]
            ) or trainer.stopped:
                break
        origin = {
            "machine": machine() | {"load": load},
            "commit": commit(),
            "spent": spent,
            "curve": curve,
            "stopped": trainer.stopped,
        }
        if c["kind"] == "time":
            return c | origin
        trainer._evaluate("after", trainer.cfg.eval.guidance)
        record = json.loads((Path(folder) / "run" / "evaluation.json").read_text())
        rows = {r["name"]: r for r in record["rows"]}
    return {
        **c,
        **origin,
        "before": rows["before"]["metrics"] if whole else None,
        "after": rows["after"]["metrics"],
        "paired": record.get("paired"),
        "tasks": rows["after"]["tasks"],
        "images": marks_of(rows["after"]),
        "images_before": marks_of(rows["before"]) if whole else None,
    }


def marks_of(row: dict[str, Any]) -> str:
    """Right (1), wrong (0) or missing (.) of each held-out image."""
    return "".join("." if v is None else str(int(v)) for v in row["values"]["shapes/strict"])


def machine() -> dict[str, Any]:
    import torch

    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    return run.stdout.strip() or "unknown"


def start(c: dict[str, Any], workers: int) -> str:
    """Run a cell in a process of its own, with its share of the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    env = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "cell", json.dumps(c)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=FOLDER.parents[1])
    if done.returncode:
        return (
            f"{c['name']} FAILED:"
            f" {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
        )
    return f"{c['name']} {done.stdout.strip().splitlines()[-1]}"


def work(cells_of: Any, methods: list[str], workers: int) -> None:
    """Run every cell that `cells_of(method)` names and that is missing, until it names no more."""
    tried: set[str] = set()
    while True:
        cells = [c for m in methods for c in cells_of(m)]
        todo = [c for c in cells if not path_of(c).exists() and c["name"] not in tried]
        if not todo:
            if not cells:
                print("no cell can be named yet: `tune` comes first")
            elif not tried:
                print(
                    f"all {len(cells)} cells are there; to run one again, remove it:"
                    f" {path_of(cells[0])}"
                )
            return
        tried |= {c["name"] for c in todo}
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for line in pool.map(lambda c: start(c, workers), todo):
                print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["tune", "run", "claims", "time", "table", "cell"])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of `run`")
    args = parser.parse_args()
    if args.what == "cell":
        c = json.loads(args.words[0])
        out = train(c)
        path_of(c).parent.mkdir(parents=True, exist_ok=True)
        path_of(c).write_text(json.dumps(out, indent=None, separators=(",", ":")) + "\n")
        read = f"strict {score(out):.3f} after " if "after" in out else ""
        print(f"{read}{len(out['curve'])} iterations, {out['spent']['seconds']:.0f} s")
        return
    known = (
        [*METHODS, *TIMED_CLAIMS]
        if args.what == "time"
        else list(CLAIMS if args.what == "claims" else METHODS)
    )
    methods = args.words or known
    if unknown := set(methods) - set(known):
        parser.error(f"unknown {sorted(unknown)[0]}; there are {', '.join(known)}")
    if args.what == "tune":
        work(tuning, methods, args.workers)
    elif args.what == "run":
        work(functools.partial(finals, seeds=tuple(args.seeds)), methods, args.workers)
    elif args.what == "claims":
        work(claims, methods, args.workers)
    elif args.what == "time":
        work(timing, methods, workers=1)
    else:
        import results_page

        results_page.write()


if __name__ == "__main__":
    main()
