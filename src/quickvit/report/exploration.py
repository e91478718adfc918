"""What two models make of images in all eight poses: the data of the explorer and of the figures beside it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from quickvit.data import preprocessing
from quickvit.group import D8, Element, Irrep, Layout, act_on_image
from quickvit.layers import OcticLift
from quickvit.models import QuickVisionTransformer
from quickvit.report.entry import Source
from quickvit.report.weights import principal_filters

POSES = D8.elements
SUPERSCRIPTS = str.maketrans("23", "²³")
TURNED = ("", "a quarter turn", "a half turn", "three quarter turns")


@dataclass(frozen=True)
class IrrepCopy:
    """One copy of an irrep: the channels of a packed tensor that the group mixes with each other and no others."""

    irrep: Irrep
    channels: tuple[int, ...]


@dataclass(frozen=True)
class Answers:
    """A model's name and the probabilities [images, poses, classes] that it gives."""

    model: str
    probabilities: Tensor

    @property
    def labels(self) -> Tensor:
        """The likeliest class of each image in each pose, [images, poses]."""
        return self.probabilities.argmax(-1)

    @property
    def changing(self) -> Tensor:
        """Whether the answer depends on the pose, for each image."""
        return (self.labels != self.labels[:, :1]).any(1)


@dataclass(frozen=True)
class Exploration:
    """Images, and what an octic model and a baseline make of them in the poses `POSES`.

    pictures: PNG or JPEG files, upright, as the octic model sees them.
    targets: the true class of each image, −1 where it is not known.
    copies: the copies of irreps whose features are kept.
    features: one map [N, 8, component, H, W] for each copy: what the octic model computes on the turned images.
    answers: of the octic model and of the baseline.
    filters: what the octic model's patch filters respond to most in the images, if its lift is octic.
    chosen: by what rule the images were. credit: whose they are. source: of one that was read from a file.
    """

    pictures: tuple[bytes, ...]
    classes: tuple[str, ...]
    targets: tuple[int, ...]
    copies: tuple[IrrepCopy, ...]
    features: tuple[Tensor, ...]
    answers: tuple[Answers, Answers]
    filters: Mapping[str, Tensor] = field(default_factory=dict)
    chosen: str = ""
    credit: str = ""
    source: Source | None = None

    @cached_property
    def images(self) -> Tensor:
        """The pixels of the pictures, bytes [N, 3, S, S]."""
        decoded = (np.array(Image.open(io.BytesIO(file)).convert("RGB")) for file in self.pictures)
        return torch.stack([torch.from_numpy(pixels).permute(2, 0, 1) for pixels in decoded])

    @property
    def difference(self) -> float:
        """How far the features of turned images are from the turned features of upright ones.

        The largest difference of any copy, in parts of its largest value: only rounding, if the model is equivariant.
        """
        worst = 0.0
        for copy, maps in zip(self.copies, self.features, strict=True):
            moved = torch.stack([act_on_copy(maps[:, 0], copy.irrep, g) for g in POSES], dim=1)
            worst = max(worst, ((maps - moved).abs().max() / maps.abs().max().clamp(min=1e-30)).item())
        return worst


def act_on_copy(maps: Tensor, irrep: Irrep, g: Element) -> Tensor:
    """(ρ_token ⊗ ρ)(g): maps [..., component, H, W] moved on their grid and mixed by the irrep's matrix."""
    return torch.einsum("ij,...jhw->...ihw", irrep.matrix(g).to(maps), act_on_image(maps, g))


