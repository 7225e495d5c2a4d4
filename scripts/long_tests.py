"""Write tests/long.txt: the tests that `make test` leaves to `make long`, so that it takes minutes.

    make test long PYTEST_MORE="--durations=0 --durations-min=0.05" | tee suite.log
    python scripts/long_tests.py suite.log

The tests that take least stay in `make test`, and of each file one at least, until --seconds of all
workers are spent. What a fixture of a file takes is counted with each test that waited for it.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests/long.txt"
LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/\S+\.py::.+)")


def seconds_of(log: str) -> dict[str, float]:
    """Test -> seconds of its set-up, call and end, of those that a log of pytest names."""
    found: dict[str, float] = defaultdict(float)
    for line in log.splitlines():
        if match := LINE.match(line.strip()):
            found[match[2]] += float(match[1])
    return dict(found)


def chosen(seconds: dict[str, float], budget: float) -> list[str]:
    """Tests for `make long`, sorted: all that follow, shortest first, after the budget is spent."""
    files: dict[str, str] = {}  # file -> the shortest of its tests
    ordered = sorted(seconds, key=lambda test: (seconds[test], test))
    for test in ordered:
        files.setdefault(test.partition("::")[0], test)
    spent = sum(seconds[test] for test in files.values())
    left = []
    for test in ordered:
        if test in files.values():
            continue
        spent += seconds[test]
        if spent > budget:
            left.append(test)
    return sorted(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="output of pytest with --durations=0")
    parser.add_argument("--seconds", type=float, default=900, help="of all workers, for make test")
    args = parser.parse_args()
    seconds = seconds_of(args.log.read_text())
    left = chosen(seconds, args.seconds)
    LIST.write_text("".join(f"{test}\n" for test in left))
    print(f"{sum(seconds.values()):.0f} s in {len(seconds)} tests; {len(left)} are long, with")
    print(f"{sum(seconds[test] for test in left):.0f} s")


if __name__ == "__main__":
    main()
