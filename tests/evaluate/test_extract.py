"""Features of a source: those of the model, computed once, resumed, repaired, and shared between processes."""

import copy
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from quickvit import QuickVisionTransformer, create_baseline
from quickvit.data import (
    TooManyUnreadable,
    Unreadable,
    cache,
    deit3_transform,
    eval_transform,
    mix,
    open_source,
)
from quickvit.data.sources.libraries import HuggingFaceSource, TorchvisionSource
from quickvit.evaluate import store as store_module
from quickvit.evaluate.backbone import Backbone
from quickvit.evaluate.extract import Extraction, describe_source, extract
from quickvit.evaluate.rotation import UPRIGHT, Pose
from quickvit.testing import randomize
from quickvit.train import World

SIZE = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 2, "num_classes": 0}
TRANSFORM = eval_transform(32)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(store_module, "CHUNK", 4)


@pytest.fixture
def folder(tmp_path):
    """Ten images of two classes."""
    generator = np.random.default_rng(0)
    for i in range(10):
        path = tmp_path / "data" / "train" / ("a" if i < 6 else "b") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(path)
    return tmp_path / "data"


@pytest.fixture
def source(folder):
    return open_source(folder)


@pytest.fixture
def how(tmp_path):
    return Extraction(tmp_path / "cache", batch_size=3)


def backbone(family="i8", seed=0, **options):
    return Backbone(randomize(QuickVisionTransformer(family=family, **{**SIZE, **options}), seed), "tiny")


class Counting(Backbone):
    """Counts the images that pass through, and may be interrupted."""

    images, stop_after = 0, None

    def pooled(self, images):
        # The trial that finds out the shapes is black.
        if images.any():
            if self.stop_after is not None and self.images >= self.stop_after:
                raise KeyboardInterrupt
            self.images += len(images)
        return super().pooled(images)


@pytest.fixture
def counting():
    return Counting(randomize(QuickVisionTransformer(family="i8", **SIZE)), "tiny")


