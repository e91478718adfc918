"""What the site needs beyond Markdown: formulas without JavaScript, and lists in docstrings."""

import html
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves for a script in the browser to find.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# A line of a docstring that explains arguments or fields.
EXPLAINED = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves."""

    def draw(match: re.Match[str]) -> str:
        kind = match[1]
        formula = convert(html.unescape(match[2]), display="inline" if kind == "span" else "block")
        return f'<{kind} class="formula">{formula}</{kind}>'

    return FORMULA.sub(draw, content)


class ExplainedNames(griffe.Extension):
    """The lines "name: what it is" of a docstring as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring:
            obj.docstring.value = EXPLAINED.sub(r"- `\1`: ", obj.docstring.value)