@torch.inference_mode()
def explore(
    model: nn.Module,
    baseline: nn.Module,
    images: Sequence[Image.Image],
    classes: Sequence[str],
    targets: Sequence[int] | None = None,
    *,
    channels: int = 2,
    progress: bool = False,
) -> Exploration:
    """Show images to an octic model (i8, h8 or d8) and to a baseline (a Quick ViT or a ViT of timm) in all poses.

    classes: names of the classes that both models tell apart. targets: numbers of the images' true classes.
    channels: how many channels of each irrep are kept, a pair of E being two: those that vary most.
    """
    octic = _require_octic(model)
    baseline = baseline.eval()
    for network in (model, baseline):
        if getattr(network, "num_classes", None) != len(classes):
            found = getattr(network, "num_classes", "an unknown number of")
            raise ValueError(
                f"{model_name(network)} tells {found} classes apart, but {len(classes)} names are given"
            )
    if not images:
        raise ValueError("there must be at least one image to explore")
    targets = [-1] * len(images) if targets is None else targets
    if len(targets) != len(images):
        raise ValueError(f"there are {len(images)} images but {len(targets)} targets")
    for target in targets:
        if not -1 <= target < len(classes):
            raise ValueError(
                f"a target is from 0 to {len(classes) - 1}, or -1 if it is not known; got {target}"
            )
    if channels < 1:
        raise ValueError(f"channels must be at least 1, got {channels}")

    tokens, probabilities, baseline_probabilities = [], [], []
    for image in tqdm(images, desc="images in eight poses", disable=not progress):
        poses = _poses(octic, image)
        steerable = octic.forward_steerable(poses)
        tokens.append(steerable.tokens[:, steerable.prefix :].float().cpu())
        probabilities.append(_ask(octic, poses))
        baseline_probabilities.append(ask_in_poses(baseline, image))
    found = torch.stack(tokens)
    copies = tuple(_most_varied(found[:, 0], Layout(octic.embed_dim), channels))
    maps = found.unflatten(2, steerable.grid).movedim(-1, 2)
    return Exploration(
        pictures=tuple(_encode(preprocessing(octic).pixels(image)) for image in images),
        classes=tuple(classes),
        targets=tuple(targets),
        copies=copies,
        features=tuple(maps[:, :, list(copy.channels)] for copy in copies),
        answers=(
            Answers(model_name(octic), torch.stack(probabilities)),
            Answers(model_name(baseline), torch.stack(baseline_probabilities)),
        ),
        filters=principal_filters(octic, _seen(octic, images))
        if isinstance(octic.patch_embed, OcticLift)
        else {},
    )


@torch.inference_mode()
def ask_in_poses(model: nn.Module, image: Image.Image) -> Tensor:
    """The probabilities [8, classes] that a model gives for an image in the poses `POSES`."""
    return _ask(model.eval(), _poses(model, image))


def model_name(model: nn.Module) -> str:
    """The family of a Quick ViT; any other model is a ViT."""
    return model.family if isinstance(model, QuickVisionTransformer) else "ViT"


def symbol(g: Element) -> str:
    """An element as it is written: e, r, r², … sr³."""
    return str(g).translate(SUPERSCRIPTS)


def describe(g: Element) -> str:
    """What an element does to an image."""
    parts = [TURNED[g.turns], "mirrored" if g.mirror else ""]
    return ", then ".join(part for part in parts if part) or "upright"


# ---------------------------------------------------------------------- parts


def _require_octic(model: nn.Module) -> QuickVisionTransformer:
    if not isinstance(model, QuickVisionTransformer) or model.group != D8:
        raise ValueError(f"only features of i8, h8 and d8 turn with the image; got {model_name(model)}")
    return model.eval()


def _poses(model: nn.Module, image: Image.Image) -> Tensor:
    """An image in its eight poses, as a model sees them, [8, 3, S, S]."""
    pixels = preprocessing(model)(image)
    _, height, width = pixels.shape
    if height != width:
        raise ValueError(
            f"images must be square to be turned; {model_name(model)} takes {height}×{width} pixels"
        )
    device = next(model.parameters()).device
    return torch.stack([act_on_image(pixels, g) for g in POSES]).to(device)


def _seen(model: nn.Module, images: Sequence[Image.Image]) -> Tensor:
    """Images as a model sees them, [N, 3, S, S]."""
    return torch.stack([preprocessing(model)(image) for image in images])


def _ask(model: nn.Module, images: Tensor) -> Tensor:
    """The probabilities of the classes."""
    probabilities: Tensor = model(images).float().softmax(-1).cpu()
    return probabilities


def _encode(pixels: Tensor) -> bytes:
    """An image of bytes [3, H, W] as PNG or JPEG, whichever is smaller."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    encoded = []
    for kind in ("png", "jpeg"):
        file = io.BytesIO()
        image.save(file, kind, optimize=True, quality=90)
        encoded.append(file.getvalue())
    return min(encoded, key=len)


def _most_varied(tokens: Tensor, layout: Layout, channels: int) -> Iterator[IrrepCopy]:
    """The copies of each irrep whose channels vary most over upright tokens [images, tokens, C]."""
    variance = tokens.flatten(0, 1).var(0, correction=0)
    for irrep in layout.group.irreps:
        blocks = [block for block in layout.blocks if block.irrep == irrep]
        total = torch.stack([variance[block.slice] for block in blocks]).sum(0)
        count = min(max(1, channels // irrep.dim), len(total))
        for place in total.topk(count).indices.tolist():
            yield IrrepCopy(irrep, tuple(block.start + place for block in blocks))
