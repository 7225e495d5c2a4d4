"""Whether `flowrl check --reward` finds faults, and leaves sound rewards alone.

    python scripts/bench/planted_faults.py [--examples 16]

Twelve faults are planted in three verifiers that read prompts, and every shipped reward that loads
without a network, files or a server is tried as it is. A fault is caught, and a sound reward is a
false alarm, where the check would end with exit code 1. The goals are 36 of 36 and no false alarm;
the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

from planted import FAULTS, ShapesGeneval, faulty, verifiers

from flowrl.rewards import Reward, load
from flowrl.rewards.checks.check import check
from flowrl.rewards.checks.examples import Example, fits
from flowrl.rewards.judge.reward import JudgeReward
from flowrl.runtime.registry import choices

SETTINGS = {  # rewards under other settings than their own, that then load anywhere
    "shapes": [{"reading": "partial"}, {"reading": "strict"}],
    "clip": [{"preset": "shapes"}],
    "checklist": [{"questions": "shapes"}],
    "sharpness": [{"reading": "laplacian"}],
    "saturation": [{"reading": "clipped"}],
    "ensemble": [{"members": {"shapes": 1.0, "preference": 1.0}}],
    "rank": [{"reward": "shapes"}, {"reward": "preference"}],
    "video": [
        {"reward": "preference"},
        {"reward": "clip", "reward_settings": {"preset": "shapes"}},
    ],
    "win_rate": [{"judge": "preference"}, {"judge": "shapes"}],
}
GENEVAL = ("partial", "partial_fixed", "strict", "official")


def failures(reward: Reward, examples: list[Example]) -> list[str]:
    """Names of the checks that fail."""
    return [f.name for f in check(reward, examples, device="cpu") if f.verdict == "fail"]


def sound(count: int) -> Iterator[tuple[str, Reward, list[Example]]]:
    """Every shipped reward that runs here, with its settings, and what it is tried on."""
    for reading in GENEVAL:
        stub = f"geneval reading={reading}, objects found by the verifier of shapes"
        yield stub, ShapesGeneval(reading), ShapesGeneval.examples(count)
    for name in choices("flowrl.rewards"):
        for settings in ({}, *SETTINGS.get(name, [])):
            title = " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
            try:
                reward = load(name, **settings)
                if isinstance(reward, JudgeReward):
                    raise ValueError("it asks a server")
                examples = fits(reward, count=min(count, 6) if name == "ocr" else count)
            except ValueError as error:
                print(f"  not tried: {title}: {str(error)[:100]}", flush=True)
            else:
                yield title, reward, examples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=16, help="pictures for each check")
    count = parser.parse_args().examples
    print("faults")
    caught = 0
    for name, (reward, examples) in verifiers(count).items():
        for fault in FAULTS:
            failed = failures(faulty(reward, fault), examples)
            caught += bool(failed)
            said = f"caught by {failed[0]}" if failed else "MISSED"
            print(f"  {name}, {fault}: {said}", flush=True)
    print("sound rewards")
    alarms = 0
    for title, reward, examples in sound(count):
        failed = failures(reward, examples)
        alarms += bool(failed)
        print(f"  {title}: {'FALSE ALARM of ' + ', '.join(failed) if failed else 'passes'}")
    total = len(verifiers(2)) * len(FAULTS)
    print(f"caught {caught} of {total}, false alarms {alarms}")
    return int(caught < total or alarms > 0)


if __name__ == "__main__":
    raise SystemExit(main())
