"""An HTML document in the report's style, in one file that needs nothing else."""

from __future__ import annotations

from html import escape
from importlib.resources import files

# Nothing may be fetched, whatever is written into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, body: str, head: str = "") -> str:
    """A page; `head` is what else a browser or a program should know of it."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n{head}'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{resource('page.css')}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def resource(name: str) -> str:
    """A file of this room: style, script or markup."""
    return files("quickvit.report").joinpath(name).read_text(encoding="utf-8").strip()
