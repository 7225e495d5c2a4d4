"""YAML is bounded before it is read, and what is too much is refused at once."""

import pytest
import yaml

from flowrl.config.compose import ConfigError
from flowrl.config.load import dump, load_config, read_config
from flowrl.runtime import yaml_text

BOMB = "a0: &a0 [lol]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
TOO_MUCH = {
    "billion laughs": (BOMB, "expansion exceeds the configured limit"),
    "deep": ("a: " + "[" * 100_000, "nests more than 50"),
    "itself": ("a: &a [*a]", "recursive aliases"),
    "python": ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "twice": ("seed: 1\nseed: 2", "found duplicate key"),
    "not text": ("a: \x00", "control characters are not allowed"),
    "large": ("# " + "x" * 1_000_000, "more than 1,000,000 bytes"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_config_that_is_too_much_is_one_sentence(tmp_path, name):
    text, why = TOO_MUCH[name]
    path = tmp_path / "config.yaml"
    path.write_text(text)
    for read in (load_config, read_config):
        with pytest.raises(ConfigError, match=why) as raised:
            read(path)
        assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_bytes_and_folders_are_refused_too(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.yaml").mkdir()
    for name, why in {"a.yaml": "utf-8", "b.yaml": "it is not a file"}.items():
        with pytest.raises(ConfigError, match=why):
            load_config(tmp_path / name)


def test_aliases_of_an_ordinary_file_are_read():
    text = "a: &a {x: 1}\nb:\n  <<: *a\n  y: [*a, *a]"
    assert yaml_text.load(text) == yaml.safe_load(text)
    yaml_text.load("a: " + "[" * 49 + "]" * 49)
    with pytest.raises(ValueError, match="nests more than 50"):
        yaml_text.load("a: " + "[" * 50 + "]" * 50)


def test_words_that_nest_too_deep_are_one_sentence():
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["reward=jpeg", "algorithm=nft", "model.pipeline.a=" + "[" * 400])
    assert "is not key=value (a value nests at most 50 brackets" in str(raised.value)


def test_long_wrong_values_are_cut():
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["reward=jpeg", "algorithm=nft", f"seed={'x' * 5000}"])
    assert len(str(raised.value)) < 250 and "...'" not in str(raised.value)


def test_a_config_with_control_characters_is_printed_without_them_and_reads_back(tmp_path):
    cfg = load_config(None, ["reward=jpeg", "algorithm=nft", "output='a\u202eé'"])
    path = tmp_path / "config.yaml"
    path.write_text(dump(cfg))
    assert "\u202e" not in dump(cfg) and read_config(path) == cfg
