"""Images of several sizes in one packed pass give what separate passes give."""

import pytest
import torch

from quickvit import QuickVisionTransformer
from quickvit.layers import sample_scale
from quickvit.testing import randomize


def make(family, **options):
    options = {"embed_dim": 64, "depth": 4, "num_heads": 2, "patch_size": 8, "img_size": 48, **options}
    model = QuickVisionTransformer(
        family=family, init_values=1.0, dynamic_img_size=True, num_classes=0, mask_token=True, **options
    )
    return randomize(model).double()


def crops():
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randn(n, 3, s, s, generator=generator, dtype=torch.float64) for n, s in ((3, 48), (5, 24))
    ]
    return images, [torch.rand(3, 36, generator=generator) < 0.4, None]


@pytest.mark.parametrize(
    "options", [{}, {"reg_tokens": 2}, {"class_token": False, "global_pool": "avg"}], ids=str
)
@pytest.mark.parametrize("family", ["d8", "i8", "h8", "h2"])
def test_one_pass_equals_separate_passes(family, options):
    model = make(family, **options)
    images, masks = crops()
    packed = model.forward_crops(images, masks)
    separate = [model.forward_features(x, mask) for x, mask in zip(images, masks, strict=True)]
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    assert_same_gradients(model, packed, separate, 1e-8)


def assert_same_gradients(model, packed, separate, tolerance):
    """Of every parameter before the head."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = [
        torch.autograd.grad(sum(x.square().mean() for x in outputs), parameters, allow_unused=True)
        for outputs in (packed, separate)
    ]
    for name, a, b in zip(names, *grads, strict=True):
        assert (a is None) == (b is None) == name.startswith(("head", "fc_norm")), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["d8", "i8", "h8", "h2"])
def test_one_pass_equals_separate_passes_in_float32(family):
    model = make(family, embed_dim=384, num_heads=6, img_size=96, patch_size=16).float().eval()
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(n, 3, s, s, generator=generator) for n, s in ((2, 96), (8, 48))]
    masks = [torch.rand(2, 36, generator=generator) < 0.4, None]
    packed = model.forward_crops(images, masks)
    separate = [model.forward_features(x, mask) for x, mask in zip(images, masks, strict=True)]
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, packed, separate, 1e-5)


@pytest.mark.parametrize("family", ["d8", "h8"])
def test_stochastic_depth_drops_whole_sequences(family):
    model = make(
        family,
        depth=2,
        octic_depth=2 if family == "d8" else 1,
        drop_path_rate=1 - 1e-9,
        uniform_drop_path=True,
    )
    images, _ = crops()
    model.train()
    # Every branch is dropped, so that the blocks are the identity.
    x = [model._embed(image)[0] for image in images]
    expected = [model.norm(model._leave(tokens)) for tokens in x]
    for a, b in zip(model.forward_crops(images), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_stochastic_depth_keeps_the_mean():
    torch.manual_seed(0)
    shapes = ((200, 3), (300, 2))
    scale = sample_scale(torch.empty(1200, 8), 0.25, True, shapes)
    first, second = scale[:600].view(200, 3), scale[600:].view(300, 2)
    assert (first == first[:, :1]).all()
    assert (second == second[:, :1]).all()
    assert scale.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert scale.mean().item() == pytest.approx(1, abs=0.1)


def test_checkpointed_and_compiled_passes_agree():
    torch.compiler.reset()
    model = make("h8")
    images, _ = crops()
    expected = model.forward_crops(images)
    model.set_grad_checkpointing()
    for a, b in zip(model.forward_crops(images), expected, strict=True):
        torch.testing.assert_close(a, b)
    model.set_grad_checkpointing(False)
    compiled = torch.compile(model.forward_crops, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(images), expected, strict=True):
        torch.testing.assert_close(a, b)
