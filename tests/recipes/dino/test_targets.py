"""Targets: Sinkhorn–Knopp and centres against plain Python in float64, whatever the cut into passes and ranks."""

import math

import pytest
import torch

from quickvit.recipes.dino.targets import RECENT, Logits, Targets, assign, sinkhorn, sums
from quickvit.train import World

ALONE = World()


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(value, expected):
    torch.testing.assert_close(value, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def assigned_by_sinkhorn(logits, temperature, counted=None, **options):
    return assign(logits, sinkhorn(logits, temperature, counted=counted, **options), temperature)


def plain_sinkhorn(logits, temperature, iterations=3):
    """DINOv2's rule: prototypes scaled to 1 / K, samples to 1 / B, in turns."""
    q = [[math.exp(x / temperature) for x in row] for row in logits.tolist()]
    rows, columns = len(q), len(q[0])
    total = math.fsum(map(math.fsum, q))
    q = [[x / total for x in row] for row in q]
    for _ in range(iterations):
        sums = [math.fsum(row[k] for row in q) for k in range(columns)]
        q = [[x / sums[k] / columns for k, x in enumerate(row)] for row in q]
        q = [[x / math.fsum(row) / rows for x in row] for row in q]
    return [[x * rows for x in row] for row in q]


@pytest.mark.parametrize("temperature", [0.04, 0.07])
@pytest.mark.parametrize("shape", [(6, 4), (3, 9)], ids=str)
def test_sinkhorn_is_the_plain_rule(shape, temperature):
    logits = torch.nn.functional.normalize(normal(*shape), dim=-1)
    close(assigned_by_sinkhorn(logits, temperature), plain_sinkhorn(logits, temperature))


def test_sinkhorn_uses_prototypes_equally():
    assigned = assigned_by_sinkhorn(normal(64, 8), 0.5, iterations=50)
    close(assigned.sum(1), torch.ones(64))
    close(assigned.sum(0), torch.full((8,), 8.0))


def test_rows_that_do_not_count_change_nothing():
    logits = normal(7, 5)
    counted = torch.tensor([True, True, False, True, False, True, True])
    logits[~counted] = 100.0
    close(sinkhorn(logits, 0.1, counted=counted), sinkhorn(logits[counted], 0.1))


@pytest.mark.parametrize("counted", [None, torch.zeros(3, dtype=torch.bool)])
def test_sinkhorn_of_nothing(counted):
    logits = torch.zeros(0, 4) if counted is None else torch.zeros(3, 4)
    shift = sinkhorn(logits, 0.1, counted=counted)
    assert shift.isfinite().all()
    assert len(shift.unique()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sinkhorn_of_cosines_at_a_low_temperature_is_finite(dtype):
    logits = normal(8, 16).sign().to(dtype)
    assigned = assigned_by_sinkhorn(logits, 0.025)
    assert assigned.dtype == torch.float32
    assert assigned.isfinite().all()
    torch.testing.assert_close(assigned.sum(1), torch.ones(8))


# ---------------------------------------------------------------------- centres


def plain_softmax(row, center, temperature):
    exponentials = [math.exp((x - c) / temperature) for x, c in zip(row, center, strict=True)]
    return [e / math.fsum(exponentials) for e in exponentials]


def plain_mean(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def test_centring_is_the_plain_rule_over_several_updates():
    targets = Targets(5, "softmax", torch.float64)
    class_center, patch_center = [0.0] * 5, [0.0] * 5
    for step in range(4):
        classes, patches = normal(6, 5, seed=step), normal(4, 5, seed=10 + step)
        counted = torch.tensor([True, step % 2 == 0, True, False])
        found = assign(classes, targets.shift(classes, "class", 0.05, ALONE), 0.05)
        hidden = assign(patches, targets.shift(patches, "patch", 0.07, ALONE, counted), 0.07)
        close(found, [plain_softmax(row, class_center, 0.05) for row in classes.tolist()])
        close(hidden, [plain_softmax(row, patch_center, 0.07) for row in patches.tolist()])
        # In two passes, as a batch that does not fit into memory.
        targets.begin()
        for part in (slice(0, 2), slice(2, None)):
            targets.observe(sums(classes[part], found[part], patches[part], counted[part]))
        targets.update(step, ALONE)
        for center, rows in ((class_center, classes), (patch_center, patches[counted])):
            mean = plain_mean(rows.tolist())
            center[:] = [0.9 * c + 0.1 * m for c, m in zip(center, mean, strict=True)]
        close(targets.class_center, class_center)
        close(targets.patch_center, patch_center)
        assert targets.updates == step + 1


def test_without_hidden_patches_their_centre_stays():
    targets = Targets(3, "softmax", torch.float64)
    targets.patch_center.copy_(torch.tensor([1.0, 2.0, 3.0]))
    rows = normal(2, 3)
    for patches, counted in (
        (rows, torch.zeros(2, dtype=torch.bool)),
        (rows[:0], torch.zeros(0, dtype=torch.bool)),
    ):
        targets.observe(sums(rows, rows.softmax(-1), patches, counted))
        targets.update(0, ALONE)
    assert targets.patch_center.tolist() == [1.0, 2.0, 3.0]


def test_an_update_that_is_left_out_leaves_no_trace():
    targets = Targets(3, "softmax", torch.float64)
    broken, counted = torch.full((2, 3), torch.nan, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    targets.observe(sums(broken, broken, broken, counted))
    targets.begin()
    rows = normal(2, 3)
    targets.observe(sums(rows, rows.softmax(-1), rows, counted))
    targets.update(1, ALONE)
    close(targets.class_center, 0.1 * rows.mean(0))


def test_what_was_observed_is_copied():
    """A CUDA graph writes its next results over these."""
    targets, rows, counted = (
        Targets(3, "softmax", torch.float64),
        normal(2, 3),
        torch.ones(2, dtype=torch.bool),
    )
    seen = sums(rows, rows.softmax(-1), rows, counted)
    targets.observe(seen)
    seen.fill_(torch.nan)
    targets.update(0, ALONE)
    close(targets.class_center, 0.1 * rows.mean(0))


def test_without_centring_targets_are_a_softmax():
    logits = normal(4, 3)
    shift = Targets(3, "none", torch.float64).shift(logits, "class", 0.1, ALONE)
    close(assign(logits, shift, 0.1), (logits / 0.1).softmax(-1))


# ---------------------------------------------------------------------- the use of prototypes


def test_use_of_prototypes():
    targets = Targets(4, "none", torch.float64)
    counted = torch.zeros(0, dtype=torch.bool)
    assert targets.numbers(0)["prototype_entropy"] == pytest.approx(1)
    assert targets.numbers(0)["prototypes_used"] == 0
    single = torch.nn.functional.one_hot(torch.tensor([2, 2, 1]), 4).double()
    for step in range(500):
        targets.observe(sums(single, single if step else single.roll(1, -1), single[:0], counted))
        targets.update(step, ALONE)
    # Lately two thirds of one and a third of another, and 3 is long ago.
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)) / math.log(4)
    assert targets.numbers(500)["prototype_entropy"].item() == pytest.approx(expected, abs=1e-10)
    assert targets.numbers(499)["prototypes_used"] == 2
    assert targets.numbers(RECENT - 1)["prototypes_used"] == 3


# ---------------------------------------------------------------------- the student


def logits(classes, patches, local):
    return Logits(
        torch.cat([classes.flatten(0, 1), patches, local.flatten(0, 1)]), classes.shape[:2], len(patches)
    )


@pytest.mark.parametrize("local_views", [0, 3])
def test_parts_of_logits(local_views):
    given = normal(2, 2, 5, seed=3), normal(4, 5, seed=4), normal(2, local_views, 5, seed=5)
    for part, expected in zip(logits(*given).parts(), given, strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("centering", ["softmax", "sinkhorn", "none"])
def test_a_student_is_compared_with_the_targets(centering):
    """Pair by pair in plain loops, on logits of which some patches do not count."""
    targets = Targets(5, centering, torch.float64)
    targets.class_center.copy_(normal(5, seed=1))
    targets.patch_center.copy_(normal(5, seed=2))
    student = logits(normal(2, 2, 5, seed=3), normal(4, 5, seed=4), normal(2, 3, 5, seed=5))
    teacher = logits(normal(2, 2, 5, seed=6), normal(4, 5, seed=7), normal(2, 0, 5))
    views, guesses, local = student.parts()
    taught, hidden, _ = teacher.parts()
    counted, weights = torch.tensor([True, True, True, False]), torch.tensor([0.5, 0.5, 1.0, 0.0]).double()
    shifts = (
        targets.shift(taught.flatten(0, 1), "class", 0.3, ALONE),
        targets.shift(hidden, "patch", 0.3, ALONE, counted),
    )
    found = targets(student, teacher, shifts, 0.3, weights, counted)

    def entropy(logits, target):
        return -(target * (logits / 0.1).log_softmax(-1)).sum()

    classes = assign(taught, shifts[0], 0.3)
    pairs = [
        entropy(logits, classes[image, view])
        for image in range(2)
        for view in range(2)
        for logits in (views[image, 1 - view], *local[image])
    ]
    close(found.dino, sum(pairs) / len(pairs))
    patches = assign(hidden, shifts[1], 0.3)
    close(found.ibot, sum(w * entropy(s, t) for w, s, t in zip(weights, guesses, patches, strict=True)) / 4)
    first, second = classes[:, 0], classes[:, 1]
    same = [
        views[:, 0].argmax(-1) == second.argmax(-1),
        views[:, 1].argmax(-1) == first.argmax(-1),
    ]
    close(found.agreement, torch.stack(same).double().mean())
    close(found.target_entropy, -(classes * classes.log()).sum(-1).mean() / math.log(5))
    close(found.seen[5:10], hidden[:3].sum(0))
    assert found.seen[-2:].tolist() == [4, 3]


def test_compiled_it_is_the_same():
    """As one graph, with gradients, whatever the temperature."""
    torch.compiler.reset()
    targets = Targets(7, "softmax")
    teacher = logits(*(normal(*shape, 7).float() for shape in ((2, 2), (4,), (2, 0))))
    shifts = torch.zeros(7), torch.ones(7)
    compiled = torch.compile(targets, fullgraph=True, backend="aot_eager")
    for temperature in (0.1, 0.2, 0.3):
        given = shifts, torch.tensor(temperature), torch.ones(4), torch.ones(4, dtype=torch.bool)
        results = []
        for function in (compiled, targets):
            student = logits(*(normal(*shape, 7, seed=1).float() for shape in ((2, 2), (4,), (2, 3))))
            student.rows.requires_grad_()
            found = function(student, teacher, *given)
            (found.dino + found.ibot).backward()
            results.append([*found, student.rows.grad])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
