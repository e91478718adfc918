"""DinoBloom: fine-tuning of a DINOv2 backbone on images of blood cells.

Values are those of DinoBloom's configuration, and of Quick ViTs where it says more (4,000 updates); the rest is as in
DINOv2. Unlike there, one head serves class tokens and patches, as in the DINOv2 of Quick ViTs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quickvit.data import EvalTransform, Source
from quickvit.evaluate.classification import Splits, fit_hematology
from quickvit.evaluate.extract import Features
from quickvit.recipes.dino.progress import scores
from quickvit.recipes.dinov2 import Dinov2, Dinov2Config, ViewsName, resolve
from quickvit.recipes.run import carry_out
from quickvit.train import Outcome, World

# Quick ViTs: 4,000 updates. DinoBloom: the rest.
SPEED: dict[str, Any] = {"steps": 4000, "learning_rate": 2e-4, "momentum": 0.994, "centering": "sinkhorn"}
# Quick ViTs used 8 GPUs of 40 GB, for which DinoBloom's configuration names 40 images of a ViT-L each.
GROUP = 40
DEFAULTS: dict[str, Any] = {**SPEED, "batch_size": 8 * GROUP}


@dataclass(frozen=True)
class DinobloomConfig(Dinov2Config):
    """Fine-tune a backbone (`finetune`) on weighted folders of cells (`data`) by DinoBloom's recipe.

    It is evaluated before and after by DinoBloom's protocol, on the train and test split of `labelled`.
    """

    EVALUATIONS: ClassVar[int] = 1

    views: ViewsName = "dinobloom"
    """How views are augmented: in all eight poses, without grayscale and solarisation."""
    local_views: int = 0
    """Local views of an image; DinoBloom leaves out the loss between global and local views."""
    layer_decay: float = 1.0
    """Factor of the learning rate from a layer to the one below (DinoBloom)."""
    final_weight_decay: float = 0.2
    """At the end of a cosine (DinoBloom)."""
    group: int | None = None
    """So many consecutive images share a draw of masks, and seek their neighbours for KoLeo among themselves: 40, as
    a GPU has in DinoBloom, or what of 64 divides the batch."""

    def defaults(self, width: int) -> dict[str, Any]:
        """DinoBloom's values; with the small preset its sizes, and what decides how fast a checkpoint changes."""
        kept = SPEED if self.preset == "small" else DEFAULTS
        return {**super().defaults(width), **kept}

    def images_of_gpu(self, width: int) -> int:
        """40, as in DinoBloom's configuration; with the small preset as in DINOv2."""
        return super().images_of_gpu(width) if self.preset == "small" else GROUP


def train(config: DinobloomConfig, command: str = "") -> Outcome:
    """Fine-tune by DinoBloom's recipe, from the start or from where the run folder's checkpoints end."""
    if config.finetune is None:
        raise ValueError(
            "DinoBloom fine-tunes a backbone: give its checkpoint with --finetune, or train by dinov2"
        )
    return carry_out(config, resolve, Dinobloom, command)


class Dinobloom(Dinov2):
    """DINOv2, judged by DinoBloom's protocol."""

    name = "dinobloom"

    def eval_transform(self) -> EvalTransform:
        """The whole image, squeezed into a square."""
        return EvalTransform(self.config.img_size, crop_mode="squash")

    def tested(self, splits: Splits) -> Source:
        """The test split, for what is compared before and after."""
        return splits.test

    def judge(self, train: Features, test: Features, world: World) -> dict[str, float]:
        """Weighted F1, accuracy and balanced accuracy of 1 and 20 neighbours and of logistic regression."""
        return scores(fit_hematology(train, device=world.device, world=world), test)
