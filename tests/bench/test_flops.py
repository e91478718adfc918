"""Parameters and MACs: the published numbers, and that counting is what it claims to be."""

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from quickvit import QuickVisionTransformer, create_baseline
from quickvit.bench import Variant, count, variants
from quickvit.bench.flops import PARTS

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 5}

# Size, patch size, family, invariant, millions of parameters (unpublished for H/16), GMACs.
PUBLISHED = [
    ("large", 16, "vit", None, 304.4, 61.6),
    ("large", 16, "h8", None, 171.3, 37.4),
    ("large", 16, "i8", "polynomial", 175.5, 38.2),
    ("large", 16, "i8", "power_spectrum", 172.1, 37.5),
    ("huge", 14, "vit", None, 632.1, 167.3),
    ("huge", 14, "h8", None, 355.8, 101.6),
    ("huge", 14, "i8", "polynomial", 362.3, 103.3),
    ("huge", 14, "i8", "power_spectrum", 357.0, 101.9),
    ("huge", 16, "h8", None, None, 77.0),
    ("huge", 16, "i8", "power_spectrum", None, 77.2),
]


@pytest.mark.parametrize(("size", "patch", "family", "invariant", "millions", "gmacs"), PUBLISHED)
def test_published_numbers(size, patch, family, invariant, millions, gmacs):
    cost = Variant(family, size, patch, invariant).cost()
    if millions is not None:
        assert round(cost.parameters / 1e6, 1) == millions
    assert cost.macs / 1e9 == pytest.approx(gmacs, rel=0.01)
    assert cost.flops == 2 * cost.macs


@pytest.mark.parametrize(
    "variant", list(variants(size="tiny", patch_size=16)), ids=lambda v: f"{v.name}-{v.invariant}"
)
def test_the_cost_of_a_variant_is_the_count_of_its_model(variant):
    with torch.device("meta"):
        model = variant.create()
    assert variant.cost() == count(model)
    assert variant.cost().parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["d8", "i8", "h8"])
def test_tracing_on_the_meta_device_counts_what_a_real_forward_does(family):
    model = QuickVisionTransformer(family=family, depth=2, **SMALL).eval()
    # Not every release of PyTorch counts its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32))
    assert count(model).flops == counter.get_total_flops()
    assert "quickvit.octic_linear" in {str(op) for op in counter.get_flop_counts()["Global"]}


def test_parts_by_hand():
    tokens, patch, width, hidden, classes = 17, 8, 64, 256, 5
    parts = {
        p.name: p for p in count(QuickVisionTransformer(family="i8", depth=3, octic_depth=2, **SMALL)).parts
    }
    linear = tokens * (4 * width * width + 2 * width * hidden)
    attention = 2 * tokens**2 * width
    assert list(parts) == list(PARTS)
    assert parts["lift"].macs == 16 * 3 * patch**2 * width
    assert parts["octic_blocks"].macs == 2 * (linear * 3 // 16 + attention)
    assert parts["invariant"].macs == tokens * (width * 3 // 4) * width
    assert parts["standard_blocks"].macs == linear + attention
    assert parts["head"].macs == width * classes
    assert parts["head"].parameters == 2 * width + (width + 1) * classes
    assert parts["invariant"].parameters == (width * 3 // 4 + 1) * width


def test_counting_leaves_the_model_alone_and_takes_another_size():
    model = create_baseline("tiny", depth=1, img_size=32, dynamic_img_size=True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert count(model, (32, 64)).macs > count(model).macs
    assert count(model, 32) == count(model)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert model.training


def test_only_vision_transformers_are_counted():
    with torch.device("meta"):
        model = timm.create_model("resnet10t")
    with pytest.raises(ValueError, match="got ResNet"):
        count(model)


def test_variants_are_selected_by_family_size_and_patch():
    names = [variant.name for variant in variants("i8", "large")]
    assert names == [f"quickvit_i8_large_patch{patch}_224" for patch in (14, 14, 16, 16)]
    assert {v.invariant for v in variants("i8")} == {"power_spectrum", "polynomial"}
    assert set(timm.list_models("quickvit*")) <= {variant.name for variant in variants()}
    for options, message in [
        ({"family": "h9"}, "unknown family 'h9'; expected one of vit, d8, i8, h8, h2"),
        ({"size": "vast"}, "unknown size 'vast'"),
        ({"patch_size": 3}, "unknown patch size 3; expected one of 14, 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(variants(**options))
