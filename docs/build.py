"""What the site needs beyond Markdown: formulas without JavaScript, and lists in docstrings."""

import html
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves for a script in the browser to find.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Code in a table, where a | has a backslash that Markdown should have taken away, as GitHub does.
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
# A line of a docstring, not its first, that explains arguments or fields.
EXPLAINED = re.compile(r"(?<=\n)([a-z_]\w*(?:, [a-z_]\w*)*): ")


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves; no backslashes in tables."""

    def draw(match: re.Match[str]) -> str:
        kind = match[1]
        formula = convert(html.unescape(match[2]), display="inline" if kind == "span" else "block")
        return f'<{kind} class="formula">{formula}</{kind}>'

    return CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), FORMULA.sub(draw, content))


class ExplainedNames(griffe.Extension):
    """The lines "name: what it is" of a docstring as a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring:
            obj.docstring.value = EXPLAINED.sub(r"- `\1`: ", obj.docstring.value)
