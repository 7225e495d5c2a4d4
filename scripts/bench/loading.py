"""What loading a pipeline and its self-check cost, against a run of four steps of two prompts.

    python scripts/bench/loading.py [NAME ...]

NAME: a case of tests/helpers/zoo; default: CASES below. For each network, the rows that it computes
in loading and in the self-check, as a multiple of those of the run: denoisers are allowed 3 in all.
Text encoders compute each prompt once: those of the run, and where that settles the length of
texts, one more. Exit code 1 beyond.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor, nn

import flowrl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from zoo import cases  # noqa: E402

CASES = [
    "sd15",
    "sdxl",
    "sd3",
    "flux",
    "qwenimage",
    "wan21",
    "wan22",
    "ltx",
    "hyvideo",
    "qwen_edit",
]
MOST = 3.0


@contextlib.contextmanager
def counted(parts: dict[str, nn.Module]) -> Iterator[Counter[str]]:
    """Rows by part, while inside: of the first layer in it that sees one vector a row (a denoiser's
    time) or one list of tokens a row."""
    rows: Counter[str] = Counter()
    watched: dict[str, nn.Module] = {}
    hooks = []
    for name, part in parts.items():
        for layer in part.modules():
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue

            def count(layer: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                flat = isinstance(args[0], Tensor) and args[0].ndim == 2
                if flat and watched.setdefault(name, layer) is layer:
                    rows[name] += len(args[0])

            hooks.append(layer.register_forward_pre_hook(count))
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def costs(name: str) -> dict[str, tuple[float, float]]:
    """(rows of load, rows of check) of each network over those of a run."""
    case = cases()[name]
    pipe = case.make()
    parts = {k: part for k, part in pipe.components.items() if isinstance(part, nn.Module)}
    example = case.conditions[0] if case.conditions else None
    with counted(parts) as loaded:
        policy: Any = flowrl.load_policy(pipe, example=example, **case.call)
    with counted(parts) as checked:
        policy.self_check()
    runner = policy.prober.runner
    runner.answers.clear()
    with counted(parts) as once:
        for items in policy.prober.apart(policy.prober.record):
            runner.run(items, 4)
    return {k: (loaded[k] / own, checked[k] / own) for k, own in once.items()}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names or CASES
    os.environ["HF_HUB_OFFLINE"] = "1"
    out = Table("case", "network", "load", "self-check", "both", box=None)
    beyond = False
    for name in names:
        for network, (load, check) in costs(name).items():
            out.add_row(name, network, f"{load:.2f}", f"{check:.2f}", f"{load + check:.2f}")
            beyond |= load + check > MOST
    from flowrl.cli.common import show

    show(out)
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
