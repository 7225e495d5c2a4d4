"""Stages of pretraining: what each saved after its first step, and two folders that end alike."""

import contextlib
import shutil

import pytest
import torch


@contextlib.contextmanager
def first_saved(folder, *scripts):
    """Inside, what a stage of these modules saves after its first step is kept in folder/first."""
    (folder / "first").mkdir()
    saved = scripts[0].save

    def kept(path, step, **parts):
        saved(path, step, **parts)
        if step == 1:
            shutil.copy(path, folder / "first")

    with pytest.MonkeyPatch.context() as patch:
        for script in scripts:
            patch.setattr(script, "save", kept)
        yield patch


def assert_goes_on(whole, tmp_path, stage, run, parts):
    """A stage that starts from its first step, with the others' results, ends after two with the
    weights of the uninterrupted one. run(stage, folder); parts: names of what it saves."""
    for file in whole.glob("*.pt"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / f"{stage}.pt").unlink()
    shutil.copy(whole / "first" / f"{stage}.pt", tmp_path)
    run(stage, tmp_path)
    one, other = (torch.load(folder / f"{stage}.pt") for folder in (whole, tmp_path))
    assert one["step"] == other["step"] == 2
    for part in parts:
        pairs = zip(one[part].values(), other[part].values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
