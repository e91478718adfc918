"""The explorer: turn an image on an HTML page and watch features and answers, without a server or a network."""

from __future__ import annotations

import base64
import json
import re
from html import escape
from typing import Any

import torch
from torch import Tensor

from quickvit.group import D8, Element, Irrep
from quickvit.report.document import document, resource
from quickvit.report.exploration import POSES, Exploration, describe, symbol
from quickvit.report.packed import pack, steps

# Bytes of a fragment that a page can bear, and classes whose bars are shown.
LARGEST = 1_000_000
SHOWN_CLASSES = 6
# Of each value of a feature.
BITS = 16
PNG = b"\x89PNG"
GENERATORS = {"r": Element(0, 1), "s": Element(1, 0)}


def explorer_fragment(exploration: Exploration) -> str:
    """The explorer as an HTML element with the id "explorer", its style, script and data inside.

    Its colours are the page's custom properties --paper, --ink, --muted, --line, --accent, --accent-2 and --panel.
    """
    # Names of classes are untrusted: no "<" of theirs may end the script element.
    data = json.dumps(_data(exploration), separators=(",", ":")).replace("<", "\\u003c")
    about = " ".join(filter(None, (exploration.chosen, exploration.credit)))
    parts = {"STYLE": resource("explorer.css"), "SCRIPT": resource("explorer.js"), "DATA": data}
    parts["ABOUT"] = f'<p class="note">{escape(about)}</p>' if about else ""
    fragment = re.sub(r"/\*([A-Z]+)\*/", lambda found: parts[found[1]], resource("explorer.html"))
    if len(fragment) > LARGEST:
        raise ValueError(
            f"the explorer would take {len(fragment) / 1e6:.1f} MB of a page, more than {LARGEST / 1e6:g} MB; "
            f"show fewer than {len(exploration.images)} images, or fewer channels"
        )
    return fragment


def explorer_page(exploration: Exploration) -> str:
    """A page with nothing but the explorer."""
    title = "Turn an image, watch a model"
    body = f"<header>\n<h1>{title}</h1>\n</header>\n<main>\n{explorer_fragment(exploration)}\n</main>"
    return document("Quick ViT explorer", body)


# ---------------------------------------------------------------------- data


def _data(exploration: Exploration) -> dict[str, Any]:
    """What the script reads."""
    return {
        "grid": exploration.features[0].shape[-1],
        "steps": steps(BITS),
        "poses": [
            {"symbol": symbol(g), "words": describe(g), "turns": g.turns, "mirror": g.mirror} for g in POSES
        ],
        # The pose after each pose: images are turned after what was done to them before.
        "then": {
            name: [POSES.index(D8.product(generator, g)) for g in POSES]
            for name, generator in GENERATORS.items()
        },
        "irreps": {
            irrep.name: {"meaning": _meaning(irrep), "matrices": [irrep.matrix(g).tolist() for g in POSES]}
            for irrep in D8.irreps
        },
        "copies": [{"irrep": copy.irrep.name, "channels": copy.channels} for copy in exploration.copies],
        "models": [answers.model for answers in exploration.answers],
        "images": [_image(exploration, number) for number in range(len(exploration.images))],
    }


def _image(exploration: Exploration, number: int) -> dict[str, Any]:
    """One image: its pixels, features and answers."""
    target = exploration.targets[number]
    answers = torch.stack([answers.probabilities[number] for answers in exploration.answers])
    labels = answers.argmax(-1)
    shown = _shown_classes(answers, {*labels.flatten().tolist(), *([target] if target >= 0 else [])})
    return {
        "source": _data_url(exploration.pictures[number]),
        "truth": exploration.classes[target] if target >= 0 else "",
        "classes": [exploration.classes[label] for label in shown],
        "labels": [[shown.index(label) for label in model] for model in labels.tolist()],
        "answers": [
            [[round(p, 4) for p in pose] for pose in model] for model in answers[..., shown].tolist()
        ],
        "features": [pack(maps[number], BITS) for maps in exploration.features],
    }


def _shown_classes(answers: Tensor, needed: set[int]) -> list[int]:
    """The needed classes and the likeliest others, at least `SHOWN_CLASSES` if there are so many, in their order."""
    likeliest = answers.amax((0, 1)).argsort(descending=True).tolist()
    others = [label for label in likeliest if label not in needed]
    return sorted([*needed, *others[: max(0, SHOWN_CLASSES - len(needed))]])


def _data_url(picture: bytes) -> str:
    kind = "png" if picture.startswith(PNG) else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _meaning(irrep: Irrep) -> str:
    """How channels of this type change, from the matrices of the generators."""
    if irrep.dim > 1:
        return "pairs of channels that turn as arrows do"
    changing = [
        word for word, ((sign,),) in (("quarter turns", irrep.r), ("mirrorings", irrep.s)) if sign < 0
    ]
    return (
        f"{' and '.join(changing)} change the sign" if changing else "moves with the image, does not change"
    )
