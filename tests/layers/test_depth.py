"""Stochastic depth by subsets: the same mean, the same branch where nothing is dropped, equivariant, one graph."""

from itertools import combinations

import pytest
import torch
from some_rows import rows_at
from torch import nn

from quickvit import QuickVisionTransformer, act_on_image
from quickvit.group import D2, D8, act_on_tokens
from quickvit.layers import OcticBlock, StandardBlock, depth, draw_subset
from quickvit.models import create_model
from quickvit.ops.packing import pack, unpack
from quickvit.testing import randomize

SHAPES = ((4, 6), (6, 3))


def make(kind, rate=0.5, group=D8):
    options = {"num_heads": 2, "init_values": 1.0, "qkv_bias": True, "drop_path": rate}
    block = StandardBlock(16, **options) if kind == "standard" else OcticBlock(16, **options, group=group)
    block.drop_path_subset = True
    return randomize(block).double().train()


def tokens(*shape, seed=0):
    return torch.randn(*shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["octic", "standard"])
def kind(request):
    return request.param


# ---------------------------------------------------------------------- which samples


def test_always_the_same_number_of_samples_each_equally_often():
    torch.manual_seed(0)
    counts = torch.zeros(10)
    for _ in range(3000):
        kept = draw_subset(torch.empty(10, 3, 16), 0.3)
        samples = kept.rows.chosen.view(7, 3)
        assert torch.equal(samples, 3 * (samples[:, :1] // 3) + torch.arange(3))
        assert len(samples[:, 0].unique()) == 7
        assert kept.scale.unique().tolist() == pytest.approx([10 / 7])
        assert kept.shapes == ((7, 3),)
        counts[samples[:, 0] // 3] += 1
    torch.testing.assert_close(counts / 3000, torch.full((10,), 0.7), atol=0.03, rtol=0)


def test_packed_sequences_are_kept_whole_in_each_batch():
    torch.manual_seed(0)
    x, _ = pack([tokens(4, 6), tokens(6, 3, seed=1)])
    kept = draw_subset(x, 0.4, SHAPES)
    assert kept.shapes == ((3, 6), (4, 3))
    assert kept.scale.tolist() == pytest.approx([4 / 3] * 18 + [6 / 4] * 12)
    whole = unpack(x, SHAPES)
    for part, batch in zip(unpack(kept.of(x), kept.shapes), whole, strict=True):
        found = [next(i for i, row in enumerate(batch) if torch.equal(row, sequence)) for sequence in part]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("ties", [False, True])
def test_rows_and_their_places_agree(monkeypatch, ties):
    torch.manual_seed(0)
    if ties:
        monkeypatch.setattr(torch, "rand", torch.zeros)
    for _ in range(20):
        drawn = draw_subset(torch.empty(42, 16), 0.4, SHAPES).rows
        expected = rows_at(drawn.chosen, 42)
        assert drawn.place.dtype == torch.int32
        assert torch.equal(drawn.place, expected.place)


@pytest.mark.parametrize(("rate", "kept"), [(0.7, 3), (0.05, 10), (0.19, 9), (1.0, 1)])
def test_the_share_is_rounded_down(rate, kept):
    assert len(draw_subset(torch.empty(10, 1, 16), rate).rows.chosen) == kept


# ---------------------------------------------------------------------- blocks


def every_subset(monkeypatch, number, count):
    """All subsets in turns, twice in a block."""
    chosen = list(combinations(range(number), count))
    draws = iter([torch.tensor(s) for pair in [(a, b) for a in chosen for b in chosen] for s in pair])

    def draw(x, rate, shapes=None):
        assert shapes is None
        length = x.shape[1]
        index = (length * next(draws)[:, None] + torch.arange(length)).flatten()
        scale = torch.full((count * length,), number / count, dtype=x.dtype)
        return depth.Kept(rows_at(index, number * length), scale, ((count, length),))

    monkeypatch.setattr(depth, "draw_subset", draw)
    return len(chosen) ** 2


def test_the_mean_over_all_subsets_is_the_branch(kind, monkeypatch):
    """Of attention; the second branch is not linear in what it is given, so it is left out."""
    block, x = make(kind), tokens(4, 5)
    last = block.ls2
    nn.init.zeros_(last.gamma)
    number = every_subset(monkeypatch, 4, 2)
    mean = torch.stack([block(x) for _ in range(number)]).mean(0)
    torch.testing.assert_close(mean, block.eval()(x), rtol=1e-10, atol=1e-10)


def test_those_that_are_kept_are_computed_as_ever(kind):
    """Sample by sample: x, or x plus twice a branch, first of attention and then of the MLP."""
    torch.manual_seed(1)
    block, x = make(kind), tokens(8, 5)
    found = block(x)
    for scale in (block.ls1, block.ls2):
        scale.gamma.data *= 2
    block.eval()
    gammas = block.ls1.gamma.data, block.ls2.gamma.data
    expected = []
    for first, second in ((0, 0), (1, 0), (0, 1), (1, 1)):
        block.ls1.gamma.data, block.ls2.gamma.data = gammas[0] * first, gammas[1] * second
        expected.append(block(x))
    cases = [[torch.allclose(y[i], found[i], rtol=1e-10, atol=1e-10) for y in expected] for i in range(8)]
    assert all(sum(case) == 1 for case in cases)
    assert sum(case[1] + case[3] for case in cases) == sum(case[2] + case[3] for case in cases) == 4


def test_without_a_rate_it_is_the_plain_block(kind):
    block, x = make(kind, rate=0.0), tokens(4, 5)
    torch.testing.assert_close(block(x), block.eval()(x), rtol=1e-12, atol=1e-12)
    packed, shapes = pack([tokens(4, 6), tokens(6, 3)])
    torch.testing.assert_close(block.train()(packed, shapes=shapes), block.eval()(packed, shapes=shapes))


def test_evaluation_drops_nothing(kind):
    block, x = make(kind).eval(), tokens(4, 5)
    expected = block(x)
    block.drop_path_subset = False
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_finite_differences(kind, packed):
    block = make(kind)
    x = torch.cat([tokens(4, 6).flatten(0, 1), tokens(6, 3).flatten(0, 1)]) if packed else tokens(4, 3)

    def run(x, *parameters):
        torch.manual_seed(0)
        named = dict(zip([name for name, _ in block.named_parameters()], parameters, strict=True))
        options = {"shapes": SHAPES} if packed else {}
        return torch.func.functional_call(block, named, (x,), options)

    inputs = (x.requires_grad_(), *block.parameters())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("group", [D8, D2], ids=str)
def test_octic_blocks_stay_equivariant(group):
    block, x = make("octic", group=group), tokens(4, 9)
    for g in group.elements:
        torch.manual_seed(0)
        expected = act_on_tokens(block(x), g, (3, 3), group)
        torch.manual_seed(0)
        found = block(act_on_tokens(x, g, (3, 3), group))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_random_numbers_are_those_of_the_generator(kind):
    block, x = make(kind), tokens(6, 3)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(block(x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


# ---------------------------------------------------------------------- models


def vit(family, **options):
    options = {"img_size": 24, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, **options}
    return randomize(
        QuickVisionTransformer(
            family=family,
            drop_path_rate=0.5,
            drop_path_subset=True,
            init_values=1.0,
            dynamic_img_size=True,
            num_classes=3,
            **options,
        )
    ).double()


@pytest.mark.parametrize("family", ["d8", "i8"])
def test_models_stay_invariant_in_training(family):
    model = vit(family, uniform_drop_path=True).train()
    x = torch.randn(4, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for g in D8.elements:
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(model(act_on_image(x, g)), expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(model(x), expected)


def test_a_packed_pass_drops_as_its_batches_do(monkeypatch):
    """The rates of the blocks rise from 0, so the first leaves its branch to the second."""
    model = vit("h8").train()
    generator = torch.Generator().manual_seed(0)
    crops = [torch.randn(n, 3, s, s, dtype=torch.float64, generator=generator) for n, s in ((4, 24), (6, 8))]

    # The first samples of each batch.
    monkeypatch.setattr(torch, "rand", lambda number, device: torch.arange(number, device=device))
    packed = model.forward_crops(crops)
    for found, crop in zip(packed, crops, strict=True):
        torch.testing.assert_close(found, model.forward_features(crop), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(packed[0], model.eval().forward_features(crops[0]))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_of_constant_shapes(backend):
    torch.compiler.reset()
    model = vit("h8", depth=2).float().train()
    crops = [torch.randn(4, 3, 24, 24), torch.randn(6, 3, 8, 8)]
    compiled = torch.compile(model.forward_crops, fullgraph=True, dynamic=False, backend=backend)
    # The draws of a compiled graph are its own where inductor makes them; those of aot_eager are PyTorch's.
    torch.manual_seed(0)
    found = compiled(crops)
    torch.manual_seed(0)
    for a, b in zip(found, model.forward_crops(crops), strict=True):
        assert a.isfinite().all()
        if backend == "aot_eager":
            torch.testing.assert_close(a, b)
    sum(x.square().sum() for x in found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_recomputed_blocks_draw_the_same():
    model = vit("h8").train()
    x = torch.randn(4, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(model(x).square().sum(), model.patch_embed.weight)[0])
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_standard_vits_have_blocks_that_take_subsets_and_packed_sequences():
    for name in ("baseline_tiny_patch16_224", "vit_tiny_patch16_224"):
        model = create_model(name, depth=2)
        assert all(type(block) is StandardBlock for block in model.blocks)
    rare = create_model("vit_tiny_patch16_224", depth=2, block_fn=Rare)
    assert all(type(block) is Rare for block in rare.blocks)


class Rare(StandardBlock.__base__):
    """A block of another kind."""


def test_a_packed_standard_block_equals_that_of_each_batch():
    options = {"qk_norm": True, "scale_attn_norm": True, "init_values": 1.0, "attn_drop": 0.0}
    block = randomize(StandardBlock(16, 2, norm_layer=nn.LayerNorm, **options)).double().eval()
    batches = [tokens(4, 6), tokens(6, 3, seed=1)]
    packed, shapes = pack(batches)
    for found, batch in zip(unpack(block(packed, shapes=shapes), shapes), batches, strict=True):
        torch.testing.assert_close(found, block(batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(("samples", "rate"), [(4, 1.0), (0, 0.5)])
def test_edges(subset, samples, rate):
    """All branches dropped, and no samples at all."""
    block = OcticBlock(64, 2, drop_path=rate).train()
    block.drop_path_subset = subset
    x = torch.randn(samples, 5, 64)
    y = block(x)
    assert y.shape == x.shape
    assert y.isfinite().all()
    if rate == 1.0 and not subset:
        assert torch.equal(x, y)
