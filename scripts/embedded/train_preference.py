"""Train a Bradley-Terry head on CLIP features of pairs of pictures, for the reward `preference`.

    python scripts/embedded/train_preference.py fit pairs.jsonl --out my_head \\
        --model ViT-L-14-quickgelu --pretrained openai
    flowrl train reward=preference reward.preference.weights=my_head \\
        reward.preference.aspect=quality

Draws pairs with shapes-sd3 and plays the annotator, then fits the head that flowrl ships:

    python scripts/embedded/train_preference.py shapes --work runs/preference
    python scripts/embedded/train_preference.py fit runs/preference/pairs.jsonl \\
        --out flowrl/shapes/weights/preference --hidden 16

A line of a pairs file is {"prompt": text, "a": path, "b": path, "<aspect>": preference, ...}. Paths
are relative to the file; a preference is the share of votes for a, from 0 to 1 (1: a is better, 0:
b), or "tie" for 0.5; every other key but "id" and "combination" names an aspect, and a pair may
lack some. Whole prompts are held out, a share of --held-out chosen by a hash of their text, or of
the text under "combination", which prompts that say the same in other words share. Accuracy is told
on them alone: over the pairs that are not ties, with a 95% interval that resamples them.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flowrl
from flowrl.data import media
from flowrl.rewards.networks.bradley_terry import Backbone, HeadConfig, ScoreHead, fit, save_head
from flowrl.runtime.statistics import mean_interval
from flowrl.shapes import prompts, verify
from flowrl.shapes.agreement import ERRORS, plant
from flowrl.shapes.scenes import render

FIELDS = ("prompt", "a", "b", "id", "combination")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """N pairs of pictures a and b."""

    prompts: list[str]  # of both pictures of a pair
    subjects: list[str]  # what a pair is about: all pairs of a subject are held out, or none
    a: list[Path]  # first pictures
    b: list[Path]  # second pictures
    aspects: list[str]  # what annotators were asked about
    preference: Tensor  # (N, aspects) share of votes for a in [0, 1]; NaN: nobody was asked


def read(path: Path, aspects: Sequence[str] = ()) -> Pairs:
    """A pairs file; aspects: those to read (none given: all that occur).

    A line that is not a pair -> ValueError with its number.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(_checked(json.loads(line), path.parent))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    chosen = _chosen(path, rows, aspects)
    preference = torch.tensor([[row.get(aspect, math.nan) for aspect in chosen] for row in rows])
    columns = {"prompts": "prompt", "subjects": "combination", "a": "a", "b": "b"}
    values = {name: [row[key] for row in rows] for name, key in columns.items()}
    return Pairs(**values, aspects=chosen, preference=preference)


def _chosen(path: Path, rows: list[dict[str, Any]], aspects: Sequence[str]) -> list[str]:
    """The aspects to read, all of which the file has."""
    found = list(dict.fromkeys(key for row in rows for key in row if key not in FIELDS))
    if missing := [aspect for aspect in aspects if aspect not in found]:
        raise ValueError(f"{path} has no aspect {missing}; it has {found}")
    if not rows or not found:
        raise ValueError(
            f'{path} has {len(rows)} pairs and no aspect; a line is {{"prompt": ..., "a": ..., "b":'
            ' ..., "quality": 1}'
        )
    return list(aspects) or found


def _checked(row: Any, folder: Path) -> dict[str, Any]:
    """What a line holds: prompt, combination, paths of a and b, a number for each aspect."""
    texts = [row.get(key) for key in ("prompt", "a", "b")] if isinstance(row, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f'{row!r} is not a pair; write {{"prompt": "a cat", "a": "1.png", "b": "2.png",'
            ' "quality": 1}'
        )
    subject = row["prompt"] if row.get("combination") is None else row["combination"]
    if not isinstance(subject, str):
        raise ValueError(
            f"combination={subject!r} is not a text; give all prompts that say the same one text,"
            " or leave it out"
        )
    out: dict[str, Any] = {"prompt": row["prompt"], "combination": subject}
    for side in ("a", "b"):
        out[side] = folder / row[side]
        if not out[side].is_file():
            raise ValueError(f'"{side}": there is no picture {out[side]}')
    given = {key: v for key, v in row.items() if key not in FIELDS and v is not None}
    return out | {aspect: _share(aspect, value) for aspect, value in given.items()}


def _share(aspect: str, value: Any) -> float:
    """The share of votes for a."""
    number = 0.5 if value == "tie" else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
        raise ValueError(
            f"{aspect}={value!r} is not a preference; give the share of votes for a, from 0 to 1,"
            ' or "tie"'
        )
    return float(number)


def held_out(subject: str, share: float) -> bool:
    """By a hash, so that a subject stays on its side whatever else the file holds."""
    digest = hashlib.sha256(f"held out: {subject}".encode()).digest()
    return int.from_bytes(digest[:4]) < share * 2**32


