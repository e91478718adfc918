"""A model's images are prepared as it declares, also after its checkpoint was loaded."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from quickvit import QuickVisionTransformer, create_baseline, load_checkpoint, save_checkpoint
from quickvit.data import EvalTransform, declare_preprocessing, preprocessing


def small(**options):
    return QuickVisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, **options)


@pytest.fixture
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8))


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_base_patch32_clip_224", "quickvit_i8_tiny_patch16_224"]
)
def test_models_of_timm_see_what_timm_shows_them(name, image):
    model = timm.create_model(name, depth=1)
    expected = create_transform(**resolve_data_config({}, model=model))(image)
    torch.testing.assert_close(preprocessing(model)(image), expected, rtol=0, atol=1e-6)


def test_a_model_that_declares_nothing_sees_the_whole_image():
    for model in (small(), create_baseline("tiny", depth=1, img_size=32)):
        assert preprocessing(model) == EvalTransform((32, 32), crop_ratio=1.0)


def test_what_is_declared_comes_back_from_the_checkpoint(tmp_path):
    model = small()
    declared = EvalTransform(
        (32, 32), interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), crop_ratio=0.9
    )
    declare_preprocessing(model, declared)
    assert preprocessing(model) == declared
    save_checkpoint(model, tmp_path / "model.safetensors")
    loaded = load_checkpoint(tmp_path / "model.safetensors")
    assert preprocessing(loaded) == declared
    assert preprocessing(load_checkpoint(tmp_path / "model.safetensors", img_size=48)).size == (48, 48)
    model.save_pretrained(tmp_path / "hub")
    assert preprocessing(QuickVisionTransformer.from_pretrained(tmp_path / "hub")) == declared


def test_the_model_must_take_colours():
    with pytest.raises(ValueError, match="images are read as RGB, but the model wants 1 channels"):
        preprocessing(small(in_chans=1))
