"""Named models and rewards at their real sizes, with random weights, through the command line.

    python scripts/bench/real_size.py                  # all; --output holds weights and results
    python scripts/bench/real_size.py --only sd1.5     # one
    python scripts/bench/real_size.py --minutes 10     # of each, what begins in that time
    python scripts/bench/real_size.py --table          # what --output knows; runs nothing

Each model is a folder as save_pretrained writes it (real_folder.py), with its shipped config: type,
guidance, LoRA and memory settings. Pictures are as small as the classes allow, and so are batches
(real_cases.py); a network that 20 GB cannot hold has fewer blocks of the real width, as the table
says. Parts (real_parts.py): check, budget, two iterations of flow_grpo, evaluated without and with
guidance, a third after a resume, two of nft and of sft, evaluate, generate, and the LoRA in plain
diffusers, whose denoiser must answer as the run's does. Rewards (real_rewards.py) score eight
pictures, and pickscore trains SD1.5 for an iteration. Each case is a process; a part that passed is
in OUTPUT/results.jsonl and is not run again; what was said is in OUTPUT/CASE/log.txt. Prints
Markdown.
Exit code 1 where a part failed, rows are not the budget's, or a peak is more than 15% above it.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from pathlib import Path

from real_cases import METHODS, MODELS, Place
from real_rewards import REWARDS

HERE = Path(__file__).resolve().parent
NEAR = 0.15  # a peak may be so much above the budget's, relative
HEAD = (
    "model",
    "blocks",
    "core seconds of check, flow_grpo, nft, all",
    "rows of an iteration",
    "encoder calls",
    "peak, GB",
    "budget, GB",
)
SCORES = ("reward", "core seconds of eight pictures", "scores", "and of an iteration of SD1.5")


def run(place: Place, *, keep: bool, minutes: float) -> bool:
    """The parts of a case that have not passed, in a process -> whether none failed."""
    argv = [sys.executable, str(HERE / "real_parts.py"), place.name, str(place.results.parent)]
    argv.append(str(minutes))
    code = subprocess.run(argv, check=False).returncode
    if code not in (0, 1):  # killed: its parts could not say why
        place.note(
            "process", passed=False, why=f"it ended with exit code {code}", seconds=0.0, cpu=0.0
        )
    if code == 0 and not keep:
        shutil.rmtree(place.folder / "weights", ignore_errors=True)
    return code == 0


def missed(place: Place) -> list[str]:
    """What is not as it should be, in words."""
    known = place.known()
    found = [f"{key}: {line['why']}" for key, line in known.items() if not line["passed"]]
    for method in METHODS if "budget" in known else ():
        plan, own = known["budget"].get(method), known.get(method, {})
        if not plan or not own.get("passed"):
            continue
        if own["rows"] != plan["rows"]:
            found.append(f"{method}: rows are {own['rows']}, and the budget says {plan['rows']}")
        if own["gb"] > (1 + NEAR) * plan["gb"]:
            found.append(f"{method}: {own['gb']:.2f} GB, and the budget says {plan['gb']:.2f}")
    return found


def row(place: Place) -> str:
    """A row of the table of models."""
    known = place.known()
    failed = any(not line["passed"] for line in known.values())
    if failed or "lora" not in known:
        left = "not all passed" if failed else f"passed: {', '.join(known)}; others were not run"
        return f"| {place.name} | {MODELS[place.name].said} | {left} |" + " |" * 4
    runs, plan = [known[method] for method in METHODS], known["budget"]
    seconds = [known[key]["cpu"] for key in ("check", *METHODS)]
    seconds.append(sum(line["cpu"] for line in known.values()))
    cells = [
        place.name,
        MODELS[place.name].said,
        ", ".join(f"{value:.0f}" for value in seconds),
        ", ".join(str(sum(own["rows"].values())) for own in runs),
        ", ".join(str(own["encoder_calls"]) for own in runs),
        ", ".join(f"{own['gb']:.2f}" for own in runs),
        ", ".join(f"{plan[method]['gb']:.2f}" for method in METHODS),
    ]
    return f"| {' | '.join(cells)} |"


def scores(place: Place) -> str:
    """A row of the table of rewards."""
    known = place.known()
    if any(not line["passed"] for line in known.values()) or "score" not in known:
        return f"| {place.name} | not all passed | | |"
    found, train = known["score"], known.get("train", {})
    seconds = f"{train['cpu']:.0f}" if train else ""
    both = f"{found['low']:.4g} to {found['high']:.4g}"
    return f"| {place.name} | {found['cpu']:.0f} | {both} | {seconds} |"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--only", action="append", choices=[*MODELS, *REWARDS], help="once for each"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/real"))
    parser.add_argument("--keep", action="store_true", help="weights of what passed")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of a case, after which no part is begun"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    given = parser.parse_args()
    output = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    results = output / "results.jsonl"
    names = given.only or [*MODELS, *REWARDS]
    places = [Place(name=name, folder=output / name, results=results) for name in names]
    passed = [given.table or run(place, keep=given.keep, minutes=given.minutes) for place in places]
    models = [row(place) for place in places if place.name in MODELS]
    rewards = [scores(place) for place in places if place.name in REWARDS]
    for head, rows in ((HEAD, models), (SCORES, rewards)):
        if rows:
            print("\n".join([f"| {' | '.join(head)} |", "|-" * len(head) + "|", *rows, ""]))
    problems = [f"{place.name} {why}" for place in places for why in missed(place)]
    print(*problems, sep="\n", file=sys.stderr)
    sys.exit(bool(problems) or not all(passed))


if __name__ == "__main__":
    main()
