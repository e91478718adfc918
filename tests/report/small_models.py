"""Small classifiers, and the names of their classes."""

import torch

from quickvit.models import create_model
from quickvit.testing import randomize

SMALL = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 2,
    "init_values": None,
    "global_pool": "avg",
    "class_token": False,
}
# Names come from folders, and may be anything.
CLASSES = ("cat", "</script><b>dog", 'bird & "tree"')


def small(name, **options):
    """A model whose answers depend much on the image: weights are larger than at the start of a training."""
    torch.manual_seed(0)
    model = create_model(name, **{**SMALL, "num_classes": len(CLASSES), **options})
    if name.startswith("quickvit"):
        randomize(model)
    else:
        for part, parameter in model.named_parameters():
            if "norm" not in part:
                torch.nn.init.normal_(parameter)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()
