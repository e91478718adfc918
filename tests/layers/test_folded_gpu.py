"""Folded blocks on a CUDA device: errors against float64, compiled models, CUDA graphs, memory."""

import copy

import pytest
import torch
from timm.utils import reparameterize_model
from torch._dynamo.utils import counters

from quickvit import QuickVisionTransformer
from quickvit.layers import OcticBlock
from quickvit.ops import hopper, plain
from quickvit.testing import randomize
from quickvit.train.compiling import compile_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    """Kernels that are for many images run with these few."""
    monkeypatch.setattr(hopper, "MANY_ENTRIES", 0)


def relative(actual, reference):
    """Relative error."""
    assert actual.isfinite().all()
    return ((actual.double() - reference).norm() / reference.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("width", "heads", "tokens"),
    [(1024, 16, 197), (1280, 16, 257), (1280, 16, 37), (1664, 16, 257), (512, 4, 1), (768, 12, 1023)],
)
def test_error_of_a_branch_is_at_most_twice_the_blocks(width, heads, tokens, dtype):
    """Of tokens that are not centred, and twice, since kernels for Hopper run from the second time on."""
    torch.manual_seed(0)
    net = randomize(OcticBlock(width, heads, init_values=1.0)).eval().to(DEVICE)
    means = torch.randn(8, device=DEVICE).repeat_interleave(width // 8)
    x = (torch.randn(4, tokens, width, device=DEVICE) + means).to(dtype)
    with plain():
        exact = copy.deepcopy(net).double()(x.double()) - x.double()
    folded = copy.deepcopy(net).fuse().to(dtype)
    net.to(dtype)
    for _ in range(2):
        ours, theirs = (module(x).double() - x.double() for module in (folded, net))
        assert relative(ours, exact) <= 2 * relative(theirs, exact) + 4 * torch.finfo(dtype).eps


def model(family, **options):
    options = {"embed_dim": 1024, "num_heads": 16, "depth": 4, "img_size": 224, **options}
    return randomize(QuickVisionTransformer(family=family, init_values=1.0, **options))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead", "blocks"])
@pytest.mark.parametrize("family", ["d8", "h8"])
def test_compiled_models_compute_the_same(family, mode):
    net = model(family).to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(8, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)
    expected, folded = net(x), reparameterize_model(net)
    torch._dynamo.reset()
    counters.clear()
    compile_module(folded, mode, **({} if mode == "blocks" else {"fullgraph": True}))
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        result = folded(x).clone()
        assert relative(result, expected.double()) < 0.05
    assert not counters["inductor"]["cudagraph_skips"]


@torch.no_grad()
@pytest.mark.parametrize(("width", "heads"), [(1280, 16), (1664, 16)])
def test_folded_models_take_no_more_memory(width, heads):
    net = model("d8", embed_dim=width, num_heads=heads, mlp_ratio=2, patch_size=14, num_classes=0)
    net = net.to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(64, 3, 224, 224, device=DEVICE, dtype=torch.bfloat16)

    def used(module):
        module(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module(x)
        return torch.cuda.max_memory_allocated() - before

    assert used(reparameterize_model(net)) <= 1.01 * used(net)


@torch.no_grad()
def test_under_autocast_it_is_a_block_without_gains():
    net = model("d8").to(DEVICE).eval()
    folded, x = reparameterize_model(net), torch.randn(8, 3, 224, 224, device=DEVICE)
    expected = net(x)
    assert relative(folded(x), expected.double()) < 1e-4
    with torch.autocast("cuda", torch.bfloat16):
        assert relative(folded(x), expected.double()) < 0.05
