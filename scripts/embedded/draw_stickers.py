"""Draw the pictures of the stickers world from Noto Emoji's vector sources.

    npm pack @iconify-json/noto@1.2.9          # 3 MB: the sources, under Apache-2.0
    pip install resvg-py==0.5.0                # draws SVG; flowrl itself does not need it
    python scripts/embedded/draw_stickers.py iconify-json-noto-1.2.9.tgz

It writes sprites.png and NOTICE to flowrl/scenes/stickers. Every drawing is cut to what it shows
and centred in a square tile of 56 px. With --contact sheet.png it also writes every object at the
smallest, a middle and the largest size on every background, each pixel three wide, to look at.
"""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowrl.scenes.stickers.scenes import (
    BACKGROUNDS,
    COLUMNS,
    OBJECTS,
    SHEET,
    SIZES,
    TILE,
    render,
)
from flowrl.scenes.world import PIXELS, Placed, Scene

ICONS = {  # object -> its name in the package, where that is another
    "cat": "cat-face",
    "dog": "dog-face",
    "ladybug": "lady-beetle",
    "apple": "red-apple",
    "cake": "birthday-cake",
    "car": "automobile",
}
FINE = 8 * TILE  # px, at which a drawing is made before it is reduced
NOTICE = """\
sprites.png in this folder holds pictures of Noto Emoji, Copyright Google LLC and the Noto Emoji
authors, https://github.com/googlefonts/noto-emoji (folder svg), as packed in the npm package
{package} {version}.

They are licensed under the Apache License, Version 2.0, a copy of which is in the file LICENSE of
this distribution and at http://www.apache.org/licenses/LICENSE-2.0. Nothing was taken from the Noto
font files, which are under another licence, and no flag is among the pictures.

Changes: scripts/embedded/draw_stickers.py drew the vector sources as pixels, cut each to what it
shows, centred it in a square and reduced it to {tile} x {tile} px.

The pictures, row by row, with their code points:

{table}
"""


def member(package: tarfile.TarFile, name: str) -> dict[str, Any]:
    """Read a JSON file of the npm package."""
    file = package.extractfile(f"package/{name}")
    assert file is not None, f"{name} is no file"
    return json.load(file)


def drawing(icons: dict[str, Any], name: str) -> Image.Image:
    """Draw an icon, RGBA with colour times alpha, cut to a square around what it shows."""
    import resvg_py  # a tool of this script alone

    icon = icons["icons"][name]
    width, height = (icon.get(side, icons[side]) for side in ("width", "height"))
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' viewBox="0 0 {width} {height}" width="{FINE}" height="{FINE}">{icon["body"]}</svg>'
    )
    image = Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg)))).convert("RGBA")
    shown = image.crop(image.getchannel("A").point(lambda a: 255 * (a >= 8)).getbbox())
    side = max(shown.size)
    square = Image.new("RGBA", (side, side))
    square.paste(shown, ((side - shown.width) // 2, (side - shown.height) // 2))
    return square.convert("RGBa")


def sheet(icons: dict[str, Any]) -> Image.Image:
    """All objects in their tiles."""
    out = Image.new("RGBA", (COLUMNS * TILE, -(-len(OBJECTS) // COLUMNS) * TILE))
    for i, name in enumerate(OBJECTS):
        tile = drawing(icons, ICONS.get(name, name)).resize((TILE, TILE), Image.Resampling.BOX)
        out.paste(tile.convert("RGBA"), (i % COLUMNS * TILE, i // COLUMNS * TILE))
    return out


def notice(package: tarfile.TarFile) -> str:
    """What the licence asks to say about the pictures."""
    points: dict[str, str] = {}
    for point, name in member(package, "chars.json").items():
        points.setdefault(name, f"U+{point.upper()}")
    rows = [f"{name:<12}{points[ICONS.get(name, name)]}" for name in OBJECTS]
    about = member(package, "package.json")
    return NOTICE.format(
        package=about["name"], version=about["version"], tile=TILE, table="\n".join(rows)
    )


def contact() -> Image.Image:
    """Every object at three sizes on every background."""
    sizes = (SIZES[0], SIZES[len(SIZES) // 2], SIZES[-1])
    middle, half = PIXELS / 2, sizes[-1] // 2 + 2
    rows = []
    for background in BACKGROUNDS:
        for size in sizes:
            stickers = (Placed(name, middle, middle, size) for name in OBJECTS)
            pictures = [render(Scene((sticker,), background)) for sticker in stickers]
            cut = slice(int(middle) - half, int(middle) + half)
            rows.append(torch.cat([picture[:, cut, cut] for picture in pictures], 2))
    pixels = (torch.cat(rows, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.kron(pixels, np.ones((3, 3, 1), np.uint8)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path, help="the .tgz file of the npm package")
    parser.add_argument("--out", type=Path, default=SHEET.parent)
    parser.add_argument("--contact", type=Path, help="write a picture to look at")
    args = parser.parse_args()
    with tarfile.open(args.package) as package:
        sheet(member(package, "icons.json")).save(args.out / SHEET.name, optimize=True)
        (args.out / "NOTICE").write_text(notice(package), encoding="utf-8")
    print(f"{args.out / SHEET.name}: {(args.out / SHEET.name).stat().st_size} bytes")
    if args.contact:
        contact().save(args.contact)


if __name__ == "__main__":
    main()
