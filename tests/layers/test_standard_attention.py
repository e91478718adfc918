"""timm's block and attention, with what octic blocks have; see also test_depth."""

import pytest
import torch
from timm.layers import Attention
from torch import nn

from quickvit.layers import StandardAttention, StandardBlock
from quickvit.models import QuickVisionTransformer
from quickvit.models.zoo import create_model
from quickvit.testing import randomize


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
        {"gated": True},
        {"attn_drop": 0.5},
    ],
)
def test_attention_is_that_of_timm(options, causal, train):
    ours, theirs = (
        randomize(kind(16, 2, **options)).double().train(train) for kind in (StandardAttention, Attention)
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    results = []
    for attention in (ours, theirs):
        torch.manual_seed(0)
        results.append(attention(x, is_causal=causal))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def hook(attention, name, see):
    getattr(attention, name).register_forward_hook(lambda module, args, y: see(y) / 2)


def replace_method(attention, name, see):
    getattr(attention, name).forward = lambda x: see(x) / 2


def replace(attention, name, see):
    setattr(attention, name, nn.LayerNorm(8, dtype=torch.float64))
    getattr(attention, name).register_forward_pre_hook(lambda module, args: see(args[0]))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
@pytest.mark.parametrize("change", [hook, replace_method, replace])
def test_what_others_put_before_attention_is_called(change, name):
    """Queries and keys of a head, as timm's attention shows them."""
    ours, theirs = (kind(16, 2).double() for kind in (StandardAttention, Attention))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    before, shapes = ours(x), []

    def see(features):
        shapes.append(features.shape)
        return features

    for attention in (ours, theirs):
        change(attention, name, see)
    after = ours(x)
    torch.testing.assert_close(after, theirs(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after, before)
    assert shapes == 2 * [(3, 2, 5, 8)]


def test_standard_vits_keep_the_attention_of_timm():
    ours = QuickVisionTransformer(family="h8", embed_dim=32, num_heads=2, depth=4, patch_size=8, img_size=16)
    assert [type(block.attn) for block in ours.blocks[2:]] == 2 * [StandardAttention]
    theirs = create_model("baseline_tiny_patch16_224", depth=2)
    assert all(type(block) is StandardBlock and type(block.attn) is Attention for block in theirs.blocks)
