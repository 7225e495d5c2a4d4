"""Fenced blocks with the language `math` become MathML when the site is built."""

import pytest
from pages import PAGES, blocks

pytest.importorskip("latex2mathml", reason="make docs installs latex2mathml")

from equations import mathml, with_equations

EQUATIONS = {
    where: code
    for page, text in PAGES.items()
    for where, language, code, _ in blocks(page, text)
    if language == "math"
}


@pytest.mark.parametrize("where", EQUATIONS)
def test_every_equation_of_the_pages_is_drawn(where):
    assert mathml(EQUATIONS[where]).startswith("<math")


def test_only_math_blocks_change_and_the_text_around_them_stays():
    page = "A\n\n```math\nx = \\frac{1}{2}\n```\n\nB\n\n````text\n```math\ny\n```\n````\n"
    drawn = with_equations(page)
    assert drawn.count("<math") == 1 and "<mfrac>" in drawn
    assert drawn.startswith('A\n\n<div class="equation"') and drawn.endswith(page.partition("B")[2])


def test_aligned_rows_and_underlines_of_settings_are_read():
    drawn = mathml(r"\begin{aligned} a &= 1 \\ b &= \text{kl\_weight} \end{aligned}")
    assert drawn.count("<mtr>") == 2 and "<mtext>kl_weight</mtext>" in drawn


@pytest.mark.parametrize("latex", [r"\nosuchcommand x", r"a & b"])
def test_what_is_not_understood_is_refused_with_the_equation(latex):
    with pytest.raises(ValueError, match="write it with another command"):
        mathml(latex)
