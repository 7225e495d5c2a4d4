"""Conditions: arguments of the pipeline's call that a prompt brings beside its text.

In a prompt file they are columns: "image", "last_image", "video", "mask_image", "control_image" ...
are paths from the file's folder (or lists of them), "negative_prompt" a text. "conditions" may hold
any other argument of the call, {"conditions": {"strength": 0.6}}.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from flowrl.data import media as pictures
from flowrl.data.as_seen import as_seen
from flowrl.data.media import from_pil, media_kind
from flowrl.data.stored import PictureCell
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located, nearby, relative
from flowrl.runtime.text import printable
from flowrl.runtime.typed_text import is_picture

if TYPE_CHECKING:  # lists are read without torch, which takes seconds to import
    from torch import Tensor

    from flowrl.types import MediaContext

Conditions = Mapping[str, Any]
VIDEOS = (*pictures.PYAV_SUFFIXES, ".gif")
KEPT = 256  # most pictures that stay loaded


def is_mask(name: str) -> bool:
    return not {"mask", "masks"}.isdisjoint(name.split("_"))


def check_entry(entry: dict[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """Make the pictures of an entry paths from the folder; raise ValueError where one is no
    file."""
    more = entry.get("conditions", {})
    if not isinstance(more, dict):
        raise ValueError(f'{where}: "conditions" should be arguments by name, {{"strength": 0.6}}')
    _place(entry, where, folder)
    _place(more, where, folder)
    return entry


def _place(own: dict[str, Any], where: str, folder: Path) -> None:
    for name, value in list(own.items()):
        if is_picture(name):
            own[name] = _placed(value, f'{where}: "{name}"', folder)


def _placed(value: Any, what: str, folder: Path) -> Any:
    if isinstance(value, list):
        return [_placed(entry, what, folder) for entry in value]
    if isinstance(value, dict | bytes):
        raise ValueError(f"{what} holds a picture; save it as a file and give its path")
    if value is None or isinstance(value, Image.Image | PictureCell) or _is_array(value):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} is {value!r}; give the path of a file")
    if "://" in value:
        raise ValueError(f"{what} is a URL, which is not fetched; save the file and give its path")
    path = located(value, folder)
    if not path.is_file():
        raise ValueError(f"{what} names {path}, which is no file{nearby(path)}")
    try:
        pictures.check_readable(path)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    return str(path)


def from_folder(entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An entry with its pictures as paths from a folder, where `check_entry` finds them again."""
    out = {k: _from(v, folder) if is_picture(k) else v for k, v in entry.items()}
    if isinstance(more := entry.get("conditions"), dict):
        out["conditions"] = from_folder(more, folder)
    return out


def _from(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_from(each, folder) for each in value]
    return relative(located(value), folder) if isinstance(value, str) else value


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array of numpy."""
    return hasattr(value, "__array__")


def kinds(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Find the first row of each kind -> their places. Rows of a kind have the same arguments, with
    pictures of the same sizes."""
    first: dict[Any, int] = {}
    for place, row in enumerate(rows):
        own = arguments_of(row)
        kind = tuple((name, _kind(name, own[name])) for name in sorted(own))
        first.setdefault(kind, place)
    return list(first.values())


def _kind(name: str, value: Any) -> Any:
    """The property by which pipelines tell values of an argument apart: a picture's size."""
    if isinstance(value, list):
        return tuple(_kind(name, entry) for entry in value)
    if isinstance(value, Image.Image):
        return value.size
    if is_picture(name) and isinstance(value, str) and not _moves(name, value):
        return pictures.image_size(Path(value))
    return type(value).__name__


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a row by argument: its pictures, negative prompts and "conditions"; a value
    of None counts as not given."""
    own = {k: v for k, v in row.items() if is_picture(k) or k.startswith("negative_prompt")}
    own |= row.get("conditions", {})
    return {name: value for name, value in own.items() if value is not None}


def check_alike(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError where prompts have conditions of different names: the networks get those of
    all prompts in one call."""
    first = arguments_of(rows[0]).keys() if rows else ()
    for row in rows[1:]:
        other = sorted(arguments_of(row).keys() ^ first)
        if other:
            has, lacks = (rows[0], row) if other[0] in first else (row, rows[0])
            with_it, without = (printable(str(r.get("prompt", "")), 60) for r in (has, lacks))
            raise ValueError(
                f'prompt "{with_it}" has {other[0]}, and prompt "{without}" has none; give it to'
                " all prompts, those of evaluations too, or to none"
            )