class TestBackbone:
    @pytest.fixture
    def images(self):
        return torch.randn(2, 3, 32, 32)

    def test_vectors_are_those_of_the_model(self, images):
        wrapped = backbone("h8", octic_depth=1)
        vectors = wrapped.pooled(images)
        assert list(vectors) == ["class_1", "class_2", "class_3", "class_4", "average"]
        with torch.no_grad():
            tokens = wrapped.model.forward_features(images)
            layers = wrapped.model.get_intermediate_layers(images, 4, return_prefix_tokens=True, norm=True)
        torch.testing.assert_close(vectors["class_1"], tokens[:, 0])
        torch.testing.assert_close(vectors["average"], tokens[:, 1:].mean(1))
        for i, (_, prefix) in enumerate(reversed(layers), 1):
            torch.testing.assert_close(vectors[f"class_{i}"], prefix[:, 0])

    def test_only_layers_after_the_octic_part_are_used(self, images):
        assert list(backbone("i8").pooled(images)) == ["class_1", "class_2", "class_3", "average"]
        assert list(backbone("d8").pooled(images)) == ["class_1", "average"]
        assert list(backbone("d8", class_token=False, global_pool="avg").pooled(images)) == ["average"]

    def test_patches_are_those_of_the_model_at_any_size(self):
        wrapped = backbone("h8", dynamic_img_size=True)
        images = torch.randn(2, 3, 48, 24)
        patches = wrapped.dense(images)["patches"]
        assert patches.shape == (2, 6, 3, 64)
        with torch.no_grad():
            torch.testing.assert_close(patches.flatten(1, 2), wrapped.model.forward_features(images)[:, 1:])

    def test_a_norm_behind_the_pooling_is_applied(self, images):
        model = randomize(
            create_baseline("tiny", **SIZE | {"patch_size": 8}, global_pool="avg", class_token=False)
        )
        vectors = Backbone(model, "vit").pooled(images)
        with torch.no_grad():
            torch.testing.assert_close(vectors["average"], model.forward_head(model.forward_features(images)))

    def test_bfloat16(self, images):
        exact = backbone()
        short = Backbone(exact.model, "tiny", dtype=torch.bfloat16)
        vectors = short.pooled(images)
        assert {v.dtype for v in vectors.values()} == {torch.bfloat16}
        for name, value in exact.pooled(images).items():
            torch.testing.assert_close(vectors[name].float(), value, rtol=0.1, atol=0.1)
        assert short.identity != exact.identity

    @pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("pool", ["token", "avg"])
    def test_weights_of_any_type(self, images, weights, dtype, pool):
        model = randomize(QuickVisionTransformer(family="i8", global_pool=pool, **SIZE)).to(weights)
        expected = Backbone(copy.deepcopy(model).float(), "tiny", dtype=dtype)
        wrapped = Backbone(model, "tiny", dtype=dtype)
        for ours, theirs in (
            (wrapped.pooled(images), expected.pooled(images)),
            (wrapped.dense(images), expected.dense(images)),
        ):
            assert {value.dtype for value in ours.values()} == {dtype}
            assert all(torch.equal(value, theirs[name]) for name, value in ours.items())

    def test_identity_follows_the_weights_and_not_the_head(self):
        first = backbone().identity
        assert backbone().identity == first
        assert backbone(seed=1).identity != first
        assert backbone(num_heads=4).identity != first
        model = backbone().model
        model.reset_classifier(7)
        assert Backbone(model, "tiny").identity == first
        with torch.no_grad():
            model.blocks[-1].mlp.fc1.weight[0, 0] += 1e-3
        assert Backbone(model, "tiny").identity != first

    @pytest.mark.parametrize(
        "name",
        [
            *("vit_tiny_patch16_224", "deit3_small_patch16_224", "deit_tiny_distilled_patch16_224"),
            *(
                "vit_small_patch14_reg4_dinov2",
                "vit_little_patch16_reg1_gap_256",
                "vit_base_patch16_siglip_224",
            ),
            *("vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "vit_relpos_small_patch16_224"),
            *("vit_tiny_r_s16_p8_224", "vitamin_small_224"),
        ],
    )
    def test_vits_of_timm(self, name):
        size = {"img_size": 112} if name.endswith(("dinov2", "siglip_224")) else {}
        model = timm.create_model(name, num_classes=0, **size)
        wrapped = Backbone(model, name)
        images = torch.randn(1, 3, *wrapped.img_size)
        vectors = wrapped.pooled(images)
        assert ("class_1" in vectors) == (model.cls_token is not None)
        assert {v.shape[1] for v in vectors.values()} == {model.num_features}
        patches = wrapped.dense(images)["patches"]
        torch.testing.assert_close(wrapped._finish(patches), patches) if not hasattr(
            model, "fc_norm"
        ) else None
        assert patches.shape[3] == model.num_features
        if model.cls_token is not None and not isinstance(model.norm, torch.nn.Identity):
            with torch.no_grad():
                torch.testing.assert_close(vectors["class_1"], model.forward_features(images)[:, 0])

    def test_others_are_refused(self):
        with pytest.raises(ValueError, match="resnet is no vision transformer"):
            Backbone(timm.create_model("resnet10t"), "resnet")


def test_features_of_a_source(source, how):
    wrapped = backbone()
    features = extract(wrapped, source, TRANSFORM, how)
    images = torch.stack([TRANSFORM(source.read(i).image) for i in range(10)])
    for name, expected in wrapped.pooled(images).items():
        torch.testing.assert_close(features.arrays[name], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(features.vector, features.arrays["class_1"])
    assert features.targets.tolist() == [0] * 6 + [1] * 4
    assert features.indices.tolist() == list(range(10))
    assert features.unreadable == 0


def test_dense_features_of_a_source(source, how):
    wrapped = backbone()
    features = extract(wrapped, source, TRANSFORM, how, dense=True)
    assert features.arrays["patches"].shape == (10, 4, 4, 64)
    expected = wrapped.dense(TRANSFORM(source.read(7).image)[None])["patches"][0]
    torch.testing.assert_close(features.arrays["patches"][7], expected, rtol=1e-4, atol=1e-5)


def test_a_second_protocol_does_not_extract_again(source, how, counting):
    first = extract(counting, source, TRANSFORM, how)
    again = extract(counting, source, TRANSFORM, how)
    assert counting.images == 10
    assert torch.equal(first.vector, again.vector)
    assert torch.equal(first.targets, again.targets)


def test_a_seed_counts_only_where_something_is_random(source, how, counting):
    for seed in (0, 1):
        for pose, transform in (
            (Pose(45.0), TRANSFORM),
            (Pose("quarter"), TRANSFORM),
            (UPRIGHT, deit3_transform(32)),
        ):
            extract(counting, source, transform, replace(how, seed=seed), pose=pose)
    assert counting.images == 10 + 20 + 20


def test_other_weights_transforms_and_data_have_their_own_features(source, folder, how):
    def caches():
        return len(list(how.cache.iterdir()))

    extract(backbone(), source, TRANSFORM, how)
    extract(backbone(seed=1), source, TRANSFORM, how)
    extract(backbone(), source, eval_transform(32, crop_ratio=0.8), how)
    assert caches() == 3
    path = folder / "train" / "a" / "0.png"
    Image.new("RGB", (40, 40)).save(path)
    extract(backbone(), open_source(folder), TRANSFORM, how)
    assert caches() == 4
    path.rename(folder / "train" / "b" / "0.png")
    extract(backbone(), open_source(folder), TRANSFORM, how)
    assert caches() == 5


def test_targets_are_part_of_a_source(source):
    changed = type(source)(**{**vars(source), "targets": source.targets[::-1]})
    assert describe_source(changed) != describe_source(source)


def test_every_file_is_part_of_a_source(source, folder):
    names = [f"a/{i}.png" for i in range(20_002)]
    many = replace(source, paths=np.array(names, dtype=bytes), targets=np.zeros(len(names), np.int64))
    before = describe_source(many)
    (folder / "train" / "a" / "1.png").write_bytes(b"another")
    assert describe_source(many) != before


@pytest.mark.parametrize("wrap", [lambda source: source, cache, lambda source: mix({source: 1.0})])
def test_shards_are_part_of_a_source(folder, tmp_path, wrap):
    def pack(*names):
        with tarfile.open(tmp_path / "train.tar", "w") as tar:
            for i, name in enumerate(names):
                tar.add(folder / "train" / name, f"{i}.png")
        return describe_source(wrap(open_source(f"wds/{tmp_path}", labelled=False)))

    first = pack("a/0.png", "a/1.png")
    assert describe_source(wrap(open_source(f"wds/{tmp_path}", labelled=False))) == first
    assert pack("a/1.png", "a/0.png") != first


@pytest.mark.parametrize("wrap", [lambda source: source, lambda source: mix({source: 1.0})])
def test_what_a_set_of_hugging_face_holds_is_part_of_it(wrap):
    def describe(fingerprint):
        reader = type("Reader", (list,), {"dataset": SimpleNamespace(_fingerprint=fingerprint)})([0, 1])
        return describe_source(wrap(HuggingFaceSource("hfds/some (val)", reader, ())))

    assert describe("a") == describe("a") != describe("b")


@pytest.mark.parametrize("inner", [{"base_folder": "own"}, {"raw_folder": "ROOT/own"}, {}])
def test_the_folder_of_torchvision_is_part_of_a_source(tmp_path, inner):
    def describe(root):
        attributes = {key: value.replace("ROOT", str(root)) for key, value in inner.items()}
        dataset = type("Dataset", (list,), {"root": str(root), **attributes})([0, 1])
        return describe_source(TorchvisionSource("torch/some (val)", dataset, ()))

    for name in ("one", "two"):
        (tmp_path / name / "own").mkdir(parents=True)
        (tmp_path / name / "own" / "data").write_bytes(b"data")
    first = describe(tmp_path / "one")
    assert describe(tmp_path / "one") == first
    assert describe(tmp_path / "two") != first
    if inner:
        (tmp_path / "one" / "of another set").touch()
        assert describe(tmp_path / "one") == first
    (tmp_path / "one" / "own" / "data").write_bytes(b"others")
    assert describe(tmp_path / "one") != first


def test_an_interrupted_extraction_resumes(source, how, counting):
    expected = extract(backbone(), source, TRANSFORM, Extraction(how.cache / "other")).vector
    counting.stop_after = 6
    with pytest.raises(KeyboardInterrupt):
        extract(counting, source, TRANSFORM, how)
    assert counting.images == 6
    # Four images were a whole chunk, and six are left.
    counting.stop_after, counting.images = None, 0
    features = extract(counting, source, TRANSFORM, how)
    assert counting.images == 6
    torch.testing.assert_close(features.vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["class_1", "average", "target", "present"])
def test_a_damaged_cache_is_repaired(source, how, counting, name):
    expected = extract(counting, source, TRANSFORM, how).vector.clone()
    path = next(how.cache.glob(f"*/{name}.bin"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    counting.images = 0
    features = extract(counting, source, TRANSFORM, how)
    assert counting.images == 4
    torch.testing.assert_close(features.vector, expected, rtol=1e-4, atol=1e-5)
    assert features.targets.tolist() == [0] * 6 + [1] * 4


def test_unreadable_images_are_left_out(folder, how):
    how = replace(how, max_unreadable=2)
    for name in ("a/0.png", "b/9.png"):
        (folder / "train" / name).write_bytes(b"no image")
    source = open_source(folder)
    wrapped = backbone()
    features = extract(wrapped, source, TRANSFORM, how)
    assert features.indices.tolist() == list(range(1, 9))
    assert features.unreadable == 2
    assert len(features.targets) == len(features.vector) == 8
    expected = wrapped.pooled(TRANSFORM(source.read(8).image)[None])["class_1"][0]
    torch.testing.assert_close(features.vector[-1], expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Threads(World):
    """Ranks that are threads."""

    meeting: Barrier = field(default_factory=lambda: Barrier(2))
    said: dict = field(default_factory=dict)

    def gather(self, value):
        self.said[self.rank] = value
        self.meeting.wait(60)
        values = [self.said[rank] for rank in range(self.size)]
        self.meeting.wait(60)
        return values


def test_ranks_count_unreadable_images_together(folder, how):
    """One in the chunk of each."""
    for name in ("a/0.png", "a/4.png"):
        (folder / "train" / name).write_bytes(b"no image")
    world = Threads(0, 2)

    def work(rank):
        told = replace(how, max_unreadable=1, world=replace(world, rank=rank))
        with pytest.raises(TooManyUnreadable, match=r"2 of the 10 images of .* cannot be read"):
            extract(backbone(), open_source(folder), TRANSFORM, told)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [None, None]


def test_an_image_that_could_not_be_read_is_tried_again(folder, how, counting, monkeypatch):
    source = open_source(folder)
    expected = extract(backbone(), source, TRANSFORM, replace(how, cache=how.cache / "other")).vector
    how = replace(how, max_unreadable=1)

    def fail_once(self, index):
        if index == 5:
            raise Unreadable(self.describe(index), "the network is down")
        return read(self, index)

    read = type(source).read
    monkeypatch.setattr(type(source), "read", fail_once)
    assert extract(counting, source, TRANSFORM, how).unreadable == 1
    monkeypatch.setattr(type(source), "read", read)
    features = extract(counting, source, TRANSFORM, how)
    assert features.unreadable == 0
    assert counting.images == 10
    torch.testing.assert_close(features.vector, expected, rtol=1e-4, atol=1e-5)


def test_features_that_are_not_finite_name_the_image(source, how):
    wrapped = backbone()
    whole = TRANSFORM(source.read(4).image)
    wrapped.pooled = lambda images: {"average": 1 / (images - whole).abs().sum((1, 2, 3))[:, None]}
    with pytest.raises(ValueError, match=r"tiny gives .*a/4\.png features that are not finite"):
        extract(wrapped, source, TRANSFORM, how)
