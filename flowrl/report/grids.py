"""Grids of pictures with captions, and pairs of before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.data.media import to_pil

INK, FAINT, PAPER = (31, 35, 40), (110, 118, 129), (255, 255, 255)


def grid(
    media: Tensor,
    captions: Sequence[str] | None = None,
    *,
    verdicts: Sequence[bool | None] | None = None,
    columns: int = 8,
    cell: int = 128,
) -> Image.Image:
    """B images as a contact sheet, a caption under each.

    media: (B, 3, H, W), or (B, F, 3, H, W) of which the middle frame is shown. verdicts: True and
    False draw a green or red edge.
    cell: pixels a side of one picture; whole-number enlargements keep small pictures crisp.
    """
    pictures = [_fit(picture, cell) for picture in to_pil(_stills(media))]
    if not pictures:
        raise ValueError("a grid needs at least one image")
    _check_lengths(len(pictures), captions=captions, verdicts=verdicts)
    columns = min(columns, len(pictures))
    font, pad, text = _font(cell), 8, _caption_height(cell, captions)
    rows = -(-len(pictures) // columns)
    sheet = Image.new(
        "RGB", (columns * (cell + pad) + pad, rows * (cell + text + pad) + pad), PAPER
    )
    for i, picture in enumerate(pictures):
        x, y = pad + (i % columns) * (cell + pad), pad + (i // columns) * (cell + text + pad)
        _paste(sheet, picture, (x, y), cell, None if verdicts is None else verdicts[i])
        if captions is not None:
            _write(sheet, captions[i], (x, y + cell + 4), cell, font)
    return sheet


def before_after(
    before: Tensor,
    after: Tensor,
    prompts: Sequence[str],
    *,
    verdicts: tuple[Sequence[bool | None], Sequence[bool | None]] | None = None,
    labels: tuple[str, str] = ("before", "after"),
    columns: int = 4,
    cell: int = 128,
) -> Image.Image:
    """Pairs side by side (same prompt, same noise), labelled, with the prompt under each pair.
    before, after: (B, 3, H, W)."""
    first, second = (
        [_fit(picture, cell) for picture in to_pil(_stills(media))] for media in (before, after)
    )
    if not first:
        raise ValueError("a before/after grid needs at least one pair")
    _check_lengths(len(first), after=second, prompts=prompts)
    for marks in verdicts or ():
        _check_lengths(len(first), verdicts=marks)
    columns = min(columns, len(first))
    font, pad, gap, text = _font(cell), 8, 24, _caption_height(2 * cell, prompts)
    head = font.size + 10
    wide, tall = 2 * cell + pad + gap, cell + text + pad
    rows = -(-len(first) // columns)
    sheet = Image.new("RGB", (columns * wide + gap, rows * tall + head + gap), PAPER)
    draw = ImageDraw.Draw(sheet)
    for c in range(columns):
        for side, label in enumerate(labels):
            x = gap + c * wide + side * (cell + pad) + cell / 2
            draw.text((x, 6), label, fill=FAINT if side == 0 else INK, font=font, anchor="ma")
    for i in range(len(first)):
        x, y = gap + (i % columns) * wide, head + (i // columns) * tall
        for side, pictures in enumerate((first, second)):
            _paste(
                sheet,
                pictures[i],
                (x + side * (cell + pad), y),
                cell,
                None if verdicts is None else verdicts[side][i],
            )
        _write(sheet, prompts[i], (x, y + cell + 4), 2 * cell + pad, font)
    return sheet


def _stills(media: Tensor) -> Tensor:
    return media[:, media.shape[1] // 2] if media.ndim == 5 else media


def _check_lengths(count: int, **columns: Sequence | None) -> None:
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise ValueError(f"{count} images but {len(column)} {name}; give one each")


def _fit(picture: Image.Image, cell: int) -> Image.Image:
    """Fit into cell x cell: whole-number enlargement without smoothing, or a smooth reduction."""
    long = max(picture.size)
    if long <= cell:
        factor = cell // long
        return picture.resize(
            (picture.width * factor, picture.height * factor), Image.Resampling.NEAREST
        )
    return picture.resize(
        (max(1, picture.width * cell // long), max(1, picture.height * cell // long)),
        Image.Resampling.LANCZOS,
    )


def _paste(
    sheet: Image.Image,
    picture: Image.Image,
    corner: tuple[int, int],
    cell: int,
    verdict: bool | None,
) -> None:
    x, y = corner[0] + (cell - picture.width) // 2, corner[1] + (cell - picture.height) // 2
    sheet.paste(picture, (x, y))
    if verdict is not None:
        colour = (26, 158, 92) if verdict else (214, 69, 65)
        ImageDraw.Draw(sheet).rectangle(
            (x - 2, y - 2, x + picture.width + 1, y + picture.height + 1), outline=colour, width=2
        )


def _font(cell: int) -> Any:
    return ImageFont.load_default(size=max(10, min(14, cell // 9)))


def _lines(text: str, width: int, font) -> list[str]:
    """Wrap at words to at most two lines; what does not fit ends in an ellipsis."""
    lines, words = [""], text.split()
    for word in words:
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > 2 or any(font.getlength(line) > width for line in lines):
        lines = lines[:2]
        while lines[-1] and font.getlength(lines[-1] + "...") > width:
            lines[-1] = lines[-1][:-1]
        lines[-1] += "..."
    return lines


def _caption_height(width: int, captions: Sequence[str] | None) -> int:
    font = _font(width)
    return (
        0
        if captions is None
        else 8 + (font.size + 3) * max(len(_lines(c, width, font)) for c in captions)
    )


def _write(sheet: Image.Image, text: str, corner: tuple[int, int], width: int, font) -> None:
    draw = ImageDraw.Draw(sheet)
    for n, line in enumerate(_lines(text, width, font)):
        draw.text((corner[0], corner[1] + n * (font.size + 3)), line, fill=INK, font=font)
