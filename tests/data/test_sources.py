"""Every layout of data gives the right images and classes, and wrong ones are named."""

import io
import json
import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image

from quickvit.data import Source, Unreadable, cache, open_source


def labels(source: Source):
    """The class of each sample, by the end of its path."""
    return [
        ("/".join(source.describe(i).rsplit("/", 2)[1:]), source.read(i).target) for i in range(len(source))
    ]


# ---------------------------------------------------------------------- folders


@pytest.fixture
def folder(tmp_path, write_images):
    names = [
        f"{split}/{name}" for split in ("train", "val") for name in ("cat/1.png", "cat/0.png", "ant/0.png")
    ]
    return write_images(tmp_path / "data", *names)


def test_a_folder_of_class_folders(folder):
    source = open_source(folder)
    assert source.classes == ("ant", "cat")
    assert labels(source) == [("ant/0.png", 0), ("cat/0.png", 1), ("cat/1.png", 1)]
    with Image.open(folder / "train/cat/0.png") as image:
        np.testing.assert_array_equal(np.asarray(source.read(1).image), np.asarray(image))
    again = pickle.loads(pickle.dumps(source))
    assert [again.describe(i) for i in range(3)] == [source.describe(i) for i in range(3)]


@pytest.mark.parametrize("name", ["val", "validation", "valid", "test"])
def test_the_validation_split_has_many_names(folder, name):
    (folder / "val").rename(folder / name)
    source = open_source(folder, "val")
    assert source.name == str(folder / name)
    assert len(source) == 3


def test_splits_in_capital_letters_are_no_classes(folder, write_images):
    (folder / "train").rename(folder / "Train")
    (folder / "val").rename(folder / "VAL")
    assert open_source(folder).classes == ("ant", "cat")
    assert open_source(folder, "val").name == str(folder / "VAL")
    write_images(folder, "train/dog/0.png")
    assert open_source(folder).classes == ("dog",)


def test_images_may_lie_deeper_than_their_class(folder, write_images):
    write_images(folder, "train/cat/tabby/young/7.png")
    assert ("young/7.png", 1) in labels(open_source(folder))


def test_unlabelled_images_may_lie_anywhere(tmp_path, write_images):
    write_images(tmp_path, "0.png", "a/b/1.png")
    source = open_source(tmp_path, labelled=False)
    assert source.classes == ()
    assert labels(source) == [(f"{tmp_path.name}/0.png", -1), ("b/1.png", -1)]
    write_images(tmp_path, "train/2.png")
    assert [source.describe(0) for source in [open_source(tmp_path, labelled=False)]] == [
        str(tmp_path / "train/2.png")
    ]
    assert len(open_source(tmp_path, "all", labelled=False)) == 3


def test_a_folder_without_splits_is_for_training(tmp_path, write_images):
    write_images(tmp_path, "cat/0.png", "ant/0.png")
    assert open_source(tmp_path).classes == open_source(tmp_path, "all").classes == ("ant", "cat")
    missing = rf"{tmp_path} has no val split: expected one of {tmp_path}/val, .*; "
    with pytest.raises(FileNotFoundError, match=rf"{missing}the split 'all' takes {tmp_path} as it is"):
        open_source(tmp_path, "val")
    write_images(tmp_path, "train/cat/0.png")
    with pytest.raises(FileNotFoundError, match=rf"{missing}it has train"):
        open_source(tmp_path, "val")


@pytest.mark.parametrize("name", ["train", "training"])
def test_a_folder_without_splits_may_have_a_list(tmp_path, write_images, name):
    write_images(tmp_path, "0.png", "1.png")
    (tmp_path / f"{name}.txt").write_text("1.png cat\n0.png ant\n")
    source = open_source(tmp_path)
    assert [source.describe(i) for i in range(2)] == [str(tmp_path / "1.png"), str(tmp_path / "0.png")]
    assert source.targets.tolist() == [1, 0]


