"""The picture before an edit, for rewards that judge edits.

It comes from the context column `source`, or from the image that each prompt names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from torch import Tensor

from flowrl.data.media import IMAGE_SUFFIXES, read_image
from flowrl.rewards.core.pictures import column_of
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import Settings as Base
from flowrl.runtime.paths import located, nearby
from flowrl.types import MediaContext


class Settings(Base):
    source: Literal["column", "meta"] = pydantic.Field(
        "column",
        description=(
            "Place of the picture before editing: context.source (column), or the image that each"
            ' prompt names under "source" (meta).'
        ),
    )
    folder: str | None = pydantic.Field(
        None,
        description=(
            "Folder of images with relative paths, for source=meta; null: the working directory."
        ),
    )


class Sourced(Reward):
    """A reward that may be shown the picture before editing; it declares so in `declare_source`."""

    remedies = {
        "source": 'set source=meta to read it from the image that each prompt names under "source"'
    }

    def declare_source(self, shown: bool, setting: str = "") -> None:
        """Declare the column `source`. shown: whether the reward sees the picture, as loaded;
        setting: name of the setting that would show it."""
        meta = self.settings.source == "meta"
        if meta and not shown:
            raise ValueError(
                f"reward.{self.name}.source=meta would not be used: no picture before editing is"
                f" shown without {setting}"
            )
        if shown:
            self.needs = self.needs | {"meta" if meta else "source"}
        if meta:
            self.reads = self.reads | {"source"}

    def complaint(self, meta: Mapping[str, Any]) -> str | None:
        if "source" in self.reads:
            try:
                self._path(meta)
            except ValueError as error:
                return f"has no picture before editing: {error}"
        return super().complaint(meta)

    def sources(self, media: Tensor, context: MediaContext | None) -> list[Tensor]:
        """The picture before editing of each sample, (3, H, W) fp32 in [0, 1] on media's device.

        Files may differ in size.
        """
        if self.settings.source == "column":
            return list(column_of(context, "source", len(media)).to(media.device))
        # the reward declares the column meta
        assert context is not None and context.meta is not None
        paths = [self._path(meta) for meta in context.meta]
        read = {path: _read(path).to(media.device) for path in dict.fromkeys(paths)}
        return [read[path] for path in paths]

    def _path(self, meta: Mapping[str, Any]) -> Path:
        what = f"an image ({', '.join(IMAGE_SUFFIXES)})"
        return file_of(self, meta, "source", what, IMAGE_SUFFIXES)


def file_of(
    reward: Reward, meta: Mapping[str, Any], key: str, what: str, suffixes: tuple[str, ...] = ("",)
) -> Path:
    """The file that a prompt names under a key, in the folder of the setting `folder`. what: kind
    of files, for errors; suffixes: allowed endings of their names. Another file -> ValueError."""
    name = meta.get(key)
    if not isinstance(name, str) or not name or not name.lower().endswith(suffixes):
        raise ValueError(f"{key}={name!r}, which should be the path of {what}")
    path = located(name, located(reward.settings.folder or ""))
    if not path.is_file():
        raise ValueError(
            f"{key}={name}: there is no file {path}{nearby(path)}; set"
            f" reward.{reward.name}.folder to where the files are"
        )
    return path


def _read(path: Path) -> Tensor:
    try:
        return read_image(path)
    except ValueError as error:
        raise ValueError(f"the picture before editing {error}") from error
