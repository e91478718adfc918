"""Objects in JSON files that are not trusted, and where their numbers come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LARGEST = 1e300


@dataclass(frozen=True)
class Source:
    """Where numbers come from; `gpu` says whether the hardware is one. remark: what else must be known of them."""

    file: str
    hardware: str
    gpu: bool
    date: str
    command: str
    commit: str
    remark: str = ""


@dataclass(frozen=True)
class Entry:
    """An object in a JSON file; what is asked of it has the right type or is refused.

    name: of the file, from the folder that was read on, so that a report does not depend on where that lies.
    place: of the object in the file.
    """

    file: Path
    name: str
    place: str
    values: Mapping[str, Any]

    def wrong(self, key: str, expected: str) -> ValueError:
        """What to say of a value that is not what it should be."""
        place = f"{self.place}{key}"
        if key not in self.values:
            return ValueError(f"{self.file}: {place} is missing; expected {expected}")
        return ValueError(f"{self.file}: {place} is {str(self.values[key])[:80]!r}; expected {expected}")

    def text(self, key: str, *default: Any) -> Any:
        """A string; where there is none the default, if one is given."""
        value = self.values.get(key)
        if value is None and default:
            return default[0]
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def word(self, key: str) -> str:
        """A string or a number as a string, empty where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else "" if value is None else f"{self.number(key):g}"

    def number(self, key: str) -> float | None:
        """A finite number, None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
            raise self.wrong(key, "a finite number")
        return value

    def integer(self, key: str) -> int:
        """An integer, which must be there."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers, which must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(key, "a list of integers")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, which must be there."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """All numbers whose names begin so."""
        found = {key: self.number(key) for key in self.values if key.startswith(prefix)}
        return {key: value for key, value in found.items() if value is not None}

    def entry(self, key: str) -> Entry:
        """An object in this one, empty where there is none."""
        value = self.values.get(key)
        if not isinstance(value, (dict, type(None))):
            raise self.wrong(key, "an object")
        return replace(self, place=f"{self.place}{key}.", values=value or {})

    def entries(self, key: str, *, required: bool = False) -> list[Entry]:
        """A list of objects, empty where there is none unless it is required."""
        value = self.values.get(key)
        if value is None and not required:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, "a list of objects")
        return [replace(self, place=f"{self.place}{key}[{i}].", values=item) for i, item in enumerate(value)]


def open_entry(file: Path, folder: Path) -> Entry:
    """The object that a JSON file holds; `folder` is the one that was to be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON that can be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected an object with what was measured, got {type(values).__name__}")
    name = folder.resolve().name / file.relative_to(folder)
    return Entry(file, name.as_posix(), "", values)


def read_source(record: Entry) -> Source:
    """What a record says of the machine, the day and the command."""
    facts = record.entry("hardware")
    threads, gpu = facts.number("threads"), facts.text("gpu", "")
    cpu = facts.text("cpu", "unknown hardware")
    if threads:
        cpu += f", {threads:.0f} thread{'s' * (threads != 1)}"
    date, *words = (record.text(key, "") for key in ("date", "command", "commit", "remark"))
    return Source(record.name, gpu or cpu, bool(gpu), date[:10], *words)
