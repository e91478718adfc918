"""A grid of linear probes, trained at once, equals the training of each alone with PyTorch's own parts."""

import pytest
import torch
from torch import nn

from quickvit.evaluate.linear import (
    LEARNING_RATES,
    Probe,
    Probes,
    ProbeTraining,
    probe_grid,
    train_probes,
)
from quickvit.evaluate.selection import hold_out

TRAINING = ProbeTraining(steps=40, batch_size=32, seed=3)


@pytest.fixture
def data():
    """Features of 150 samples of five classes in the arrays that a ViT gives, and the labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (150,), generator=generator)
    options = {"generator": generator, "dtype": torch.float64}
    names = ("class_1", "class_2", "class_3", "class_4", "average")
    return {
        name: torch.randn(5, 6, **options)[labels] + torch.randn(150, 6, **options) for name in names
    }, labels


def test_the_grid_is_that_of_dinov2(data):
    grid = probe_grid(data[0])
    assert len(grid) == 4 * len(LEARNING_RATES) == 52
    layers = tuple(f"class_{i}" for i in (4, 3, 2, 1))
    assert list(dict.fromkeys(probe.inputs for probe in grid)) == [
        ("class_1",),
        ("class_1", "average"),
        layers,
        (*layers, "average"),
    ]


def test_the_grid_of_fewer_features(data):
    assert {p.inputs for p in probe_grid({"class_1": ..., "average": ...})} == {
        ("class_1",),
        ("class_1", "average"),
    }
    assert {p.inputs for p in probe_grid({"average": ...})} == {("average",)}


def test_the_grid_equals_separate_training(data):
    grid = probe_grid(data[0], (0.01, 0.3))
    together = train_probes(*data, 5, grid, TRAINING)
    predicted = together.predict(data[0])
    for i, probe in enumerate(grid):
        alone = train_probes(*data, 5, [probe], TRAINING)
        group = next(g for g in together.groups if g.inputs == probe.inputs)
        place = [p for p in grid if p.inputs == probe.inputs].index(probe)
        torch.testing.assert_close(group.weight[place], alone.groups[0].weight[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(group.bias[place], alone.groups[0].bias[0], rtol=1e-10, atol=1e-12)
        assert torch.equal(predicted[i], alone.predict(data[0])[0])


def test_a_probe_is_trained_as_pytorch_would(data):
    arrays, labels = data
    probe = Probe(("class_1", "average"), 0.3)
    trained = train_probes(arrays, labels, 5, [probe], TRAINING)

    x = torch.cat([arrays["class_1"], arrays["average"]], 1)
    layer = nn.Linear(12, 5).double()
    start = Probes([probe], arrays, 5, TRAINING.seed).groups[0]
    assert start.weight.std() == pytest.approx(0.01, rel=0.3)
    layer.weight.data[:], layer.bias.data[:] = start.weight[0], 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3 * 32 / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TRAINING.steps)
    from quickvit.evaluate.linear import _batches

    for batch in _batches(150, 32, TRAINING):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(x[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(trained.groups[0].weight[0], layer.weight.detach(), rtol=1e-8, atol=1e-10)
    assert trained.predict(arrays)[0].tolist() == layer(x).argmax(1).tolist()


def test_probes_learn(data):
    arrays, labels = data
    predicted = train_probes(arrays, labels, 5, probe_grid(arrays, (1e-6, 0.3)), TRAINING).predict(arrays)
    right = (predicted == labels).double().mean(1)
    assert right.max() > 0.9
    assert right.min() < 0.5


def test_a_probe_that_diverges_takes_no_other_with_it(data):
    arrays = {name: array * 1e160 for name, array in data[0].items()}
    grid = [Probe(("class_1",), 1e-320), Probe(("class_1",), 1e300)]
    predicted = train_probes(arrays, data[1], 5, grid, TRAINING).predict(arrays)
    assert (predicted[1] == -1).all()
    assert (predicted[0] >= 0).all()


def test_training_on_some_rows_is_training_on_their_copies(data):
    arrays, labels = data
    rows = torch.arange(0, 150, 2)
    grid = probe_grid(arrays, (0.1,))
    some = train_probes(arrays, labels, 5, grid, TRAINING, rows=rows)
    copies = train_probes({k: v[rows] for k, v in arrays.items()}, labels[rows], 5, grid, TRAINING)
    assert torch.equal(some.groups[0].weight, copies.groups[0].weight)


@pytest.mark.parametrize(
    ("change", "message"), [({"steps": 0}, "steps must be"), ({"batch_size": 0}, "batch_size")]
)
def test_wrong_arguments_name_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        ProbeTraining(**change)


@pytest.mark.parametrize("rate", [-1.0, 0.0, float("nan"), float("inf")])
def test_learning_rates_are_above_0(data, rate):
    with pytest.raises(ValueError, match=f"learning rates must be above 0 and finite, got {rate}"):
        probe_grid(data[0], (0.1, rate))


def test_no_probes(data):
    with pytest.raises(ValueError, match="at least one learning rate"):
        train_probes(*data, 5, probe_grid(data[0], ()))


def test_a_tenth_of_every_class_is_held_out():
    targets = torch.tensor([0] * 100 + [1] * 20 + [2] * 2 + [4])[torch.randperm(123)]
    train, held = hold_out(targets)
    assert torch.equal(torch.cat([train, held]).sort().values, torch.arange(123))
    assert targets[held].bincount(minlength=5).tolist() == [10, 2, 1, 0, 0]
    assert torch.equal(hold_out(targets)[1], held)
    assert not torch.equal(hold_out(targets, seed=1)[1], held)


def test_nothing_to_hold_out():
    with pytest.raises(ValueError, match="every class has a single sample"):
        hold_out(torch.arange(4))
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        hold_out(torch.zeros(4), 1)
