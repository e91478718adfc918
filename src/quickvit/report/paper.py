"""The paper's numbers, by the label of the table, figure or section that has them. Nothing here was measured."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Quoted(Generic[Key]):
    """A table, figure or section of the paper: its LaTeX label, on what it was obtained, its numbers by row."""

    label: str
    setting: str
    rows: Mapping[Key, Numbers]


def _rows(names: str, rows: Mapping[Key, tuple[float, ...]]) -> dict[Key, Numbers]:
    """Rows of numbers with the names of their columns."""
    return {key: dict(zip(names.split(), values, strict=True)) for key, values in rows.items()}


A100 = "A100-80GB"
L16, H14, H16 = "ViT-Large/16", "ViT-Huge/14", "ViT-Huge/16"

# Data sets as the commands name them.
DATA = {
    "imagenet": "ImageNet-1K",
    "inaturalist": "iNaturalist 2021",
    "places365": "Places365",
    "ade20k": "ADE20K",
    "voc2012": "VOC 2012",
}

# All blocks octic, by size; ratios of the standard ViT to the octic one.
SCALING: Quoted[str] = Quoted(
    "tab:vit-scale",
    f"{A100}, bf16, batch 64, torch.compile",
    _rows(
        "width depth mlp_dim heads speed flops memory",
        {
            "large": (1024, 24, 4096, 16, 1.32, 4.58, 2.44),
            "huge": (1280, 32, 5120, 16, 1.47, 4.58, 2.88),
            "giant": (1664, 48, 8192, 16, 1.91, 4.88, 4.36),
            "e": (1792, 56, 15360, 16, 2.37, 5.01, 5.30),
            "22b": (6144, 36, 24576, 48, 3.54, 5.18, 5.80),
        },
    ),
)

# By layer, dtype and input channels; the layers have four times as many outputs.
LINEAR: Quoted[tuple[str, str, int]] = Quoted(
    "tab:linear-performance",
    f"{A100}, 64·196 tokens",
    _rows(
        "intensity ms tflops_per_s ratio",
        {
            ("standard", "float16", 1024): (770, 0.47, 230, 1.0),
            ("octic", "float16", 1024): (150, 0.19, 110, 2.6),
            ("eight blocks", "float16", 1024): (100, 0.13, 100, 3.6),
            ("standard", "float16", 8192): (4300, 24, 280, 1.0),
            ("octic", "float16", 8192): (1200, 5.3, 240, 4.6),
            ("eight blocks", "float16", 8192): (770, 3.4, 250, 7.2),
            ("standard", "float32", 1024): (380, 5.6, 19, 1.0),
            ("octic", "float32", 1024): (80, 1.2, 17, 4.8),
            ("eight blocks", "float32", 1024): (50, 0.76, 17, 7.4),
            ("standard", "float32", 8192): (2200, 360, 19, 1.0),
            ("octic", "float32", 8192): (580, 67, 19, 5.33),
            ("eight blocks", "float32", 8192): (380, 45, 19, 7.95),
        },
    ),
)

# Microseconds, by operation, layer and width C; GELU runs on 4C channels.
GELU: Quoted[tuple[str, str, int]] = Quoted(
    "tab:non-linearity-runtime",
    "A100, batch 32",
    _rows(
        "us",
        {
            ("GELU", "standard", 256): (44.8,),
            ("GELU", "octic", 256): (46.1,),
            ("GELU", "standard", 512): (82.8,),
            ("GELU", "octic", 512): (84.7,),
            ("GELU", "standard", 1024): (155.8,),
            ("GELU", "octic", 1024): (158.8,),
            ("GELU", "standard", 2048): (302.6,),
            ("GELU", "octic", 2048): (307.0,),
            ("MLP", "standard", 256): (128.4,),
            ("MLP", "octic", 256): (142.4,),
            ("MLP", "standard", 512): (324.2,),
            ("MLP", "octic", 512): (244.4,),
            ("MLP", "standard", 1024): (1053.3,),
            ("MLP", "octic", 1024): (471.4,),
            ("MLP", "standard", 2048): (3644.9,),
            ("MLP", "octic", 2048): (1123.4,),
        },
    ),
)

# By recipe, model and family.
TRAINING: Quoted[tuple[str, str, str]] = Quoted(
    "tab:training-speed",
    f"{A100}, mixed precision",
    _rows(
        "images_per_s ratio",
        {
            ("deit3", H14, "vit"): (180, 1.00),
            ("deit3", H14, "i8"): (207, 1.15),
            ("deit3", H14, "h8"): (209, 1.16),
            ("deit3", H14, "d8"): (257, 1.43),
            ("deit3", L16, "vit"): (454, 1.00),
            ("deit3", L16, "i8"): (510, 1.12),
            ("deit3", L16, "h8"): (512, 1.13),
            ("deit3", L16, "d8"): (564, 1.24),
            ("dinov2", H16, "vit"): (94, 1.00),
            ("dinov2", H16, "i8"): (114, 1.21),
            ("dinov2", H16, "h8"): (115, 1.22),
            ("dinov2", H16, "d8"): (142, 1.51),
            ("dinov2", L16, "vit"): (184, 1.00),
            ("dinov2", L16, "i8"): (210, 1.14),
            ("dinov2", L16, "h8"): (214, 1.16),
            ("dinov2", L16, "d8"): (232, 1.26),
        },
    ),
)

# ImageNet-1K, by model and family; parameters in millions, GFLOPs are multiply-accumulates.
DEIT: Quoted[tuple[str, str]] = Quoted(
    "tab:deit",
    f"ImageNet-1K, 400 epochs; turned images by published weights where there are, which for ViT are of 800 epochs; "
    f"throughput on an {A100}, bf16, batch 64",
    _rows(
        "parameters images_per_s gmacs memory_mb top1 rotated",
        {
            (H14, "vit"): (632.1, 569, 167.8, 3285, 84.6, -12.6),
            (H14, "h2"): (474.2, 640, 127.4, 2734, 85.0, -13.4),
            (H14, "i8"): (362.3, 657, 104.0, 2249, 84.7, 0.0),
            (H14, "h8"): (355.8, 660, 102.3, 2223, 85.0, -13.4),
            (L16, "vit"): (304.4, 1421, 61.9, 1557, 84.2, -13.4),
            (L16, "h2"): (228.3, 1610, 46.9, 1458, 84.5, -13.9),
            (L16, "i8"): (175.5, 1618, 38.5, 1210, 84.0, 0.0),
            (L16, "h8"): (171.3, 1615, 37.7, 1194, 84.5, -13.6),
        },
    ),
)

# Accuracy on ImageNet-1K and mean IoU on ADE20K and VOC 2012, by data set, model and family.
DINOV2: Quoted[tuple[str, str, str]] = Quoted(
    "tab:dinov2",
    "ImageNet-1K, 125,000 steps",
    _rows(
        "gmacs linear knn",
        {
            ("imagenet", H16, "vit"): (127.7, 81.7, 81.0),
            ("imagenet", H16, "h2"): (97.0, 81.9, 80.9),
            ("imagenet", H16, "i8"): (77.7, 81.9, 80.9),
            ("imagenet", H16, "h8"): (77.5, 82.2, 81.4),
            ("imagenet", L16, "vit"): (61.9, 80.9, 80.5),
            ("imagenet", L16, "h2"): (46.9, 81.3, 80.7),
            ("imagenet", L16, "i8"): (38.5, 81.2, 80.4),
            ("imagenet", L16, "h8"): (37.7, 81.3, 80.8),
            ("ade20k", H16, "vit"): (127.7, 34.7, 30.6),
            ("ade20k", H16, "h2"): (97.0, 34.8, 30.8),
            ("ade20k", H16, "i8"): (77.7, 33.9, 29.2),
            ("ade20k", H16, "h8"): (77.5, 35.1, 31.1),
            ("ade20k", L16, "vit"): (61.9, 33.2, 28.4),
            ("ade20k", L16, "h2"): (46.9, 33.4, 29.0),
            ("ade20k", L16, "i8"): (38.5, 32.6, 28.0),
            ("ade20k", L16, "h8"): (37.7, 33.6, 29.4),
            ("voc2012", H16, "vit"): (127.7, 70.7, 60.9),
            ("voc2012", H16, "h2"): (97.0, 70.7, 61.2),
            ("voc2012", H16, "i8"): (77.7, 70.6, 61.2),
            ("voc2012", H16, "h8"): (77.5, 70.8, 61.7),
            ("voc2012", L16, "vit"): (61.9, 69.1, 58.1),
            ("voc2012", L16, "h2"): (46.9, 69.3, 58.0),
            ("voc2012", L16, "i8"): (38.5, 70.0, 59.6),
            ("voc2012", L16, "h8"): (37.7, 69.1, 59.5),
        },
    ),
)

# Accuracy of the same models on other data. These numbers are, cell by cell, those that the other table has for
# ImageNet-1K and ADE20K.
DINOV2_MORE: Quoted[tuple[str, str, str]] = Quoted(
    "tab:dinov2-additional-eval",
    DINOV2.setting,
    {
        (data, model, family): DINOV2.rows[same, model, family]
        for data, same in (("inaturalist", "imagenet"), ("places365", "ade20k"))
        for model in (H16, L16)
        for family in ("vit", "i8", "h8")
    },
)

INVARIANTS: Quoted[str] = Quoted(
    "tab:ablations",
    "D8(ViT-L/16), ImageNet-1K, 400 epochs",
    _rows(
        "top1 top5",
        {
            "linear": (79.2, 94.7),
            "polynomial": (79.4, 94.8),
            "triple_correlation": (76.8, 93.7),
            "canonical": (79.5, 94.9),
            "max_filter": (77.9, 93.9),
            "power_spectrum": (79.5, 94.9),
        },
    ),
)

LIFT: Quoted[str] = Quoted(
    "sec:equi_break",
    "H8(ViT-B), ImageNet-1K",
    {"octic": {"top1": 83.0}, "free": {"top1": 82.4}},
)

# Bone marrow cells, ViT-L/16, by family; names as DinoBloom's protocol gives them.
HEMATOLOGY: Quoted[str] = Quoted(
    "tab:dinobloom",
    "ViT-L/16, bone marrow cells (BMC), 21 classes",
    _rows(
        "1-NN/weighted_f1 1-NN/accuracy 1-NN/balanced_accuracy "
        "20-NN/weighted_f1 20-NN/accuracy 20-NN/balanced_accuracy "
        "logistic/weighted_f1 logistic/accuracy logistic/balanced_accuracy",
        {
            "vit": (78.0, 78.0, 57.6, 83.1, 83.6, 54.9, 84.6, 84.7, 62.2),
            "i8": (78.1, 78.0, 61.3, 83.5, 83.9, 55.7, 85.0, 85.2, 61.9),
        },
    ),
)

# Change of accuracy from upright to 45°, ImageNet-1K, by model and family.
ROTATION: Quoted[tuple[str, str]] = Quoted(
    "tab:rotation-error",
    "ImageNet-1K",
    _rows(
        "change",
        {
            (H16, "vit"): (-13.1,),
            (H16, "i8"): (-5.4,),
            (H16, "h8"): (-13.5,),
            (L16, "vit"): (-13.3,),
            (L16, "i8"): (-5.7,),
            (L16, "h8"): (-13.6,),
        },
    ),
)

# The width from which on an octic layer has the higher arithmetic intensity: 196 tokens, 2 bytes, C → 4C.
CROSSING = 3200
LINEAR_SAVING, LINEAR_WEIGHTS = 5.33, 8
# What I8 and H8 of ViT-H save of its FLOPs.
HYBRID_SAVING = 0.40


def flop_saving(n: int) -> float:
    """appendix:larger-dihedral-groups: how many times fewer FLOPs a layer of the group of order 4n needs."""
    return 4 * n**2 / (2 * n - 1)


def intensity(n: int, tokens: int, inputs: int, outputs: int, precision: int) -> float:
    """appendix:larger-dihedral-groups: FLOPs per byte of such a layer; `precision` in bytes."""
    flops = 2 * tokens * inputs * outputs / flop_saving(n)
    return flops / (precision * (tokens * inputs + inputs * outputs / (4 * n) + tokens * outputs))
