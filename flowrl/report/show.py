"""Media with scores, trees of rollouts and reports, as a notebook shows them below a cell."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from flowrl.data.media import encoded, from_pil, spaced
from flowrl.report import grids, run_page
from flowrl.report.render import Markup, render
from flowrl.runtime.store import files
from flowrl.runtime.store.run_folder import read
from flowrl.types import Rewards, Rollout, expand

FRAMES, MS = 48, 125  # most frames of a video that are shown, and milliseconds of each
LEVELS = 10  # most noise levels of a tree that are drawn
TAKEN = "give pictures (B, 3, H, W) or videos (B, F, 3, H, W) with values in [0, 1]"
CHUNK = 8  # states of a tree that go through the networks together


@dataclass(frozen=True)
class CellOutput:
    """Pictures that a notebook shows where they are the last line of a cell."""

    html: Markup  # holds the pictures, too

    def __repr__(self) -> str:
        return "CellOutput(a notebook shows it; .save('page.html') writes a page)"

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> Path:
        """Write a page for a browser, whatever the ending of the path."""
        return files.write(Path(path), self.html)


def show(
    media: Any, scores: Any = None, prompts: Sequence[str] | None = None, *, cell: int = 160
) -> CellOutput:
    """Show pictures (B, 3, H, W), (B, H, W, 3) or one of them, or videos (B, F, 3, H, W), each with
    its score and prompt below.

    media: a tensor or an array in [0, 1] or of bytes, or PIL's pictures. scores: B numbers, or what
    `flowrl.score` returns. cell: pixels a side of each. ValueError for what cannot be shown.
    """
    media = as_media(media)
    listed = score_texts(scores)
    for name, column in (("scores", listed), ("prompts", prompts)):
        if column is not None and len(column) != len(media):
            raise ValueError(f"{len(media)} samples but {len(column)} {name}; give one each")
    return sheet(media, listed, prompts, cell=cell)


def sheet(media: Tensor, *below: Sequence[str] | None, cell: int) -> CellOutput:
    """Lay out drawable media (B, *D) with their scores and prompts below."""
    columns = [column or [""] * len(media) for column in below]
    samples = list(zip(sources(media, cell), *columns, strict=True))
    return CellOutput(render("shown.html", samples=samples, cell=cell))


def as_media(given: Any) -> Tensor:
    """Turn media as `show` takes them into a tensor (B, *D); ValueError for others."""
    given, wrong = [given] if isinstance(given, Image.Image) else given, ""
    of_pil = isinstance(given, list) and given and isinstance(given[0], Image.Image)
    media = from_pil(given) if of_pil else numbers(given, "media")
    in_bytes = media.dtype == torch.uint8
    media = media.cpu() / 255 if in_bytes else media.detach().float().cpu()
    # three axes of numbers are motions (B, T, D); of bytes they are one picture
    if media.shape[-1:] == (3,) != media.shape[-3:-2] and media.ndim > 3 - in_bytes:
        media = media.movedim(-1, -3)
    media = media[None] if media.ndim == 3 and len(media) == 3 else media
    if not media.numel() or not grids.drawable(media):
        wrong = f"has shape {tuple(media.shape)}"
    elif bad := (~media.isfinite()).flatten(1).any(1).nonzero().flatten().tolist():
        wrong = f"has NaN or infinite values at {bad}"
    elif media.ndim > 3 and (media.min() < -0.01 or media.max() > 1.01):
        wrong = f"spans [{media.min():.3g}, {media.max():.3g}]"
    if wrong:
        raise ValueError(f"media {wrong}; {TAKEN}")
    return media


def numbers(given: Any, what: str) -> Tensor:
    """Make a tensor of numbers, or of a list of tensors of one shape; ValueError for others."""
    try:
        parts = [torch.as_tensor(one) for one in given] if isinstance(given, list) else None
        return torch.stack(parts) if parts else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what}: a {type(given).__name__} is no numbers ({error})") from None


def score_texts(scores: Any) -> list[str] | None:
    """Write scores as `show` takes them; NaN becomes "no score"."""
    if scores is None:
        return None
    values = numbers(scores.total if isinstance(scores, Rewards) else scores, "scores").flatten()
    return ["no score" if value != value else f"{value:.3g}" for value in values.tolist()]


def sources(media: Tensor, cell: int) -> list[str]:
    """Write each sample (B, *D) as the source of an <img>; a video moves."""
    moments = media[:, spaced(media.shape[1], FRAMES)].unbind(1) if media.ndim == 5 else [media]
    out = []
    for first, *more in zip(*(grids.thumbnails(moment, cell) for moment in moments), strict=True):
        moves = {"append_images": more, "save_all": True, "duration": MS, "loop": 0}
        data = encoded(first, ".webp", lossless=not more, **(moves if more else {}))
        out.append(f"data:image/webp;base64,{base64.b64encode(data).decode()}")
    return out


@torch.no_grad()
def show_tree(
    policy: Any, rollout: Rollout, scores: Any = None, *, prompt: int = 0, cell: int = 64
) -> CellOutput:
    """Draw how the samples of one prompt came to be, noise on the left, a row a sample.

    A state at noise level sigma is shown as the sample that it points to, x - sigma v, by the
    policy as it is now. At most ten of the stored levels are drawn. scores: of all samples of the
    rollout, as `show` takes them. prompt: its number in the rollout.
    """
    own = (rollout.group == prompt).nonzero().flatten().tolist()
    if not own:
        raise ValueError(f"prompt={prompt}; the rollout has 0 to {int(rollout.group.max())}")
    texts, sigma = score_texts(scores), rollout.state_sigma.tolist()
    below = {int(rollout.leaf[i]): texts[i] for i in own} if texts else {}
    paths = [path_of(rollout, sample) for sample in own]
    levels = sorted({sigma[state] for path in paths for state in path}, reverse=True)
    levels = [levels[i] for i in spaced(len(levels), LEVELS)]
    rows: dict[int, list[int]] = {}  # state -> rows of the samples that came from it
    steps = set()
    for row, path in enumerate(paths):
        drawn = [state for state in path if sigma[state] in levels]
        steps |= set(zip(drawn, drawn[1:], strict=False))
        for state in drawn:
            rows.setdefault(state, []).append(row)
    # a state that several samples share lies in the middle of their rows
    at = {state: (levels.index(sigma[state]), sum(r) / len(r)) for state, r in rows.items()}
    parts = torch.tensor(list(at), device=rollout.prompt.device).split(CHUNK)
    media = torch.cat([estimates(policy, rollout, part) for part in parts])
    captions = [below.get(state, f"sigma {sigma[state]:.2f}") for state in at]
    nodes = list(zip(sources(media, cell), captions, at.values(), strict=True))
    lines = [(at[start], at[end]) for start, end in steps]
    sizes = {"columns": len(levels), "rows": len(own), "cell": cell}
    return CellOutput(render("tree.svg", nodes=nodes, lines=lines, **sizes))


def path_of(rollout: Rollout, sample: int) -> list[int]:
    """Find the stored states that led to a sample, the noisiest first, itself last."""
    path, edge = [int(rollout.leaf[sample])], int(rollout.leaf_edge[sample])
    while edge >= 0:
        path += [int(rollout.dst[edge]), int(rollout.src[edge])]
        edge = int(rollout.parent[edge])
    return list(dict.fromkeys(path))[::-1]


def estimates(policy: Any, rollout: Rollout, rows: Tensor) -> Tensor:
    """Decode the samples that states (n,) point to -> media (n, *D) on the CPU."""
    x, sigma = rollout.at(rows).to(policy.device), rollout.state_sigma[rows]
    own, cond = rollout.prompt[rows], rollout.cond
    v = policy.velocity(x, sigma, cond, own, guidance=rollout.guidance)
    return policy.decode(x - expand(sigma, x).to(x) * v, 0.0, cond, own).cpu()


def framed(run: Path, template: str = "run.html") -> Markup:
    """Put the report of a run, or its head (head.html), into a frame: its styles reach nothing
    else."""
    return render("frame.html", page=run_page.page(read(Path(run), spare=True), template))
