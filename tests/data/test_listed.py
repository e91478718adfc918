"""Splits that are listed in files."""

import pytest
from PIL import Image

from quickvit.data.listed import open_listed


@pytest.fixture
def folder(tmp_path):
    for name in ("eosinophil/0001/1.png", "monocyte/2.png", "monocyte/with space.png", "plain.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    return tmp_path


def listing(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def read(source):
    return [
        (source.describe(i).rsplit("/", 1)[1], source.classes[source.read(i).target])
        for i in range(len(source))
    ]


EXPECTED = [("with space.png", "MON"), ("1.png", "EOS")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.csv", "Image Path,Label\nmonocyte/with space.png,MON\neosinophil/0001/1.png,EOS\n"),
        (
            "train.CSV",
            "\ufefflabel,fold, path\nMON,1,monocyte/with space.png\nEOS,2,eosinophil/0001/1.png\n",
        ),
        ("train.txt", "\ufeffmonocyte/with space.png MON\n\neosinophil/0001/1.png\tEOS\n"),
    ],
)
def test_paths_and_classes(folder, name, text):
    source = open_listed(listing(folder, name, text), folder)
    assert source.classes == ("EOS", "MON")
    assert read(source) == EXPECTED
    assert source.targets.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.csv", "file\nmonocyte/with space.png\neosinophil/0001/1.png\n"),
        ("train.txt", "monocyte/with space.png\neosinophil/0001/1.png\n"),
    ],
)
def test_the_folder_is_the_class_where_none_is_given(folder, name, text):
    source = open_listed(listing(folder, name, text), folder)
    assert read(source) == [("with space.png", "monocyte"), ("1.png", "eosinophil")]


def test_a_test_split_follows_the_classes_of_training(folder):
    train = open_listed(listing(folder, "train.txt", "eosinophil/0001/1.png Z\nmonocyte/2.png A\n"), folder)
    test = open_listed(listing(folder, "test.txt", "eosinophil/0001/1.png Z\n"), folder, train.classes)
    assert test.targets.tolist() == [1]
    with pytest.raises(ValueError, match=r"test\.txt, line 1: monocyte/2\.png is of the class 'B', of which"):
        open_listed(listing(folder, "test.txt", "monocyte/2.png B\n"), folder, train.classes)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "has no column of paths: expected one of image path"),
        ("a.csv", "name,label\nx,y\n", "got name, label"),
        ("a.txt", "\n", "lists no images"),
        ("a.csv", f"path\n{'x' * 140_000}\n", r"a\.csv is no list of images in UTF-8: field larger"),
        ("a.csv", "path,label\n../secret.png,A\n", r"line 2: expected a path below"),
        ("a.txt", "/etc/passwd A\n", r"line 1: expected a path below"),
        ("a.txt", "monocyte/none.png A\n", r"line 1: no file .*none\.png"),
        ("a.txt", "plain.png\n", r"line 1: plain\.png has no class, and lies in no folder of one"),
    ],
)
def test_wrong_lists_are_named(folder, name, text, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_listed(listing(folder, name, text), folder)


@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_lists_in_other_encodings_are_named(folder, name):
    (folder / name).write_bytes("path,label\nmonocyte/2.png,Zählung\n".encode("latin-1"))
    with pytest.raises(ValueError, match="is no list of images in UTF-8"):
        open_listed(folder / name, folder)
