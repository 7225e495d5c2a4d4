"""The stickers world as a whole, its edits and its motions."""

from __future__ import annotations

from flowrl.scenes.edits import Edits
from flowrl.scenes.motions import Motions
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.scenes.stickers.scenes import BACKGROUNDS, SIZES, render
from flowrl.scenes.stickers.verify import detect
from flowrl.scenes.world import SmallWorld

STICKERS = SmallWorld(
    language=WORLD, sizes=SIZES, backgrounds=tuple(BACKGROUNDS), render=render, detect=detect
)
EDITS, MOTIONS = Edits(STICKERS), Motions(STICKERS)
