"""What cannot be written is said before the work, and nothing is made to find it out."""

import os

import pytest

from quickvit.provenance import require_file, require_folder


def test_new_and_old_places_will_do(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json", "a/b/new.json"):
        require_file(tmp_path / name)
    require_folder(tmp_path)
    require_folder(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]


def test_the_folder_of_a_bare_name_is_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    require_file("new.json")
    require_folder("demo")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="it is a folder; expected the name of a file"):
        require_file(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "inner"):
        with pytest.raises(NotADirectoryError, match=f"{file} is a file"):
            require_folder(path)
    with pytest.raises(NotADirectoryError, match=f"{file} is a file"):
        require_file(file / "new.json")


def test_what_is_read_only(tmp_path, monkeypatch):
    old = tmp_path / "old.json"
    old.touch()
    # As root everything can be written to.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=r"old\.json: it is read-only"):
        require_file(old)
    with pytest.raises(PermissionError, match="is read-only"):
        require_file(tmp_path / "new" / "new.json")


def test_a_pipe_is_written_to_where_it_is(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # As /dev is for most: what lies there can be written to, and nothing can be put there.
    monkeypatch.setattr(os, "access", lambda path, mode: path == pipe)
    require_file(pipe)
    with pytest.raises(PermissionError):
        require_file(tmp_path / "new.json")
