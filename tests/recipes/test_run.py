"""What run folders say of themselves."""

import json

import pytest

from quickvit.recipes.run import STARTS, trained_by


def test_the_last_start_says_how_a_model_was_trained(tmp_path):
    assert trained_by(tmp_path) is None
    assert trained_by("quickvit_i8_tiny_patch16_224") is None
    starts = [{"command": "quickvit train deit3"}, {"command": "quickvit train deit3 --epochs 3"}]
    (tmp_path / STARTS).write_text("".join(json.dumps(start) + "\n" for start in starts))
    assert trained_by(tmp_path) == "quickvit train deit3 --epochs 3"


@pytest.mark.parametrize("text", ["", "{", "[]\n", '{"command": 3}\n'])
def test_a_damaged_record_of_starts_says_nothing(tmp_path, text):
    (tmp_path / STARTS).write_text(text)
    assert trained_by(tmp_path) is None
