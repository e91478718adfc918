"""Modules compiled whole, or block by block."""

import pytest
import torch
from torch import nn

from quickvit.models import QuickVisionTransformer, create_model
from quickvit.recipes.dino.backbone import CropEncoder
from quickvit.train.compiling import blocks_of, compile_module

# Of PyTorch's compiler, which looks at a gradient that nobody asked for.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


class Linear(nn.Linear):
    """PyTorch 2.11 does not compile a layer of its own that is no part of another module."""

    def forward(self, x):
        return super().forward(x)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(x).relu()


class Transformer(nn.Module):
    def __init__(self, depth=6, width=8):
        super().__init__()
        self.patch_embed = Linear(3, width)
        self.drop = nn.Identity()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = LayerNorm(width)

    def forward(self, x):
        return self.norm(self.blocks(self.drop(self.patch_embed(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = Transformer()
        self.head = Linear(8, 2)

    def forward(self, x):
        return self.head(self.vit(x))


@pytest.fixture
def graphs():
    """What was compiled, by a backend that only takes notes: the numbers of operations of the graphs."""
    torch.compiler.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(
            sum(node.op in ("call_function", "call_module", "call_method") for node in graph.graph.nodes)
        )
        return graph.forward

    backend.graphs = seen
    compile_module, compile_function = nn.Module.compile, torch.compile
    # A backend has no modes.
    with torch.compiler.config.patch(recompile_limit=8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Module, "compile", lambda self, mode=None, **options: compile_module(self, **options)
        )
        patch.setattr(torch, "compile", lambda call, mode=None, **options: compile_function(call, **options))
        yield backend
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("mode", "expected"),
    # The embedding, a block for all of them, the norm and the head; or everything at once.
    [("none", []), ("default", [1 + 6 * 3 + 1 + 1]), ("blocks", [1, 3, 1, 1])],
)
def test_blocks_that_are_alike_are_compiled_once(graphs, mode, expected):
    torch.manual_seed(0)
    module, x = Encoder(), torch.randn(4, 3)
    before = module(x)
    compile_module(module, mode, **({} if mode == "none" else {"backend": graphs, "fullgraph": True}))
    torch.testing.assert_close(module(x), before)
    assert graphs.graphs == expected


@pytest.mark.parametrize("family", ["d8", "h8"])
def test_a_deep_quick_vit_is_no_more_to_compile(graphs, family):
    """And it has the same results and gradients."""
    compiled = []
    for depth in (6, 10):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = QuickVisionTransformer(
            family=family, embed_dim=64, num_heads=2, depth=depth, img_size=32, num_classes=3
        )
        x = torch.randn(2, 3, 32, 32)
        before = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        graphs.graphs.clear()
        compile_module(model, "blocks", backend=graphs, fullgraph=True, dynamic=False)
        after = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
        for found, expected in zip(after, before, strict=True):
            torch.testing.assert_close(found, expected)
        compiled.append(len(graphs.graphs))
    assert 1 < compiled[0] == compiled[1]


def test_blocks_may_all_be_different(graphs, monkeypatch):
    module = Transformer(depth=12)
    for i, block in enumerate(module.blocks):
        block.scale = 1 + i / 7
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.scale * self.fc(x).relu())
    compile_module(module, "blocks", backend=graphs, fullgraph=True, dynamic=False)
    module(torch.randn(4, 3))
    assert len(graphs.graphs) == 14


@pytest.mark.parametrize("family", ["h8", "vit"])
def test_nothing_of_the_embedding_is_left_to_python(graphs, family):
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 6, "num_heads": 2}
    options |= {"num_classes": 0, "dynamic_img_size": True}
    if family == "vit":
        encoder = CropEncoder(create_model("baseline_tiny_patch16_224", **options))
    else:
        encoder = CropEncoder(QuickVisionTransformer(family=family, mask_token=True, **options))
    crops, mask = [torch.randn(3, 3, 16, 16), torch.randn(5, 3, 8, 8)], torch.rand(3, 16) < 0.3
    expected = encoder(crops, mask)
    compile_module(encoder, "blocks", backend=graphs, fullgraph=True, dynamic=False)

    found = encoder(crops, mask)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    # The embedding, blocks that are first, last and between them, standard ones, and the norm.
    assert len(graphs.graphs) == {"h8": 6, "vit": 3}[family]
    assert graphs.graphs[0] > 20


def test_a_module_without_blocks_is_compiled_whole(monkeypatch):
    modes = []
    monkeypatch.setattr(nn.Sequential, "compile", lambda self, mode: modes.append(mode))
    compile_module(nn.Sequential(nn.Identity(), nn.ReLU()), "blocks")
    assert modes == ["reduce-overhead"]


def test_blocks_of_all_transformers():
    both = nn.ModuleList([Encoder(), Transformer(depth=2)])
    assert len(blocks_of(both)) == 8
    assert all(isinstance(block, Block) for block in blocks_of(both))