def test_splits_are_no_classes(folder):
    with pytest.raises(ValueError, match=rf"{folder} has the splits train, val; take one of them"):
        open_source(folder, "all")
    assert len(open_source(folder, "all", labelled=False)) == 6
    assert len(open_source(folder / "val", "all")) == 3


def test_classes_are_those_of_training(folder, write_images):
    (folder / "val/ant/0.png").unlink()
    source = open_source(folder, "val")
    assert source.classes == ("ant", "cat")
    assert {target for _, target in labels(source)} == {1}
    (folder / "val/ant").rmdir()
    with pytest.raises(
        ValueError, match=rf"lacks 1 of the 2 classes of {folder}/train: nothing in {folder}/val/ant"
    ):
        open_source(folder, "val")
    write_images(folder, "val/ant/0.png", "val/yak/0.png")
    with pytest.raises(ValueError, match=rf"{folder}/val/yak is a class that {folder}/train does not have"):
        open_source(folder, "val")


def test_a_class_to_learn_needs_images(folder):
    (folder / "train/bee").mkdir()
    with pytest.raises(ValueError, match=rf"nothing in {folder}/train/bee"):
        open_source(folder)


def test_class_list_decides_the_order(folder):
    (folder / "classes.txt").write_text("dog\ncat\nant\n")
    for split in ("train", "val"):
        source = open_source(folder, split)
        assert source.classes == ("dog", "cat", "ant")
        assert [target for _, target in labels(source)] == [2, 1, 1]
    (folder / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(
        ValueError, match=rf"{folder}/train/ant is a class that {folder}/classes.txt does not have"
    ):
        open_source(folder)
    (folder / "classes.txt").write_text("cat\ncat\n")
    with pytest.raises(ValueError, match=r"classes.txt must name each class once"):
        open_source(folder)


@pytest.mark.parametrize("name", ["classes.txt", "train.txt"])
def test_a_file_in_another_encoding_is_named(folder, name):
    (folder / name).write_bytes("ant/0.png café\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{folder / name} must be text in UTF-8: "):
        open_source(folder)


def test_byte_order_marks_are_no_part_of_names(folder):
    (folder / "classes.txt").write_text("cat\nant\n", encoding="utf-8-sig")
    assert open_source(folder).classes == ("cat", "ant")
    (folder / "val.txt").write_text("ant/0.png ant\n", encoding="utf-8-sig")
    source = open_source(folder, "val")
    assert (source.describe(0), source.read(0).target) == (str(folder / "val/ant/0.png"), 1)


def test_a_flat_split_with_a_list(tmp_path, write_images):
    write_images(tmp_path, "train/cat/0.png", "train/ant/0.png", "val/x 1.png", "val/x2.png", "val/x3.png")
    with pytest.raises(ValueError, match=rf"{tmp_path}/val/x 1.png lies in no folder of a class"):
        open_source(tmp_path, "val")
    (tmp_path / "val.txt").write_text("x 1.png cat\nx2.png 0\n\nx3.png 1\n")
    source = open_source(tmp_path, "val")
    assert labels(source) == [("val/x 1.png", 1), ("val/x2.png", 0), ("val/x3.png", 1)]
    assert source.classes == ("ant", "cat")
    for line, message in {
        "x2.png dog": "'dog' is neither one of the 2 classes nor its number",
        "x2.png 2": "'2' is neither",
        "../../secret.png cat": "line 1: expected a path below",
        "/secret.png cat": "line 1: expected a path below",
        "x2.png": "line 1: expected a path below",
    }.items():
        (tmp_path / "val.txt").write_text(line)
        with pytest.raises(ValueError, match=message):
            open_source(tmp_path, "val")
    (tmp_path / "val.txt").write_text("\n")
    with pytest.raises(ValueError, match=rf"no images in {tmp_path}/val.txt"):
        open_source(tmp_path, "val")


def flat(folder, write_images, **lists):
    """Splits without folders of classes: the labels of 0.png, 1.png, … of each."""
    for split, labels in lists.items():
        rows = [(f"{i}.png", label) for i, label in enumerate(labels.split())]
        write_images(folder / split, *(path for path, _ in rows))
        (folder / f"{split}.txt").write_text("".join(f"{path} {label}\n" for path, label in rows))
    return folder


def test_numbers_in_a_list_are_those_of_the_classes(tmp_path, write_images):
    """And are not sorted like words."""
    source = open_source(flat(tmp_path, write_images, val="10 2 0 2"), "val")
    assert source.classes == tuple(map(str, range(11)))
    assert source.targets.tolist() == [10, 2, 0, 2]
    source = open_source(flat(tmp_path, write_images, val="20230002 20230001"), "val")
    assert source.classes == ("20230001", "20230002")


def test_numbers_with_large_gaps_want_to_be_listed(tmp_path, write_images):
    folder = flat(tmp_path, write_images, val="1994 2003")
    with pytest.raises(
        ValueError, match=r"val\.txt: 2 different numbers up to 2003 are names .* classes\.txt"
    ):
        open_source(folder, "val")
    (folder / "classes.txt").write_text("1994\n2003\n")
    assert open_source(folder, "val").targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("train", "val", "classes", "targets"),
    [
        ("ant bee cat", "ant cat", ("ant", "bee", "cat"), [0, 2]),
        ("ant bee cat", "2 bee", ("ant", "bee", "cat"), [2, 1]),
        ("0 3", "3 1", ("0", "1", "2", "3"), [3, 1]),
    ],
)
def test_a_list_has_the_classes_of_the_training_list(tmp_path, write_images, train, val, classes, targets):
    folder = flat(tmp_path, write_images, train=train, val=val)
    source = open_source(folder, "val")
    assert source.classes == open_source(folder).classes == classes
    assert source.targets.tolist() == targets


