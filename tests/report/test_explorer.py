"""The explorer's page, and the data in it."""

import base64
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import CLASSES

from quickvit.group import D8
from quickvit.report import explorer
from quickvit.report.exploration import POSES, Answers
from quickvit.report.explorer import explorer_fragment, explorer_page


@pytest.fixture(scope="module")
def fragment(exploration):
    return explorer_fragment(exploration)


@pytest.fixture(scope="module")
def data(fragment):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', fragment)[1])


def test_features_survive_their_storage(data, exploration):
    for number, image in enumerate(data["images"]):
        for stored, scale, maps in zip(image["features"], image["scales"], exploration.features, strict=True):
            values = (
                np.frombuffer(base64.b64decode(stored), "<i2").reshape(maps.shape[1:]) * scale / data["steps"]
            )
            np.testing.assert_allclose(values, maps[number].numpy(), atol=0.51 * scale / data["steps"])


def test_images_survive_their_storage(data, images):
    kind, encoded = data["images"][0]["source"].split(",")
    assert kind == "data:image/png;base64"
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded)))), np.asarray(images[0])
    )


def test_turns_and_mirrorings_lead_where_the_group_says(data):
    pose = 0
    for what in "rrsrsr":
        pose = data["then"][what][pose]
    # s r s r = e, and two turns came before.
    assert POSES[pose] == D8.elements[2]


def test_answers(data, exploration):
    assert data["images"][0]["classes"] == list(CLASSES)
    found = np.array(data["images"][1]["answers"])
    np.testing.assert_allclose(found[1], exploration.answers[1].probabilities[1].numpy(), atol=1e-4)


def test_of_many_classes_all_answers_and_the_likeliest_are_shown(exploration):
    random = torch.Generator().manual_seed(0)
    probabilities = [torch.rand(2, 8, 40, generator=random) ** 20 for _ in range(2)]
    # One of the answers is no likelier than what many others are elsewhere.
    probabilities[1][0, 3] = 0.001
    probabilities[1][0, 3, 7] = 0.002
    found = tuple(
        Answers(name, p / p.sum(-1, keepdim=True)) for name, p in zip("ab", probabilities, strict=True)
    )
    names = tuple(map(str, range(40)))
    image = explorer._image(replace(exploration, classes=names, targets=(11, -1), answers=found), 0)
    assert {"7", "11"} <= set(image["classes"])
    for model, answers in enumerate(found):
        for pose, label in enumerate(answers.labels[0].tolist()):
            assert image["classes"][image["labels"][model][pose]] == str(label)
    assert len(image["classes"]) < 20


def test_of_few_answers_the_likeliest_others_are_shown(exploration):
    sure = torch.full((2, 8, 40), 0.001)
    sure[..., 3], sure[..., 9] = 0.9, 0.05
    found = (Answers("a", sure), Answers("b", sure))
    image = explorer._image(
        replace(exploration, classes=tuple(map(str, range(40))), targets=(3, 3), answers=found), 0
    )
    assert len(image["classes"]) == explorer.SHOWN_CLASSES
    assert {"3", "9"} <= set(image["classes"])


def test_a_class_cannot_leave_the_script(fragment):
    assert "<b>dog" not in fragment
    assert fragment.count("<script") == fragment.count("</script>") == 2


def test_the_page_needs_nothing_else(exploration):
    page = explorer_page(exploration)
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "/*" not in re.sub(r"/\*\*? .*?\*/", "", page)
    for name in ("paper", "ink", "muted", "line", "accent", "accent-2", "panel"):
        assert f"--{name}:" in page
        assert f"var(--{name})" in page


def test_a_page_too_large_is_refused(exploration, monkeypatch):
    monkeypatch.setattr(explorer, "LARGEST", 10_000)
    with pytest.raises(ValueError, match=r"MB of a page, more than 0\.01 MB; show fewer than 2 images"):
        explorer_fragment(exploration)
