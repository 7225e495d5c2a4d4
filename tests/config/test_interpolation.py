"""What ${key} stands for is bounded before it is resolved."""

import pytest

from flowrl.config.compose import ConfigError
from flowrl.config.interpolation import check_size, named
from flowrl.config.load import load_config

DOUBLES = {"a0": "x" * 10} | {f"a{i}": f"${{a{i - 1}}}${{a{i - 1}}}" for i in range(1, 41)}


@pytest.mark.parametrize(
    "tree",
    [
        DOUBLES,
        {"outer": {key: value.replace("${", "${.") for key, value in DOUBLES.items()}},
        {"a0": ["x"] * 10} | {f"a{i}": [f"${{a{i - 1}}}"] * 2 for i in range(1, 41)},
        {"m0": {"x": 1}} | {f"m{i}": dict.fromkeys("xy", f"${{m{i - 1}}}") for i in range(1, 41)},
        {"a": [f"${{a[{i + 1}]}}${{a[{i + 1}]}}" for i in range(40)] + ["x"]},
    ],
)
def test_values_that_double_are_refused(tree):
    with pytest.raises(ValueError, match="1,000,000 characters, which no config needs"):
        check_size(tree)


def test_ordinary_references_pass():
    check_size({"a": 1, "b": "${a}", "c": {"d": "${.e}${..b}", "e": [1, "${a}"]}, "f": "${c.e[1]}"})
    check_size({"a": "${a}", "b": "${nowhere}", "c": "${oc.env:HOME,${b}}"})  # resolving says so


def test_a_name_that_is_itself_named_is_refused():
    with pytest.raises(ValueError, match=r"b\.c: .* inside .* is not understood"):
        check_size({"a": "x", "x": 1, "b": {"c": "${${a}}"}})


def test_names_are_read_from_the_root_or_from_the_holder():
    assert named("a.b[2]", ("c", "d")) == ("a", "b", "2")
    assert named(".b", ("c", "d")) == ("c", "b")
    assert named("..b", ("c", "d")) == ("b",)


def test_a_config_that_doubles_is_one_sentence(tmp_path):
    lines = ["reward:", "  shapes:", *(f"    {k}: {v!r}" for k, v in DOUBLES.items())]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines).replace("${a", "${reward.shapes.a"))
    with pytest.raises(ConfigError, match=r"\$\{...\} has more than 1,000,000 characters"):
        load_config(str(path))
