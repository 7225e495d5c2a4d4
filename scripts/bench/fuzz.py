"""Whether wrong configs and damaged run folders end in one sentence.

    python scripts/bench/fuzz.py [--configs 1000] [--folders 300] [--seed 0] [--only "words 17"]

Each case is a command line in a copy of this warmed process, in an empty folder, with at most
--seconds and --gigabytes. It passes with exit code 0, or with 1 or 2 and sentences that begin with
"flowrl: " (or the usage that a wrong option gets): no traceback, no hang, no death by a signal, and
no control character on the terminal. Failures are printed, then a table; exit code 1 if there were
any. A run that is built is not trained, except where a damaged folder is resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import fuzz_cases
import torch
from forked import Ended, Forked
from fuzz_cases import Case
from rich.table import Table

from flowrl.cli.common import show
from flowrl.policy import load as policy_load
from flowrl.rewards.core.reward import reward_class
from flowrl.runtime import registry
from flowrl.runtime.text import visible
from flowrl.training import loop

OURS = r'File ".*/(flowrl|rewards|samplers)/.*", line'  # of a traceback


@dataclass
class Row:
    """A row of the table: what became of the cases of one kind."""

    codes: list[int | None] = field(default_factory=list)  # exit codes, as Ended has them
    seconds: list[float] = field(default_factory=list)  # from start to end of each
    failures: int = 0  # cases that ended wrongly


def warm() -> None:
    """Import everything, and load the model once for all copies of this process."""
    torch.set_num_threads(1)
    for name in registry.choices("flowrl.rewards"):
        reward_class(name)
    policy_load._pretrained = functools.cache(policy_load._pretrained)
    source, _ = policy_load.resolve_source("shapes-sd3")
    policy_load._pretrained(source, torch.float32)


def tried(case: Case, folder: Path, args: argparse.Namespace, *, train: bool) -> Ended:
    """Run a case in a copy of this process, in a folder of its own that is removed."""
    folder.mkdir()
    case.prepare(folder)
    limits = functools.partial(limited, folder, gigabytes=args.gigabytes, train=train)
    printed = folder.with_suffix(".out")
    ended = Forked(case.words, printed, limits).wait(args.seconds)
    shutil.rmtree(folder, ignore_errors=True)
    printed.unlink()
    return ended


@contextlib.contextmanager
def limited(folder: Path, *, gigabytes: float, train: bool) -> Iterator[None]:
    """In the copy: work in this folder, with no more memory; train: iterate, too."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if not train:
        loop.Trainer.run = _not_trained
    with contextlib.chdir(folder):
        yield


def _not_trained(trainer: loop.Trainer) -> None:
    raise SystemExit(0)


def cases(args: argparse.Namespace, place: Path) -> Iterator[tuple[Case, bool]]:
    """Every case, and whether its run is trained."""
    for number in range(args.start, args.start + args.configs):
        yield fuzz_cases.config_case(args.seed, number), False
    if args.folders:
        run = place / "run"
        made = Case(name="the run", words=["train", *fuzz_cases.TINY, f"output={run}"])
        ended = tried(made, place / "making", args, train=True)
        assert ended.code == 0, ended.text
        for number in range(args.start, args.start + args.folders):
            yield fuzz_cases.folder_case(args.seed, number, run), True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--folders", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=120, help="most of a case")
    parser.add_argument("--gigabytes", type=float, default=4, help="most of a case, beside its own")
    parser.add_argument("--only", help="run these alone, and print what they say")
    args = parser.parse_args()
    warm()
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as place:
        for case, train in cases(args, Path(place)):
            if args.only and not f"{case.name} ".startswith(f"{args.only} "):
                continue
            ended = tried(case, Path(place) / "case", args, train=train)
            row = rows.setdefault(case.name.split()[0], Row())
            row.codes.append(ended.code)
            row.seconds.append(ended.seconds)
            if problems := ended.wrong():
                row.failures += 1
                _report(case, ended, problems[0])
            elif args.only:
                print(visible(ended.text))
    _conclude(rows)


def _report(case: Case, ended: Ended, problem: str) -> None:
    last = (ended.text.strip().splitlines() or [""])[-1]
    places = [line for line in ended.text.splitlines() if re.search(OURS, line)]
    last += "".join(f" ({place.strip()})" for place in places[-1:])
    words = " ".join(word for word in case.words if word not in fuzz_cases.TINY)
    print(f"{case.name}: {problem}: {visible(last)[:300]}  |  {visible(words)[:200]}", flush=True)


def _conclude(rows: dict[str, Row]) -> None:
    table = Table("kind", "cases", "exit 0", "exit 1", "exit 2", "failures", "longest, s")
    for kind, row in rows.items():
        counts = (len(row.codes), *map(row.codes.count, (0, 1, 2)), row.failures)
        table.add_row(kind, *map(str, counts), f"{max(row.seconds):.1f}")
    show(table)
    failures = sum(row.failures for row in rows.values())
    print(f"{failures} failures of {sum(len(row.codes) for row in rows.values())} cases")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