@torch.no_grad()
def embed(backbone: Backbone, paths: Sequence[Path], chunk: int = 64) -> dict[Path, Tensor]:
    """Each picture once: path -> (width,). Pictures of one size go through the network together."""
    out: dict[Path, Tensor] = {}
    unique = list(dict.fromkeys(paths))
    for start in range(0, len(unique), chunk):
        by_size = defaultdict(list)
        for path in unique[start : start + chunk]:
            image = media.read_image(path)
            by_size[image.shape].append((path, image))
        for members in by_size.values():
            vectors = backbone.pictures(torch.stack([image for _, image in members]))
            out |= {path: vector for (path, _), vector in zip(members, vectors, strict=True)}
    return out


def train(args: argparse.Namespace) -> None:
    """Fit on the prompts that are not held out, measure on those that are, save."""
    pairs = read(args.pairs, args.aspects)
    test = torch.tensor([held_out(subject, args.held_out) for subject in pairs.subjects])
    decided = ~pairs.preference.isnan() & (pairs.preference != 0.5)  # (N, aspects)
    _check_sides(args, pairs, decided, test)
    backbone = Backbone(args.model, args.pretrained)
    source = {"model": args.model, "pretrained": args.pretrained, "width": backbone.width}
    config = HeadConfig(aspects=pairs.aspects, features=args.features, hidden=args.hidden, **source)
    torch.manual_seed(args.seed)
    head = ScoreHead(config)
    a, b = _inputs(head, backbone, pairs)
    fit(head, a[~test], b[~test], pairs.preference[~test], l2=args.l2)
    with torch.no_grad():
        right = ((head(a) > head(b)) == (pairs.preference > 0.5)).double()
    notes: dict[str, Any] = {
        "pairs": len(test),
        "pairs_held_out": int(test.sum()),
        "prompts": len(set(pairs.prompts)),
    }
    for k, aspect in enumerate(pairs.aspects):
        notes[aspect] = _accuracy(aspect, right[:, k], decided[:, k], test, pairs.subjects)
    save_head(head, config.model_copy(update={"notes": notes}), args.out)
    print(f"wrote {args.out}")


def _check_sides(args: argparse.Namespace, pairs: Pairs, decided: Tensor, test: Tensor) -> None:
    """Each aspect has decided pairs on both sides of the split."""
    for side, name in ((test, "held out"), (~test, "left to train on")):
        there = (decided & side[:, None]).any(0).tolist()
        thin = [aspect for aspect, some in zip(pairs.aspects, there, strict=True) if not some]
        if thin:
            count, share = len(set(pairs.subjects)), args.held_out
            raise ValueError(
                f"{args.pairs}, {count} prompts, --held-out {share}: no decided pair of {thin} is"
                f" {name}; give more prompts"
            )


def _inputs(head: ScoreHead, backbone: Backbone, pairs: Pairs) -> list[Tensor]:
    """What the head reads of pictures a, and of pictures b."""
    pictures = embed(backbone, [*pairs.a, *pairs.b])
    with torch.no_grad():
        text = backbone.prompts(pairs.prompts, "cpu")
    sides = (torch.stack([pictures[path] for path in side]) for side in (pairs.a, pairs.b))
    return [head.inputs(side, text) for side in sides]


def _accuracy(
    aspect: str, right: Tensor, decided: Tensor, test: Tensor, subjects: list[str]
) -> dict[str, float]:
    """How often an aspect's decided pairs are predicted; printed, and kept beside the head."""
    rows = torch.nonzero(decided & test).flatten().tolist()
    held = mean_interval(right[rows], groups=[subjects[i] for i in rows])
    training = float(right[decided & ~test].mean())
    low, high = held.ci
    print(
        f"{aspect}: {held.mean:.1%} of {held.n} held-out pairs (95%: {low:.1%} to {high:.1%}),"
        f" {training:.1%} in training"
    )
    shares = {"accuracy": held.mean, "low": low, "high": high, "accuracy_in_training": training}
    return {"decided_pairs": held.n} | {name: round(value, 4) for name, value in shares.items()}


