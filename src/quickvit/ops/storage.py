"""Where the package keeps what it found out or built for this machine."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """The folder quickvit/NAME of `$XDG_CACHE_HOME`, or of ~/.cache."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quickvit" / name
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; set XDG_CACHE_HOME to a folder") from error
