"""A hub id or a folder that no file describes: on a GPU bf16 and few rows, below what is stated."""

import pytest
import torch
from small import NAMED

from flowrl.config import compose, device
from flowrl.config.load import dump, load_config, read_config


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def few(cfg):
    return cfg.model.dtype, cfg.batch.micro, cfg.batch.decode, cfg.train.gradient_checkpointing


USUAL, SMALL = ("fp32", 64, 32, False), ("bf16", 4, 4, True)


def test_a_model_without_a_file_is_small_on_a_gpu_and_as_ever_on_a_cpu(gpu, tmp_path, monkeypatch):
    path = tmp_path / "own.yaml"
    path.write_text(
        "model: {source: owner/pipeline}\nreward: {jpeg: 1}\ndata: {train: ocr:train}\n"
    )
    ways = [
        (None, ["model=owner/pipeline", *NAMED]),
        (None, ["~model", "model.source=owner/pipeline", *NAMED]),
        (path, []),
        ({"model": "owner/pipeline"}, NAMED),
        (None, [f"model={tmp_path}", *NAMED]),
    ]
    assert [few(load_config(*way)) for way in ways] == [SMALL] * 5
    written = tmp_path / "config.yaml"
    written.write_text(dump(load_config(path)))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert [few(load_config(*way)) for way in ways] == [USUAL] * 5
    assert few(read_config(written)) == few(load_config(written)) == SMALL


def test_what_is_stated_wins(gpu):
    words = ["model=owner/pipeline", "batch.micro=16", "model.dtype=fp16", *NAMED]
    assert few(load_config(None, words)) == ("fp16", 16, 4, True)
    cfg = load_config({"model": {"source": "owner/pipeline", "dtype": "fp32"}}, NAMED)
    assert few(cfg) == ("fp32", 4, 4, True)


@pytest.mark.parametrize("words", [[], ["model=sd3.5-medium"], ["model=own.py:factory"]])
def test_named_models_and_factories_keep_their_own(gpu, words, monkeypatch):
    here = few(load_config(None, [*words, *NAMED]))
    monkeypatch.undo()
    assert here == few(load_config(None, [*words, *NAMED]))


def test_what_was_taken_is_said(gpu, monkeypatch):
    said = []
    monkeypatch.setattr(device.logger, "info", said.append)
    load_config(None, ["model=owner/pipeline", "batch.micro=16", *NAMED])
    assert said == [
        "owner/pipeline has no file in configs/model: on a GPU it is run with model.dtype=bf16,"
        " batch.decode=4, train.gradient_checkpointing=true, as fp32 and large batches run out of"
        " memory; what you set yourself stands"
    ]
    assert compose.source_of([], compose.CommandLine()) is None
