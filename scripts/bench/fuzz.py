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
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import fuzz_cases
import torch
from fuzz_cases import Case
from rich.table import Table

from flowrl.cli.common import show
from flowrl.cli.main import app
from flowrl.policy import load as policy_load
from flowrl.rewards.core.reward import reward_class
from flowrl.runtime import registry
from flowrl.runtime.text import visible
from flowrl.training import loop

OURS = r'File ".*/(flowrl|rewards|samplers)/.*", line'  # of a traceback
CONTROLS = frozenset(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E]))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int  # negative: the signal that ended it
    output: str
    seconds: float

    def problem(self, most: float) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.seconds >= most:
            return f"it hangs: {self.seconds:.0f} s"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if found := CONTROLS & set(self.output):
            return f"raw control characters {sorted(found)!r}"
        if self.code and not any(
            line.startswith(("flowrl: ", "Usage: ")) for line in self.output.splitlines()
        ):
            return "no sentence"
        return ""


@dataclass
class Row:
    """Of the table: cases of one kind."""

    codes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failures: int = 0


def warm() -> None:
    """Import everything, and load the model once for all copies of this process."""
    torch.set_num_threads(1)
    for name in registry.choices("flowrl.rewards"):
        reward_class(name)
    policy_load._pretrained = functools.cache(policy_load._pretrained)
    source, _ = policy_load.resolve_source("shapes-sd3")
    policy_load._pretrained(source, torch.float32)


def tried(case: Case, folder: Path, *, seconds: float, gigabytes: float, train: bool) -> Outcome:
    """Run a case in a copy of this process."""
    folder.mkdir()
    case.prepare(folder)
    began, out = time.perf_counter(), folder.with_suffix(".out")
    child = os.fork()
    if child == 0:
        os._exit(_inside(case.words, folder, out, gigabytes=gigabytes, train=train))
    code = _wait(child, seconds)
    took, text = time.perf_counter() - began, out.read_text(errors="replace")
    shutil.rmtree(folder, ignore_errors=True)
    out.unlink()
    return Outcome(code=code, output=text, seconds=took)


def _inside(words: list[str], folder: Path, out: Path, *, gigabytes: float, train: bool) -> int:
    """In the copy: the command line, its output in a file -> exit code."""
    handle = os.open(out, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.chdir(folder)
    limit = _address_space() + int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if not train:
        loop.Trainer.run = _not_trained
    code = 3
    try:
        app(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _not_trained(trainer: loop.Trainer) -> None:
    raise SystemExit(0)


def _address_space() -> int:
    """Bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _wait(child: int, seconds: float) -> int:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def cases(args: argparse.Namespace, place: Path) -> Iterator[tuple[Case, bool]]:
    """Every case, and whether its run is trained."""
    for number in range(args.start, args.start + args.configs):
        yield fuzz_cases.config_case(args.seed, number), False
    if args.folders:
        run = place / "run"
        made = Case(name="the run", words=["train", *fuzz_cases.TINY, f"output={run}"])
        outcome = tried(made, place / "making", seconds=600, gigabytes=args.gigabytes, train=True)
        assert outcome.code == 0, outcome.output
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
            limits = {"seconds": args.seconds, "gigabytes": args.gigabytes}
            outcome = tried(case, Path(place) / "case", train=train, **limits)
            row = rows.setdefault(case.name.split()[0], Row())
            row.codes.append(outcome.code)
            row.seconds.append(outcome.seconds)
            if problem := outcome.problem(args.seconds):
                row.failures += 1
                _report(case, outcome, problem)
            elif args.only:
                print(visible(outcome.output))
    _conclude(rows)


def _report(case: Case, outcome: Outcome, problem: str) -> None:
    last = (outcome.output.strip().splitlines() or [""])[-1]
    places = [line for line in outcome.output.splitlines() if re.search(OURS, line)]
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
