"""Each loss against plain Python in float64, and finite where others are not."""

import math

import pytest
import torch

from quickvit.recipes.dino.losses import CLOSEST, cross_entropy, dino_loss, ibot_loss, koleo_loss


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_cross_entropy(logits, target, temperature=0.1):
    """−Σ t log softmax(s / τ), number by number."""
    exponentials = [math.exp(value / temperature) for value in logits.tolist()]
    total = math.fsum(exponentials)
    return -math.fsum(t * math.log(e / total) for t, e in zip(target.tolist(), exponentials, strict=True))


def close(value, expected):
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_cross_entropy():
    logits, target = normal(7), normal(7, seed=1).softmax(-1)
    close(cross_entropy(logits, target, 0.1), plain_cross_entropy(logits, target))
    # Two targets at once.
    second = normal(7, seed=2).softmax(-1)
    both = plain_cross_entropy(logits, target) + plain_cross_entropy(logits, second)
    close(cross_entropy(logits, target + second, 0.1, mass=2), both)


@pytest.mark.parametrize(("views", "local"), [(2, 3), (2, 0), (3, 1)])
def test_dino_is_the_mean_over_pairs_of_different_views(views, local):
    images, prototypes = 4, 6
    student, small = normal(images, views, prototypes), normal(images, local, prototypes, seed=1)
    targets = normal(images, views, prototypes, seed=2).softmax(-1)
    terms = [
        plain_cross_entropy(student[b, v], targets[b, t])
        for b in range(images)
        for v in range(views)
        for t in range(views)
        if t != v
    ]
    terms += [
        plain_cross_entropy(small[b, v], targets[b, t])
        for b in range(images)
        for v in range(local)
        for t in range(views)
    ]
    pairs = views * (views - 1) + max(local * views, 1)
    close(dino_loss(student, small, targets), math.fsum(terms) / images / pairs)


def test_ibot_is_the_mean_over_views_of_the_mean_over_their_hidden_patches():
    masks = torch.tensor([[True, False, True, True], [False] * 4, [False, False, True, False]])
    logits, targets = normal(3, 4, 5), normal(3, 4, 5, seed=1).softmax(-1)
    means = [
        math.fsum(plain_cross_entropy(logits[v, p], targets[v, p]) for p in range(4) if masks[v, p])
        / max(1, int(masks[v].sum()))
        for v in range(3)
    ]
    weights = (1 / masks.sum(-1, keepdim=True).clamp(min=1).double()).expand_as(masks)[masks]
    close(ibot_loss(logits[masks], targets[masks], weights, views=3), math.fsum(means) / 3)


def test_ibot_without_hidden_patches_is_zero_and_has_gradients():
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = ibot_loss(logits, torch.zeros(0, 5), torch.zeros(0), views=2)
    loss.backward()
    assert loss == 0


def test_koleo_is_the_distance_to_the_nearest_neighbour():
    features = normal(2, 5, 3)
    terms = []
    for group in features.tolist():
        units = [[x / math.hypot(*row) for x in row] for row in group]
        for i, row in enumerate(units):
            terms.append(-math.log(min(math.dist(row, other) for j, other in enumerate(units) if j != i)))
    close(koleo_loss(features), math.fsum(terms) / len(terms))


def test_gradients_are_those_of_finite_differences():
    student, small = normal(2, 2, 4).requires_grad_(), normal(2, 3, 4, seed=1).requires_grad_()
    targets = normal(2, 2, 4, seed=2).softmax(-1)
    assert torch.autograd.gradcheck(lambda one, two: dino_loss(one, two, targets), (student, small))
    assert torch.autograd.gradcheck(koleo_loss, normal(6, 3).requires_grad_())


# ---------------------------------------------------------------------- what others stumble over


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_duplicates_and_zeros_leave_koleo_finite(dtype):
    features = (
        torch.cat([torch.ones(2, 8), torch.zeros(2, 8), normal(3, 8).float()]).to(dtype).requires_grad_()
    )
    loss = koleo_loss(features)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert features.grad.isfinite().all()
    # Duplicates count as far apart as can be told, and are not pushed.
    assert koleo_loss(torch.ones(2, 8)) == pytest.approx(-math.log(CLOSEST), rel=1e-6)
    assert (features.grad[:2] == 0).all()


def test_koleo_is_the_same_under_autocast():
    features = normal(6, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = koleo_loss(features)
    assert found == koleo_loss(features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_logits_are_compared_in_float32(dtype):
    student = normal(4, 2, 512).to(dtype).requires_grad_()
    targets = normal(4, 2, 512, seed=1).softmax(-1).float()
    loss = dino_loss(student * 60, student[:, :0], targets)
    loss.backward()
    expected = dino_loss((student * 60).float(), student[:, :0].float(), targets)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert student.grad.isfinite().all()
    torch.testing.assert_close(loss, expected)
