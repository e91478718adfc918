"""The explorer: turn an image on an HTML page and watch features and answers, without a server or a network."""

from __future__ import annotations

import base64
import io
import json
from importlib.resources import files
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from quickvit.group import D8, Element, Irrep
from quickvit.report.exploration import POSES, Exploration, describe, symbol

# Bytes of a fragment that a page can bear, and classes whose bars are shown.
LARGEST = 1_000_000
SHOWN_CLASSES = 6
# Features are stored as whole numbers of this many steps to each side of zero.
STEPS = 2**15 - 1
GENERATORS = {"r": Element(0, 1), "s": Element(1, 0)}


def explorer_fragment(exploration: Exploration) -> str:
    """The explorer as an HTML element with the id "explorer", its style, script and data inside.

    Its colours are the page's custom properties --paper, --ink, --muted, --line, --accent, --accent-2 and --panel.
    """
    # Names of classes are untrusted: no "<" of theirs may end the script element.
    data = json.dumps(_data(exploration), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"STYLE": _read("explorer.css"), "SCRIPT": _read("explorer.js"), "DATA": data}
    fragment = _read("explorer.html")
    for name, text in parts.items():
        fragment = fragment.replace(f"/*{name}*/", text)
    if len(fragment) > LARGEST:
        raise ValueError(
            f"the explorer would take {len(fragment) / 1e6:.1f} MB of a page, more than {LARGEST / 1e6:g} MB; "
            f"show fewer than {len(exploration.images)} images, or fewer channels"
        )
    return fragment


def explorer_page(exploration: Exploration) -> str:
    """A page with nothing but the explorer."""
    return _read("explorer_page.html").replace("<!--EXPLORER-->", explorer_fragment(exploration))


# ---------------------------------------------------------------------- data


def _data(exploration: Exploration) -> dict[str, Any]:
    """What the script reads."""
    return {
        "grid": exploration.features[0].shape[-1],
        "steps": STEPS,
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
    stored = [_quantise(maps[number]) for maps in exploration.features]
    return {
        "source": _data_url(exploration.images[number]),
        "truth": exploration.classes[target] if target >= 0 else "",
        "classes": [exploration.classes[label] for label in shown],
        "labels": [[shown.index(label) for label in model] for model in labels.tolist()],
        "answers": [
            [[round(p, 4) for p in pose] for pose in model] for model in answers[..., shown].tolist()
        ],
        "features": [base64.b64encode(values).decode() for values, _ in stored],
        "scales": [scale for _, scale in stored],
    }


def _shown_classes(answers: Tensor, needed: set[int]) -> list[int]:
    """The needed classes and the likeliest others, at least `SHOWN_CLASSES` if there are so many, in their order."""
    likeliest = answers.amax((0, 1)).argsort(descending=True).tolist()
    others = [label for label in likeliest if label not in needed]
    return sorted([*needed, *others[: max(0, SHOWN_CLASSES - len(needed))]])


def _quantise(maps: Tensor) -> tuple[bytes, float]:
    """Values as little-endian 16-bit integers, and the largest magnitude, which is `STEPS` of them."""
    scale = maps.abs().max().item() or 1.0
    return (maps / scale * STEPS).round().numpy().astype("<i2").tobytes(), scale


def _data_url(pixels: Tensor) -> str:
    """An image of bytes [3, H, W], as PNG or JPEG, whichever is smaller."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    encoded = {}
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        image.save(file, kind, optimize=True, quality=90)
        encoded[kind] = file.getvalue()
    kind = min(encoded, key=lambda name: len(encoded[name]))
    return f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"


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


def _read(name: str) -> str:
    return files("quickvit.report").joinpath(name).read_text("utf-8").strip()