def test_a_list_with_classes_that_the_training_list_lacks(tmp_path, write_images):
    folder = flat(tmp_path, write_images, train="bee cat", val="ant bee")
    with pytest.raises(ValueError, match=r"val\.txt: 'ant' is neither one of the 2 classes nor its number"):
        open_source(folder, "val")


def test_a_list_is_that_of_the_folder_that_was_found(folder, write_images):
    write_images(folder, "test/7.png")
    (folder / "test.txt").write_text("7.png cat\n")
    assert labels(open_source(folder, "val")) == [("ant/0.png", 0), ("cat/0.png", 1), ("cat/1.png", 1)]
    assert labels(open_source(folder, "test")) == [("test/7.png", 1)]


def test_nothing_to_read_is_named(tmp_path, write_images):
    with pytest.raises(
        FileNotFoundError, match="no data at '/nowhere': expected a folder, digits, wds/FOLDER"
    ):
        open_source("/nowhere")
    with pytest.raises(ValueError, match="unknown split 'dev'; expected one of train, val, test, all"):
        open_source(tmp_path, "dev")
    for labelled in (True, False):
        with pytest.raises(ValueError, match=f"no images in {tmp_path}"):
            open_source(tmp_path, labelled=labelled)
    write_images(tmp_path, "val/cat/0.png")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no train split"):
        open_source(tmp_path)


# ---------------------------------------------------------------------- digits


def test_digits_are_split_once_and_in_proportion():
    train, val = open_source(), open_source("digits", "val")
    assert (len(train), len(val), train.classes) == (1437, 360, tuple("0123456789"))
    names = [source.describe(i) for source in (train, val) for i in range(len(source))]
    assert len(set(names)) == len(open_source("digits", "all")) == 1797
    image, target = val.read(5)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert 0 <= target < 10
    assert max(np.asarray(train.read(i).image).max() for i in range(5)) == 255
    assert min(np.bincount([val.read(i).target for i in range(360)])) >= 34