def of(rows: Sequence[Mapping[str, Any]]) -> list[Conditions] | None:
    """Load the conditions of each prompt; None where no prompt has any."""
    found = [arguments_of(row) for row in rows]
    if not any(found):
        return None
    return [loaded(own) for own in found]


def loaded(given: Mapping[str, Any]) -> dict[str, Any]:
    """Load arguments of the call, with pictures and videos for their paths."""
    return {name: load(name, value) for name, value in given.items()}


def load(name: str, value: Any, *, listed: bool = False) -> Any:
    """Load an argument's value: pictures for paths, the frames of a video as a list of pictures; a
    value that is no path stays as it is. listed: it is an entry of a list, where a picture is a
    frame. An unreadable file -> ValueError."""
    if not is_picture(name):
        return value
    if isinstance(value, list):
        return [load(name, entry, listed=True) for entry in value]
    if isinstance(value, Image.Image):
        return as_seen(value, alpha=is_mask(name))
    if isinstance(value, PictureCell):
        return _stored(value, is_mask(name))
    if not isinstance(value, str | Path):
        return value
    value = located(value)
    if _moves("" if listed else name, value):
        return _frames(str(value), _version(value))
    return _picture(str(value), _version(value), is_mask(name))


def _moves(name: str, value: str | Path) -> bool:
    """Whether a file is read as frames, because its argument takes videos or because of its
    kind."""
    if {"video", "videos"}.intersection(name.split("_")):
        return True
    return Path(value).suffix.lower() in VIDEOS and pictures.has_frames(Path(value))


def _version(path: Path) -> tuple[int, ...]:
    """Tell a file from others that had its path earlier, or have it in another working directory;
    empty: there is none."""
    if not path.is_file():
        return ()
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


@functools.lru_cache(KEPT)
def _picture(path: str, version: tuple[int, ...], alpha: bool) -> Image.Image:
    picture = pictures.read_picture(Path(path), alpha=alpha)
    (red, green, blue, *clear) = picture.getextrema()
    if clear and all(low == high for low, high in (red, green, blue)):
        logger.warning(
            f"mask {path} has one colour and says by its transparency alone where it masks; a"
            " pipeline that reads colours sees an even mask. Save it as white on black"
        )
    return picture


@functools.lru_cache(KEPT)
def _stored(picture: PictureCell, alpha: bool) -> Any:
    return picture.picture(alpha)


@functools.lru_cache(16)
def _frames(path: str, version: tuple[int, ...]) -> list[Image.Image]:
    return pictures.to_pil(pictures.read_frames(Path(path)))


def context_of(
    rows: Sequence[Mapping[str, Any]], media: Tensor, group: Tensor | None = None
) -> MediaContext:
    """Context that rewards read beside media (B, *D), from the meta of each one's prompt."""
    from flowrl.types import MediaContext

    return MediaContext(meta=[dict(row) for row in rows], group=group, source=_sources(rows, media))


def has_source(prompts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each prompt has the picture that rewards see as context.source."""
    return all(_source(row) is not None for row in prompts)


def _source(row: Mapping[str, Any]) -> Any:
    """The prompt's "image", the first of several."""
    found = {**row, **row.get("conditions", {})}.get("image")
    return (found or [None])[0] if isinstance(found, list) else found


def _sources(rows: Sequence[Mapping[str, Any]], media: Tensor) -> Tensor | None:
    """The picture "image" of each row, (B, 3, H, W) in [0, 1] at the size of the media; None where
    a row has none, or the media are no pictures."""
    import torch
    from torchvision.transforms.functional import resize

    found = [_source(row) for row in rows]
    if (
        not found
        or any(picture is None for picture in found)
        or media_kind(media.shape) == "arrays"
    ):
        return None
    own = [from_pil(load("image", picture))[0] for picture in found]
    size = tuple(media.shape[-2:])
    fitted = [
        p if p.shape[-2:] == size else resize(p, list(size), antialias=True).clamp(0, 1)
        for p in own
    ]
    return torch.stack(fitted).to(media.device)


def files(prompts: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Files that conditions of prompts name, each once."""
    found: dict[Path, None] = {}
    for row in prompts:
        for name, value in {**row, **row.get("conditions", {})}.items():
            for entry in value if isinstance(value, list) else [value]:
                if is_picture(name) and isinstance(entry, str):
                    found[Path(entry)] = None
    return list(found)
