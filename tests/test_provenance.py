"""What a record says of its surroundings."""

import quickvit
from quickvit.provenance import commit


def test_a_package_outside_a_checkout_has_no_commit_unless_told(monkeypatch, tmp_path):
    monkeypatch.setattr(quickvit, "__file__", str(tmp_path / "__init__.py"))
    assert commit() is None
    monkeypatch.setenv("QUICKVIT_COMMIT", "0123abc")
    assert commit() == "0123abc"