def test_only_a_folder_with_something_in_it_stands_for_digits(tmp_path, write_images, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert len(open_source("digits")) == 1437
    write_images(tmp_path / "digits", "a/0.png")
    assert open_source("digits").classes == ("a",)


# ---------------------------------------------------------------------- shards


def write_shard(path, samples):
    """A tar file of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in samples.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path, folder):
    whole = {split: open_source(folder, split) for split in ("train", "val")}
    for split, source in whole.items():
        for number in range(len(source)):
            with open(source.describe(number), "rb") as file:
                sample = {
                    f"n/{number}.png": file.read(),
                    f"n/{number}.cls": str(source.read(number).target).encode(),
                    f"n/{number}.json": b"{}",
                }
            write_shard(tmp_path / "wds" / f"set-{split}-{number}.tar", sample)
    return tmp_path / "wds"


def test_shards_give_the_samples_that_went_in(folder, shards):
    for split in ("train", "val"):
        source, original = open_source(f"wds/{shards}", split), open_source(folder, split)
        assert source.classes == ("0", "1")
        assert source.describe(1) == f"{shards}/set-{split}-1.tar:n/1"
        for i in range(3):
            assert source.read(i).target == original.read(i).target
            np.testing.assert_array_equal(source.read(i).image, original.read(i).image)
    assert len(open_source(f"wds/{shards}", "all")) == 6
    assert open_source(f"wds/{shards}", labelled=False).read(0).target == -1
    (shards / "classes.txt").write_text("ant\ncat\n")
    assert open_source(f"wds/{shards}").classes == ("ant", "cat")


def test_shards_may_be_listed_or_lie_in_folders(shards):
    (shards / "train").mkdir()
    (shards / "set-train-0.tar").rename(shards / "train" / "0.tar")
    assert len(open_source(f"wds/{shards}")) == 1
    files = [f"../wds/set-val-{i}.tar" for i in range(2)]
    info = json.dumps({"splits": {"validation": {"filenames": files}}})
    (shards / "_info.json").write_text(info, encoding="utf-8-sig")
    assert len(open_source(f"wds/{shards}", "val")) == 2
    # As where a folder has no such split: data without validation can be trained on.
    with pytest.raises(
        FileNotFoundError, match=r"_info.json lists no shards of any of the splits train, training"
    ):
        open_source(f"wds/{shards}")
    for damage in ("[]", '{"splits": {"train": ["a.tar"]}}', "{"):
        (shards / "_info.json").write_text(damage)
        with pytest.raises(ValueError, match=r"_info.json does not list shards by their splits: "):
            open_source(f"wds/{shards}")


def test_a_split_is_a_whole_word_of_the_name_of_a_shard(shards):
    for split in ("train", "val"):
        for path in sorted(shards.glob(f"set-{split}-*.tar")):
            number = path.stem[-1]
            path.rename(shards / f"larval_strain_{split.upper()}{number}.tar")
    for split in ("train", "val"):
        source = open_source(f"wds/{shards}", split)
        assert source.shards == tuple(f"{shards}/larval_strain_{split.upper()}{i}.tar" for i in range(3))
    (shards / "larval_strain_VAL0.tar").rename(shards / "train-val-0.tar")
    for split in ("train", "val"):
        with pytest.raises(
            ValueError, match=r"train-val-0.tar is named after the splits train, val; expected"
        ):
            open_source(f"wds/{shards}", split)
    (shards / "Val").mkdir()
    (shards / "train-val-0.tar").rename(shards / "Val" / "train-val-0.tar")
    assert len(open_source(f"wds/{shards}", "val")) == 1
    assert len(open_source(f"wds/{shards}")) == 3
    for path in shards.glob("*TRAIN*.tar"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="no shards of the train split: expected train/"):
        open_source(f"wds/{shards}")


def test_names_with_dots_are_not_lost(shards):
    with open(shards / "set-train-0.tar", "rb") as file, tarfile.open(fileobj=file) as tar:
        image = tar.extractfile("n/0.png").read()
    shard = shards / "set-train-0.tar"
    write_shard(
        shard,
        {"n/0.png": image, "n/0.cls": b"1", "n/0.seg.png": b"", "n/0.coarse.cls": b"", "n/0.a.json": b""},
    )
    assert open_source(f"wds/{shards}").targets.tolist()[0] == 1
    names = [f"n/slide_0.25mpp_{i}{suffix}" for i in range(2) for suffix in (".PNG", ".cls")]
    write_shard(shard, {name: image if name.endswith("PNG") else b"1" for name in names})
    for labelled in (True, False):
        with pytest.raises(
            ValueError,
            match=r"0.tar has dots in the names of 4 files, n/slide_0.25mpp_0.PNG .* to n/slide_0_25mpp_0.PNG",
        ):
            open_source(f"wds/{shards}", labelled=labelled)


def test_broken_shards_are_named(shards, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no shards of the train split: expected train/"):
        open_source(f"wds/{tmp_path / 'data'}")
    shard = shards / "set-train-0.tar"
    source = open_source(f"wds/{shards}")
    shard.unlink()
    with pytest.raises(Unreadable, match=r"set-train-0.tar:n/0: FileNotFoundError"):
        source.read(0)
    for samples, message in {
        "unlabelled": ({"0.png": b""}, "set-train-0.tar:0 has no class, expected a file 0.cls"),
        "a word": (
            {"0.cls": b"cat"},
            "0.cls must hold the number of a class, of at most 6 digits, got b'cat'",
        ),
        "many": ({"0.cls": b"4294967295"}, "0.cls must hold the number of a class, of at most 6 digits"),
    }.values():
        write_shard(shard, samples)
        with pytest.raises(ValueError, match=message):
            open_source(f"wds/{shards}")
    shard.write_bytes(b"no tar")
    with pytest.raises(ValueError, match=r"set-train-0.tar is not a whole, uncompressed tar file"):
        open_source(f"wds/{shards}")
    for path in shards.glob("*.tar"):
        write_shard(path, {"notes.txt": b""})
    with pytest.raises(ValueError, match="no images in the 3 shards"):
        open_source(f"wds/{shards}")


@pytest.mark.parametrize("damage", ["a bit", "cut", "two"])
def test_what_follows_a_damaged_header_is_not_lost(shards, damage):
    shard = shards / "set-train-0.tar"
    content = bytearray(shard.read_bytes())
    with tarfile.open(shard) as tar:
        second = tar.getmembers()[1].offset
    if damage == "a bit":
        content[second + 3] ^= 1
    elif damage == "cut":
        del content[second + 100 :]
    else:
        # Some pad by more than others.
        content += bytes(64 * 512) + content
    shard.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"train-0.tar is not a whole, .*: what follows byte \d+ has no header"
    ):
        open_source(f"wds/{shards}", labelled=False)


@pytest.mark.parametrize("name", ["n/0.png", "n/0.jpg"])
def test_a_sample_has_one_image(shards, name):
    with tarfile.open(shards / "set-train-0.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(
        ValueError, match=rf"train-0.tar:{name} is a second image of the sample n/0, expected"
    ):
        open_source(f"wds/{shards}")


@pytest.mark.parametrize("name", ["1.png", "1.cls"])
@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_shards_are_named(shards, name, kind):
    with tarfile.open(shards / "set-train-0.tar", "a") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, f"n/0{name[1:]}"
        tar.addfile(info)
    with pytest.raises(ValueError, match=rf"set-train-0.tar:{name} is a link or a device, expected a file"):
        open_source(f"wds/{shards}")


# ---------------------------------------------------------------------- libraries


def test_cifar_through_torchvision(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=f"cannot open torch/cifar10 in {tmp_path}: Dataset not found"
    ):
        open_source(f"torch/cifar10@{tmp_path}")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    for number, name in enumerate(["test_batch", *(f"data_batch_{i}" for i in range(1, 6))]):
        batch = {"data": np.full((2, 3072), number, np.uint8), "labels": [number, 9]}
        (folder / name).write_bytes(pickle.dumps(batch))
    # The real files are known by their checksums.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    train, val = (open_source(f"torch/cifar10@{tmp_path}", split) for split in ("train", "val"))
    assert (len(train), len(val), val.classes[:2]) == (10, 2, ("class 0", "class 1"))
    assert [train.read(i).target for i in range(4)] == [1, 9, 2, 9]
    assert (np.asarray(train.read(2).image) == 2).all()
    assert train.describe(2) == "torch/cifar10 (train), image 2"


def test_inaturalist_through_torchvision(tmp_path, write_images):
    names = [f"{i:05d}_Animalia_a_b_c_d_e_{i}" for i in range(2)]
    write_images(tmp_path / "2021_valid", *(f"{name}/{i}.jpg" for name in names for i in range(2)))
    source = open_source(f"torch/inaturalist@{tmp_path}", "val")
    assert source.classes == tuple(names)
    assert sorted(source.read(i).target for i in range(4)) == [0, 0, 1, 1]
    for path in tmp_path.rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(Unreadable, match=r"/0\.jpg: UnidentifiedImageError"):
        source.read(0)


@pytest.mark.parametrize("spec", ["image_folder@{}/2021_valid", "inaturalist@{}"])
def test_sets_of_torchvision_are_read_as_folders_are(tmp_path, spec):
    """16 bits are not clipped, and programs are no images."""
    place = tmp_path / "2021_valid" / "00000_Animalia_a_b_c_d_e_0"
    place.mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 2**15, np.uint16)).save(place / "0.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(place / "1.png")
    source = open_source(f"torch/{spec.format(tmp_path)}", "val")
    found = set()
    for i in range(2):
        try:
            found.add(source.read(i).image.getpixel((0, 0)))
        except Unreadable as error:
            found.add(error.path)
    assert found == {(128, 128, 128), str(place / "1.png")}


def test_names_that_libraries_do_not_know(tmp_path):
    with pytest.raises(ValueError, match="timm knows no torch/nothing"):
        open_source(f"torch/nothing@{tmp_path}")
    with pytest.raises(
        ValueError, match="torch/cifar10 needs the folder with its files: torch/cifar10@FOLDER"
    ):
        open_source("torch/cifar10")
    with pytest.raises(ValueError, match="torch/cifar10 has the splits train, val, test, not 'all'"):
        open_source(f"torch/cifar10@{tmp_path}", "all")


def test_hugging_face_needs_its_library(monkeypatch):
    monkeypatch.setattr("quickvit.data.sources.libraries.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'hfds/cifar needs .*pip install "quickvit\[datasets\]"'):
        open_source("hfds/cifar")


@pytest.mark.filterwarnings("ignore")
def test_a_set_of_hugging_face(folder, monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source, original = open_source(f"hfds/{folder}@{tmp_path / 'cache'}", "val"), open_source(folder, "val")
    assert source.classes == ("ant", "cat")
    for i in range(3):
        assert source.read(i).target == original.read(i).target
        np.testing.assert_array_equal(source.read(i).image, original.read(i).image)
    assert source.fingerprint != open_source(f"hfds/{folder}@{tmp_path / 'cache'}", "train").fingerprint
    with pytest.raises(FileNotFoundError, match="none of them is 'test'"):
        open_source(f"hfds/{folder}", "test")


# ---------------------------------------------------------------------- memory


def test_a_cache_gives_the_same_samples_without_the_files(folder, tmp_path):
    broken = folder / "train/cat/0.png"
    broken.write_bytes(b"")
    source = open_source(folder)
    expected = [source.read(i) for i in (0, 2)]
    cached = cache(source)
    (folder / "train").rename(tmp_path / "moved")
    assert (cached.name, cached.classes, len(cached)) == (source.name, source.classes, 3)
    for i, (image, target) in zip((0, 2), expected, strict=True):
        np.testing.assert_array_equal(cached.read(i).image, image)
        assert cached.read(i).target == target
        assert cached.describe(i) == source.describe(i)
    for _ in range(9):
        with pytest.raises(Unreadable, match=rf"{broken}: UnidentifiedImageError") as caught:
            cached.read(1)
    # Each is raised for itself, and does not remember the places of those before.
    assert len(caught.traceback) == 3


def test_a_cache_has_a_limit(folder):
    with pytest.raises(ValueError, match=r"the first 2 of the 3 images of .* do not cache them"):
        cache(open_source(folder), limit=500)
