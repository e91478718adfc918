"""Where samples come from: image folders, shards, the sets of libraries, and digits that need no download."""

from __future__ import annotations

from pathlib import Path

from quickvit.data.sources.base import ALL, SPLITS, Sample, Source
from quickvit.data.sources.cached import CachedSource, cache
from quickvit.data.sources.digits import open_digits
from quickvit.data.sources.folder import open_folder
from quickvit.data.sources.libraries import open_hugging_face, open_torchvision
from quickvit.data.sources.mixed import MixedSource, mix
from quickvit.data.sources.shards import open_shards

__all__ = ["CachedSource", "MixedSource", "Sample", "Source", "cache", "mix", "open_source"]

DIGITS = "digits"


def open_source(spec: str | Path = DIGITS, split: str = "train", *, labelled: bool = True) -> Source:
    """The samples of a split of a data set.

    spec: a folder of images; "digits" for scikit-learn's handwritten digits, unless a folder of that name with
        something in it is here; "wds/FOLDER" for shards of the
        WebDataset format; "torch/NAME@FOLDER" for a data set of torchvision; "hfds/NAME" or "hfds/NAME@CACHE" for
        one of Hugging Face.
    split: "train", "val", "test", or "all" for everything.
    labelled: with False the targets are −1, and any folder of images will do.
    """
    if split not in (*SPLITS, ALL):
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join((*SPLITS, ALL))}")
    # An empty folder of this name has nothing that could be meant.
    if Path(spec).is_dir() and (spec != DIGITS or any(Path(spec).iterdir())):
        return open_folder(Path(spec), split, labelled=labelled)
    kind, _, rest = str(spec).partition("/")
    name, _, root = rest.partition("@")
    if spec == DIGITS:
        return open_digits(split)
    if kind == "wds" and rest:
        return open_shards(Path(rest), split, labelled=labelled)
    if kind == "torch" and name:
        return open_torchvision(name, root or None, split, labelled=labelled)
    if kind == "hfds" and name:
        return open_hugging_face(name, root or None, split, labelled=labelled)
    raise FileNotFoundError(
        f"no data at {str(spec)!r}: expected a folder, {DIGITS}, wds/FOLDER, torch/NAME@FOLDER or hfds/NAME"
    )
