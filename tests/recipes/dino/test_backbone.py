"""Crops of several sizes with hidden patches, through Quick ViTs and ViTs of timm; heads on top."""

import pytest
import timm
import torch
from timm.layers import DropPath
from torch.nn import functional

from quickvit import QuickVisionTransformer
from quickvit.models import create_model
from quickvit.recipes.dino.backbone import CropEncoder
from quickvit.recipes.dino.head import DinoHead
from quickvit.testing import randomize

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}


def encoder(name, **options):
    options = {**SMALL, "dynamic_img_size": True, **options}
    if name == "baseline":
        return CropEncoder(randomize(create_model("baseline_tiny_patch16_224", **options))).eval()
    if name == "timm":
        return CropEncoder(randomize(timm.create_model("vit_tiny_patch16_224", **options))).eval()
    return CropEncoder(randomize(QuickVisionTransformer(family=name, mask_token=True, **options))).eval()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 3, 16, 16, generator=generator), torch.randn(5, 3, 8, 8, generator=generator)


@pytest.mark.parametrize("name", ["h8", "i8", "d8", "timm", "baseline"])
def test_each_batch_of_crops_is_what_the_model_makes_of_it(name, images):
    model = encoder(name, reg_tokens=2)
    found = model(images)
    assert [tuple(tokens.shape) for tokens in found] == [(3, 3 + 16, 32), (5, 3 + 4, 32)]
    for tokens, crops in zip(found, images, strict=True):
        torch.testing.assert_close(tokens, model.vit.forward_features(crops))


@pytest.mark.parametrize("stream", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["h8", "i8", "d8", "baseline"])
def test_the_residual_stream_has_one_dtype(name, stream, images):
    model = encoder(name, init_values=0.1)
    with torch.no_grad():
        expected = model(images)
    model.train().stream = stream
    for block in model.vit.blocks:
        block.drop_path_subset, block.drop_path = True, 0.3
        block.drop_path1 = block.drop_path2 = DropPath(0.3)
    seen = []
    for block in model.vit.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    model.vit.norm.register_forward_pre_hook(lambda norm, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(images)
    assert seen == [stream or torch.float32] * 3
    sum(tokens.float().square().sum() for tokens in found).backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        for ours, exact in zip(model(images), expected, strict=True):
            torch.testing.assert_close(ours.float(), exact, atol=0.06, rtol=0)


@pytest.mark.parametrize("name", ["h8", "timm"])
def test_what_is_hidden_is_not_seen(name, images):
    model, mask = encoder(name), torch.zeros(3, 16, dtype=torch.bool)
    mask[:, [1, 6]] = True
    mask[2] = False
    other = images[0].clone()
    # Patches 1 and 6 of a grid of 4 × 4, 4 pixels each.
    other[:, :, 0:4, 4:8] = 7.0
    other[:, :, 4:8, 8:12] = -7.0
    (tokens,), (changed,) = model([images[0]], mask), model([other], mask)
    torch.testing.assert_close(tokens[:2], changed[:2])
    assert not torch.allclose(tokens[2], changed[2])
    # Only the first batch has a mask.
    assert torch.equal(model(images, mask)[1], model([images[1]])[0])


@pytest.mark.parametrize("name", ["h8", "timm"])
def test_the_token_of_hidden_patches_learns_even_where_nothing_is_hidden(name, images):
    model = encoder(name)
    token = model.mask_token if name == "timm" else model.vit.mask_token.weight
    for hidden in (True, False):
        model.zero_grad()
        mask = torch.full((3, 16), hidden)
        model(images, mask)[0].square().sum().backward()
        # DDP waits for every gradient.
        assert token.grad is not None
        assert bool(token.grad.any()) == hidden


def test_a_backbone_needs_its_tokens():
    with pytest.raises(ValueError, match="needs a class token"):
        CropEncoder(QuickVisionTransformer(**SMALL, class_token=False, global_pool="avg"))
    with pytest.raises(ValueError, match="no mask token; create it with mask_token=True"):
        CropEncoder(QuickVisionTransformer(**SMALL))


def test_any_baseline_will_do(images):
    model = CropEncoder(create_model("baseline_tiny_patch16_224", **SMALL, dynamic_img_size=True))
    assert [len(tokens) for tokens in model(images)] == [3, 5]


@pytest.mark.parametrize("name", ["h8", "i8", "d8", "baseline"])
def test_training_is_one_graph_whatever_was_drawn(name, images):
    torch.compiler.reset()
    model = encoder(name, drop_path_rate=0.4).train()
    for block in model.vit.blocks:
        block.drop_path_subset = True
    mask = torch.zeros(3, 16, dtype=torch.bool)
    seen = []

    def record(graph, _):
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=record)
    for seed in range(3):
        mask[:, seed] = True
        torch.manual_seed(seed)
        found = compiled(images, mask)
        torch.manual_seed(seed)
        for ours, plain in zip(found, model(images, mask), strict=True):
            torch.testing.assert_close(ours, plain)
    assert len(seen) == 1


# ---------------------------------------------------------------------- heads


def test_logits_are_cosines():
    head = DinoHead(32, prototypes=7, hidden=16, bottleneck=8).double()
    tokens = torch.randn(4, 32, dtype=torch.float64)
    logits = head(tokens)
    first, second, last = (head.mlp[i] for i in (0, 2, 4))
    hidden = functional.gelu(second(functional.gelu(first(tokens))))
    expected = torch.stack(
        [functional.cosine_similarity(last(hidden), p, dim=-1) for p in head.prototypes], 1
    )
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert [layer.weight.shape[0] for layer in (first, second, last)] == [16, 16, 8]


def test_the_size_of_prototypes_does_not_matter():
    head, tokens = DinoHead(8, prototypes=5, hidden=8, bottleneck=4), torch.randn(3, 8)
    before = head(tokens)
    with torch.no_grad():
        head.prototypes *= 9
    torch.testing.assert_close(head(tokens), before)


def test_prototypes_start_as_dinov2s_last_layer():
    """An nn.Linear without bias, whose rows are about 0.58 long."""
    prototypes = DinoHead(8, prototypes=1024, hidden=8).prototypes
    last = torch.nn.Linear(256, 1024, bias=False).weight
    for measure in (torch.std, torch.amax, torch.amin):
        assert measure(prototypes).item() == pytest.approx(measure(last).item(), rel=0.01)


def test_a_fresh_head_has_the_default_size_and_tells_tokens_apart():
    with torch.device("meta"):
        head = DinoHead(1024)
    assert head.prototypes.shape == (65536, 256)
    assert sum(p.numel() for p in head.mlp.parameters()) == 1025 * 2048 + 2049 * 2048 + 2049 * 256
    for width in (16, 256):
        small = DinoHead(width, hidden=width, bottleneck=width, prototypes=3)
        assert small.mlp(torch.randn(64, width)).std(0).mean() > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_zeros_and_large_tokens_are_finite(dtype):
    head, tokens = DinoHead(8, prototypes=5, hidden=8, bottleneck=4), torch.zeros(2, 8)
    tokens[1] = 1e4
    tokens.requires_grad_()
    with torch.autocast("cpu", dtype):
        logits = head(tokens)
    assert logits.isfinite().all()
    logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in head.parameters())


def test_a_head_needs_a_layer():
    with pytest.raises(ValueError, match="at least 1 layer, got 0"):
        DinoHead(8, layers=0)
