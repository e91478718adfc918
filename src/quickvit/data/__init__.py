"""Data: sources of images, augmentation, and loaders whose batches are functions of seed and step."""

from quickvit.data.images import UNREADABLE, Unreadable, find_images, read_image
from quickvit.data.loader import Batch, EvalLoader, TooManyUnreadable, TrainLoader
from quickvit.data.masking import BlockMasking
from quickvit.data.mixing import Mixing
from quickvit.data.preprocessing import declare_preprocessing, input_size, preprocessing
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import Sample, Source, cache, mix, open_source
from quickvit.data.transforms import (
    DeiT3Transform,
    EvalTransform,
    PixelTransform,
    Transform,
    deit3_transform,
    eval_transform,
)
from quickvit.data.views import (
    MultiCrop,
    ViewBatch,
    ViewLoader,
    ViewTransform,
    dinobloom_views,
    dinov2_views,
)

__all__ = [
    "UNREADABLE",
    "Batch",
    "BlockMasking",
    "DeiT3Transform",
    "EvalLoader",
    "EvalTransform",
    "Mixing",
    "MultiCrop",
    "PixelTransform",
    "Sample",
    "Source",
    "TooManyUnreadable",
    "TrainLoader",
    "Transform",
    "Unreadable",
    "ViewBatch",
    "ViewLoader",
    "ViewTransform",
    "cache",
    "declare_preprocessing",
    "deit3_transform",
    "derived_seed",
    "dinobloom_views",
    "dinov2_views",
    "eval_transform",
    "find_images",
    "input_size",
    "mix",
    "open_source",
    "preprocessing",
    "read_image",
]