def draw(args: argparse.Namespace) -> None:
    """Six pictures a prompt, and what a simulated annotator says of every pair of them.

    Two by shapes-sd3 without guidance (often pale), two with it, a rendered scene, and that scene
    with one planted error. Two aspects with known utilities u (`utilities`): P(a is preferred) =
    sigmoid((u(a) - u(b)) / temperature), as Bradley and Terry have it; a tie where they are equal.
    """
    g = torch.Generator().manual_seed(args.seed)
    chosen = _prompts(args.prompts, g)
    (args.work / "pictures").mkdir(parents=True, exist_ok=True)
    generated = _generated(chosen, args)
    lines, agree = [], defaultdict(list)
    # all pairs of a prompt's pictures, in a random order of a and b: an annotator has no side
    for n, prompt in enumerate(chosen):
        pictures = torch.cat([generated[n], rendered(prompt, g)])
        names = [f"pictures/{n:04d}-{i}.png" for i in range(len(pictures))]
        for picture, name in zip(pictures, names, strict=True):
            media.save(picture, args.work / name)
        worth = utilities(pictures, prompt["include"])
        text = {key: prompt[key] for key in ("prompt", "combination")}
        for pair in itertools.combinations(range(len(pictures)), 2):
            i, j = pair if torch.rand((), generator=g) < 0.5 else pair[::-1]
            gaps = {aspect: u[i] - u[j] for aspect, u in worth.items()}
            votes = {"a": names[i], "b": names[j], **_votes(gaps, g)}
            lines.append(json.dumps(text | votes))
            for aspect, gap in gaps.items():
                agree[aspect] += [votes[aspect] == (gap > 0)] if gap else []
    (args.work / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    shares = (f"{aspect} {sum(x) / len(x):.1%} of {len(x)}" for aspect, x in agree.items())
    print(
        f"wrote {len(lines)} pairs to {args.work / 'pairs.jsonl'}; the utilities themselves agree"
        f" with the votes in: {', '.join(shares)}"
    )


def _prompts(count: int, g: torch.Generator) -> list[dict[str, Any]]:
    """Training prompts of the shapes world, tasks in its shares."""
    every = [p for p in prompts.all_prompts() if not prompts.held_out(p)]
    tasks = Counter(p["task"] for p in every)
    weights = torch.tensor([prompts.SHARES[p["task"]] / tasks[p["task"]] for p in every])
    return [every[i] for i in torch.multinomial(weights, count, generator=g).tolist()]


def _generated(chosen: list[dict[str, Any]], args: argparse.Namespace) -> Tensor:
    """(P, 4, 3, H, W): two pictures of each prompt without guidance, two with it."""
    policy = flowrl.load_policy("shapes-sd3")
    texts = [p["prompt"] for p in chosen for _ in range(2)]
    halves = [
        flowrl.generate(policy, texts, steps=args.steps, guidance=w, seed=args.seed)
        for w in ("none", "pipeline")
    ]
    of_prompt = [half.view(len(chosen), 2, *half.shape[1:]) for half in halves]
    return torch.stack(of_prompt, 1).flatten(1, 2)


def _votes(gaps: dict[str, float], g: torch.Generator) -> dict[str, float | str]:
    """What the annotator says of a pair whose utilities differ by these gaps."""
    votes: dict[str, float | str] = {}
    for aspect, gap in gaps.items():
        chance = 1 / (1 + math.exp(-gap / TEMPERATURE[aspect]))
        vote = float(torch.rand((), generator=g) < chance)
        votes[aspect] = vote if gap else "tie"
    return votes


def rendered(prompt: dict[str, Any], g: torch.Generator) -> Tensor:
    """(2, 3, H, W): a scene of the prompt, and the same with one of the errors that apply."""
    truth = prompts.scene(prompt, g)
    wrong = [found for error in ERRORS if (found := plant(prompt, truth, error, g)) is not None]
    drawn = wrong[int(torch.randint(len(wrong), (), generator=g))]
    return torch.stack([render(truth), render(drawn)])


TEMPERATURE = {"alignment": 0.1, "vivid": 0.05}


def utilities(pictures: Tensor, include: list[dict[str, Any]]) -> dict[str, list[float]]:
    """What the annotator sees in (n, 3, H, W) pictures of one prompt.

    alignment: mean of the verifier's two readings. vivid: mean depth of the ink (1 - the darkest
    channel) where there is some.
    """
    rounded = media.to_uint8(pictures).float() / 255
    found = verify.detect(rounded)
    depth = 1 - rounded.amin(1)
    inked = depth > 0.15
    vivid = (depth * inked).flatten(1).sum(1) / inked.flatten(1).sum(1).clamp(min=1)
    alignment = [(verify.partial(o, include) + verify.strict(o, include)) / 2 for o in found]
    return {"alignment": alignment, "vivid": vivid.tolist()}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = out.add_subparsers(dest="command", required=True)
    add_fit(commands.add_parser("fit", help="train a head on a pairs file").add_argument)
    two = commands.add_parser(
        "shapes", help="draw pairs with shapes-sd3, labelled by known utilities"
    )
    two.add_argument("--work", type=Path, default=Path("runs/preference"))
    two.add_argument("--prompts", type=int, default=600)
    two.add_argument("--steps", type=int, default=8, help="denoising steps")
    two.add_argument("--seed", type=int, default=0)
    return out


def add_fit(add: Callable[..., object]) -> None:
    features = ["image", "product", "text"]
    add("pairs", type=Path)
    add("--out", type=Path, required=True, help="folder to write")
    add("--model", default="shapes", help="a CLIP, as reward.clip.model; shapes: the embedded one")
    add("--pretrained", help="its weights, as reward.clip.pretrained")
    add("--aspects", nargs="*", default=[], help="those to train on; default: all in the file")
    add("--features", nargs="+", default=features[:2], choices=features)
    add("--hidden", type=int, default=0, help="width of a hidden layer; 0: linear")
    add("--l2", type=float, default=0.003, help="weight of the penalty on squared weights")
    add("--held-out", type=float, default=0.2, help="share of prompts that accuracy is measured on")
    add("--seed", type=int, default=0)


def main(words: list[str] | None = None) -> None:
    commands = parser()
    args = commands.parse_args(words)
    try:
        train(args) if args.command == "fit" else draw(args)
    except ValueError as error:
        commands.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
