"""Grids of pictures, or of drawings of other media, with captions; pairs of before and after."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont
from torch import Tensor

from flowrl.data.media import media_kind, to_pil
from flowrl.report import plots
from flowrl.runtime.text import printable

INK, FAINT, PAPER = (31, 35, 40), (110, 118, 129), (255, 255, 255)
ACCEPTED, REFUSED = (26, 158, 92), (214, 69, 65)  # colours of edges, by the verdict of a verifier
PAD = 8  # pixels between pictures
GAP = 24  # pixels between pairs
ELLIPSIS, JOINER = "...", "\u200d"

Verdicts = Sequence[bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Equal cells in rows. Pairs are (x, y) in pixels."""

    columns: int  # cells in a row
    corner: tuple[int, int]  # corner of the first cell
    step: tuple[int, int]  # distance from a cell to the next

    def place(self, i: int) -> tuple[int, int]:
        """The corner of cell i."""
        row, column = divmod(i, self.columns)
        return self.corner[0] + column * self.step[0], self.corner[1] + row * self.step[1]

    def sheet(self, count: int, below: int = 0) -> Image.Image:
        """Paper for `count` cells, with a margin below them."""
        rows = -(-count // self.columns)
        width = self.corner[0] + self.columns * self.step[0]
        return Image.new("RGB", (width, self.corner[1] + rows * self.step[1] + below), PAPER)


def drawable(media: Tensor) -> bool:
    """Whether a grid can show media (B, *D): pictures, videos, paths and motions; see plots.py."""
    known = media_kind(media.shape) != "arrays" or plots.drawable(media.shape)
    return known and len(media) > 0


def grid(
    media: Tensor,
    captions: Sequence[str] | None = None,
    *,
    columns: int = 8,
    cell: int = 128,
) -> Image.Image:
    """Put B images on a contact sheet, a caption under each.

    media: (B, 3, H, W), or (B, F, 3, H, W) of which the middle frame is shown, or other media that
    are `drawable`. cell: pixels a side of one picture; whole-number enlargements keep small
    pictures crisp.
    """
    pictures = thumbnails(media, cell)
    count = len(pictures)
    if not count:
        raise ValueError("a grid needs at least one image")
    _check_lengths(count, captions=captions)
    step = cell + PAD, cell + _caption_height(cell, captions) + PAD
    layout = Layout(columns=min(columns, count), corner=(PAD, PAD), step=step)
    sheet, font = layout.sheet(count), _font(cell)
    for i, picture in enumerate(pictures):
        x, y = layout.place(i)
        _paste(sheet, picture, (x, y), cell)
        if captions is not None:
            _write(sheet, captions[i], (x, y + cell + 4), cell, font)
    return sheet


def before_after(
    before: Tensor,
    after: Tensor,
    prompts: Sequence[str],
    *,
    verdicts: tuple[Verdicts, Verdicts] | None = None,
    columns: int = 4,
    cell: int = 128,
) -> Image.Image:
    """Put pairs side by side (same prompt, same noise), labelled, with the prompt under each pair.

    before, after: (B, 3, H, W), or other media that are `drawable`, on one scale. verdicts: those
    of both sides; True and False draw a green or red edge.
    """
    count = len(before)
    if not count:
        raise ValueError("a before/after grid needs at least one pair")
    _check_lengths(count, after=after, prompts=prompts)
    both = thumbnails(torch.cat([before, after]), cell)
    sides = both[:count], both[count:]
    for marks in verdicts or ():
        _check_lengths(count, verdicts=marks)
    # the sheet has a row of labels, then pairs with their prompts
    font = _font(cell)
    tall = max(picture.height for picture in both)  # wide pictures leave no empty rows
    step = 2 * cell + PAD + GAP, tall + _caption_height(2 * cell, prompts) + PAD
    layout = Layout(columns=min(columns, count), corner=(GAP, _line_height(font) + 7), step=step)
    sheet = layout.sheet(count, below=GAP)
    _label_sides(sheet, layout, cell)
    for i, prompt in enumerate(prompts):
        x, y = layout.place(i)
        for side, pictures in enumerate(sides):
            verdict = None if verdicts is None else verdicts[side][i]
            corner = x + side * (cell + PAD), y - (cell - tall) // 2
            _paste(sheet, pictures[i], corner, cell, verdict)
        _write(sheet, prompt, (x, y + tall + 4), 2 * cell + PAD, font)
    return sheet


def _label_sides(sheet: Image.Image, layout: Layout, cell: int) -> None:
    """Write "before" and "after" above each column of pairs; the first one is faint."""
    draw, font = ImageDraw.Draw(sheet), _font(cell)
    for column in range(layout.columns):
        for side, (label, colour) in enumerate((("before", FAINT), ("after", INK))):
            middle = layout.place(column)[0] + side * (cell + PAD) + cell / 2
            draw.text((middle, 6), label, fill=colour, font=font, anchor="ma")


def _check_lengths(count: int, **columns: Sequence | Tensor | None) -> None:
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise ValueError(f"{count} images but {len(column)} {name}; give one each")


def thumbnails(media: Tensor, cell: int) -> list[Image.Image]:
    """Make media pictures that fit into cell x cell: images, the middle frame of videos, or
    drawings."""
    if plots.drawable(media.shape):
        return plots.drawings(media, cell)
    stills = media[:, media.shape[1] // 2] if media.ndim == 5 else media
    return [_fit(picture, cell) for picture in to_pil(stills)]


def _fit(picture: Image.Image, cell: int) -> Image.Image:
    """Enlarge by a whole number without smoothing, or reduce smoothly."""
    width, height = picture.size
    long = max(width, height)
    if long <= cell:
        factor = cell // long
        return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    size = max(1, width * cell // long), max(1, height * cell // long)
    return picture.resize(size, Image.Resampling.LANCZOS)


def _paste(
    sheet: Image.Image,
    picture: Image.Image,
    corner: tuple[int, int],
    cell: int,
    verdict: bool | None = None,
) -> None:
    """Put a picture in the middle of its cell, with an edge where there is a verdict."""
    x, y = corner[0] + (cell - picture.width) // 2, corner[1] + (cell - picture.height) // 2
    sheet.paste(picture, (x, y))
    if verdict is not None:
        edge = (x - 2, y - 2, x + picture.width + 1, y + picture.height + 1)
        colour = ACCEPTED if verdict else REFUSED
        ImageDraw.Draw(sheet).rectangle(edge, outline=colour, width=2)


# ---------------------------------------------------------------------------
# text


def _font(cell: int) -> FreeTypeFont:
    return cast(FreeTypeFont, ImageFont.load_default(size=max(10, min(14, cell // 9))))


def _line_height(font: FreeTypeFont) -> int:
    return int(font.size) + 3


def _lines(text: str, width: int, font: FreeTypeFont) -> list[str]:
    """Break a text into at most two lines of `width` pixels; what does not fit ends in an ellipsis.

    Lines end at spaces, or inside a word that is longer than a line.
    """
    # a letter is at least a pixel wide, so no more letters fit
    text = printable(text, max(width, len(ELLIPSIS)))
    first = _fitting(text, width, font)
    if first == text:
        return [text]
    space = text.rfind(" ", 0, len(first) + 1)
    word = text[space + 1 :].partition(" ")[0]
    if space > 0 and font.getlength(word) <= width:
        first = text[:space]
    second = text[len(first) :].strip()
    if font.getlength(second) > width:
        second = _fitting(second, width - font.getlength(ELLIPSIS), font).rstrip() + ELLIPSIS
    return [first, second]


def _fitting(text: str, width: float, font: FreeTypeFont) -> str:
    """The longest beginning of `width` pixels; accents and joined signs stay with their letter."""
    count = bisect_right(range(1, len(text) + 1), width, key=lambda n: font.getlength(text[:n]))
    while 0 < count < len(text) and (_joins(text[count]) or text[count - 1] == JOINER):
        count -= 1
    return text[:count]


def _joins(letter: str) -> bool:
    return letter == JOINER or unicodedata.category(letter).startswith("M")


def _caption_height(width: int, captions: Sequence[str] | None) -> int:
    """Room below a picture: that of the longest caption."""
    if captions is None:
        return 0
    font = _font(width)
    return 8 + _line_height(font) * max(len(_lines(c, width, font)) for c in captions)


def _write(
    sheet: Image.Image, text: str, corner: tuple[int, int], width: int, font: FreeTypeFont
) -> None:
    draw = ImageDraw.Draw(sheet)
    for n, line in enumerate(_lines(text, width, font)):
        draw.text((corner[0], corner[1] + n * _line_height(font)), line, fill=INK, font=font)
