"""Checkpoints come back as they went, and what does not fit is refused with a reason."""

import copy
import json
import os
import pickle
import stat
from functools import wraps

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import resolve_model_data_config
from torch import nn
from torch.distributed import HashStore
from torch.optim.swa_utils import AveragedModel

from quickvit import QuickVisionTransformer, load_checkpoint, save_checkpoint
from quickvit.layers import INVARIANTS
from quickvit.models import FAMILIES
from quickvit.models.checkpoints import (
    CONFIG_KEY,
    CheckpointError,
    load_weights,
    read_checkpoint,
    restore,
    save_weights,
    strip_wrappers,
)
from quickvit.models.declared import declare, declared

SMALL = {
    "img_size": 16,
    "patch_size": 4,
    "num_classes": 5,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "init_values": 0.5,
}


def build(**changes) -> QuickVisionTransformer:
    torch.manual_seed(0)
    return QuickVisionTransformer(**{**SMALL, **changes}).eval()


def images(height: int = 16, width: int = 16) -> torch.Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))


def assert_same(found: nn.Module, model: nn.Module, x: torch.Tensor | None = None) -> None:
    ours, theirs = found.state_dict(), model.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        assert ours[name].dtype == tensor.dtype, name
    assert found.config == model.config
    x = images() if x is None else x
    with torch.no_grad():
        assert torch.equal(found.eval()(x), model.eval()(x))


@pytest.fixture
def file(tmp_path):
    """A good checkpoint of a small model."""
    path = tmp_path / "model.safetensors"
    save_checkpoint(build(), path)
    return path


def rewrite(path, change=lambda state: state, config=None) -> None:
    """Change the tensors or the configuration of a checkpoint."""
    with safe_open(str(path), framework="pt") as opened:
        metadata = opened.metadata()
    state = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(state), path, {**metadata, **({} if config is None else {CONFIG_KEY: config})})


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize("family", FAMILIES)
def test_families_come_back(family, tmp_path):
    model = build(family=family)
    save_checkpoint(model, tmp_path / "model.safetensors")
    found = load_checkpoint(tmp_path / "model.safetensors")
    assert found.training
    assert_same(found, model)
    assert all(p.requires_grad and p.is_leaf and not p.is_meta for p in found.parameters())


def test_a_folder_stands_for_the_model_in_it(tmp_path):
    model = build(family="i8")
    save_checkpoint(model, tmp_path / "model.safetensors")
    assert_same(load_checkpoint(tmp_path), model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint at .*/empty/model\.safetensors, which a run "
    ):
        load_checkpoint(tmp_path / "empty")


def test_timm_is_told_the_size_of_images(tmp_path):
    created = timm.create_model("quickvit_i8_tiny_patch16_224", img_size=96, in_chans=1, depth=2)
    assert resolve_model_data_config(created)["input_size"] == (1, 96, 96)
    created.set_input_size((64, 32))
    assert resolve_model_data_config(created)["input_size"] == (1, 64, 32)
    for model in (created, build(img_size=16)):
        save_checkpoint(model, tmp_path / "model.safetensors")
        found = load_checkpoint(tmp_path)
        assert resolve_model_data_config(found)["input_size"] == (model.in_chans, *model.img_size)
    assert resolve_model_data_config(load_checkpoint(tmp_path, img_size=32))["input_size"] == (3, 32, 32)


def test_names_of_classes_come_back(tmp_path):
    model = build(num_classes=2)
    declare(model, label_names=("cat", "dog"))
    save_checkpoint(model, tmp_path / "model.safetensors")
    assert declared(load_checkpoint(tmp_path))["label_names"] == ("cat", "dog")
    for wrong in ("cat", ["cat", 2], [["cat"]]):
        config = {**model.config, "preprocessing": {"label_names": wrong}}
        rewrite(tmp_path / "model.safetensors", config=json.dumps(config))
        with pytest.raises(CheckpointError, match="label_names="):
            load_checkpoint(tmp_path)


def test_another_number_of_classes_is_a_new_head(tmp_path):
    save_checkpoint(build(num_classes=2), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has a head of 2 classes; .* call reset_classifier\(3\)"):
        load_checkpoint(tmp_path, num_classes=3)
    assert load_checkpoint(tmp_path, num_classes=2).num_classes == 2


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_invariants_come_back(invariant, tmp_path):
    model = build(family="i8", invariant=invariant)
    save_checkpoint(model, tmp_path / "model.safetensors")
    found = load_checkpoint(tmp_path / "model.safetensors")
    assert_same(found, model)
    assert not any(buffer.is_meta for buffer in found.buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_token": True, "reg_tokens": 2},
        {"class_token": False, "global_pool": "avg"},
        {"img_size": (16, 32), "octic_depth": 2},
        {"lift": "free", "released_norm": True, "qkv_bias": False},
        {"num_classes": 0, "init_values": None},
        {"drop_path_rate": 0, "mlp_ratio": 2, "pos_grid": 6},
    ],
    ids=str,
)
def test_options_come_back(changes, tmp_path):
    model = build(**changes)
    save_checkpoint(model, tmp_path / "model.safetensors")
    assert_same(load_checkpoint(tmp_path / "model.safetensors"), model, images(*model.img_size))


def changed_model() -> QuickVisionTransformer:
    """A model whose head, pooling and image size are no longer those it was made with."""
    model = build(family="i8")
    model.reset_classifier(3, "avg")
    model.set_input_size((24, 32))
    return model


def test_changes_after_construction_come_back(tmp_path):
    model = changed_model()
    save_checkpoint(model, tmp_path / "model.safetensors")
    found = load_checkpoint(tmp_path / "model.safetensors")
    assert_same(found, model, images(24, 32))
    assert found.img_size == (24, 32)


def test_precision_comes_back(tmp_path):
    model = build().double()
    save_checkpoint(model, tmp_path / "model.safetensors")
    assert_same(load_checkpoint(tmp_path / "model.safetensors"), model, images().double())


def test_names_do_not_depend_on_mode_or_wrapper(tmp_path):
    model = build()
    by_blocks = copy.deepcopy(model)
    by_blocks.blocks[0] = torch.compile(by_blocks.blocks[0], backend="eager")
    compiled = torch.compile(model, backend="eager")
    compiled(images())
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        variants = [model.train(), compiled, by_blocks, parallel, torch.compile(parallel, backend="eager")]
        variants.append(AveragedModel(model))
        for variant in variants:
            save_checkpoint(variant, tmp_path / "variant.safetensors")
            assert list(load_file(tmp_path / "variant.safetensors")) == sorted(model.state_dict())
            assert_same(load_checkpoint(tmp_path / "variant.safetensors"), model)
    finally:
        torch.distributed.destroy_process_group()


def test_weights_load_into_wrapped_models(file):
    state, _ = read_checkpoint(file)
    model = build(drop_path_rate=0.1)
    nn.init.zeros_(model.head.weight)
    compiled = torch.compile(model, backend="eager")
    load_weights(compiled, {f"module.{name}": tensor for name, tensor in state.items()})
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_gathered_weights_are_saved_in_place_of_the_models_own(tmp_path):
    model = build()
    state = {f"module.{name}": tensor + 1 for name, tensor in model.state_dict().items()}
    save_checkpoint(model, tmp_path / "model.safetensors", state)
    found = load_checkpoint(tmp_path / "model.safetensors").state_dict()
    assert all(torch.equal(found[name], tensor + 1) for name, tensor in model.state_dict().items())


def test_overrides_replace_the_configuration(file):
    model = load_checkpoint(file, drop_path_rate=0.2, img_size=24)
    assert model.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    assert model.img_size == (24, 24)
    assert model(images(24, 24)).shape == (1, 5)
    with pytest.raises(TypeError, match="drop_paths"):
        load_checkpoint(file, drop_paths=0.2)


def test_a_model_does_not_change_with_its_file(file):
    model = load_checkpoint(file)
    with open(file, "r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        opened.write(bytes(64))
    assert_same(model, build())


def test_wrappers_are_parts_of_a_name_and_not_of_its_words():
    assert strip_wrappers("module._orig_mod.blocks.0._orig_mod.attn.qkv") == "blocks.0.attn.qkv"
    assert strip_wrappers("submodule.weight") == "submodule.weight"
    assert strip_wrappers("my_orig_mod.module_x.weight") == "my_orig_mod.module_x.weight"


# ---------------------------------------------------------------------- writing


def test_a_failed_write_leaves_the_old_file(file, monkeypatch):
    before = file.read_bytes()

    def fail(tensors, name, metadata):
        with open(name, "wb") as opened:
            opened.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("quickvit.models.checkpoints.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(build(), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_permissions_are_those_of_any_new_file(file):
    other = file.with_name("other")
    other.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_model_that_could_not_be_rebuilt_is_not_saved(tmp_path):
    model = build(family="i8")
    model.prune_intermediate_layers([0])
    with pytest.raises(CheckpointError, match=r"no longer describes: missing blocks\.1\."):
        save_checkpoint(model, tmp_path / "model.safetensors")
    assert not os.listdir(tmp_path)
    with pytest.raises(TypeError, match="expected a QuickVisionTransformer, got Linear"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "model.safetensors")


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("colours", [None, 1, 3])
def test_colours_of_any_number_of_channels_come_back(channels, colours, tmp_path):
    model = build(in_chans=channels)
    model.pretrained_cfg = {"mean": [0.25] * (colours or channels), "std": (0.5,) * (colours or channels)}
    save_checkpoint(model, tmp_path / "model.safetensors")
    found = load_checkpoint(tmp_path / "model.safetensors").pretrained_cfg
    assert {name: found[name] for name in ("mean", "std")} == {
        name: tuple(value) for name, value in model.pretrained_cfg.items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic_img_size": 1}, "cannot save the model: it has dynamic_img_size=1 .*expected bool"),
        ({"drop_rate": True}, "cannot save the model: it has drop_rate=True .*expected float"),
        ({"drop_rate": torch.tensor(0.5)}, "whose configuration JSON does not hold: .*Tensor"),
    ],
    ids=str,
)
def test_a_configuration_that_would_be_refused_is_not_written(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(build(**change), tmp_path / "model.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("declared", [{"interpolation": "random"}, {"mean": (0.5, 0.5)}, {"std": (0, 0, 0)}])
def test_a_preparation_that_would_be_refused_is_not_written(declared, tmp_path):
    model = build()
    model.pretrained_cfg = declared
    with pytest.raises(CheckpointError, match=r"cannot save the model: it has .* for the preparation"):
        save_checkpoint(model, tmp_path / "model.safetensors")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["model.pth", "model", "model.safetensors.bak"])
def test_only_safetensors_are_written(name, tmp_path, monkeypatch):
    # Whatever takes time comes later.
    monkeypatch.setattr("quickvit.models.checkpoints._unwrap", None)
    for save in (save_checkpoint, lambda model, path: save_weights(model.state_dict(), path)):
        with pytest.raises(ValueError, match=rf"written to \.safetensors files, got .*{name}"):
            save(build(), tmp_path / name)
    assert not os.listdir(tmp_path)


# ---------------------------------------------------------------------- tensors that do not fit


def without_bias(state):
    return {name: tensor for name, tensor in state.items() if name != "norm.bias"}


MISFITS = {
    "missing norm.bias": without_bias,
    "unexpected extra": lambda state: {**state, "extra": torch.zeros(1)},
    r"another shape norm.bias \(31,\) for \(32,\)": lambda state: {**state, "norm.bias": torch.zeros(31)},
    "another type norm.bias torch.int": lambda state: {**state, "norm.bias": torch.zeros(32).int()},
    "differ by a wrapper's prefix": lambda state: {**state, "module.norm.bias": torch.zeros(32)},
}


@pytest.mark.parametrize("message", MISFITS)
def test_tensors_that_do_not_fit_are_named(message, file):
    rewrite(file, MISFITS[message])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(file)
    state, _ = read_checkpoint(file)
    with pytest.raises(CheckpointError, match=message):
        load_weights(build(), state)


def test_only_names_may_differ_when_not_strict(file):
    rewrite(file, lambda state: {**without_bias(state), "extra": torch.zeros(1)})
    model, expected = load_checkpoint(file, strict=False), build()
    assert torch.equal(model.norm.weight, expected.norm.weight)
    assert torch.equal(model.norm.bias, torch.zeros(32))
    load_weights(expected, read_checkpoint(file)[0], strict=False)
    rewrite(file, lambda state: {**state, "norm.weight": torch.zeros(31)})
    with pytest.raises(CheckpointError, match=r"another shape norm\.weight"):
        load_checkpoint(file, strict=False)
    with pytest.raises(CheckpointError, match=r"another shape norm\.weight"):
        load_weights(expected, read_checkpoint(file)[0], strict=False)


def test_what_a_file_lacks_has_the_type_of_what_it_has(tmp_path):
    path = tmp_path / "model.safetensors"
    save_checkpoint(build(num_classes=0).bfloat16(), path)
    model = load_checkpoint(path, strict=False, num_classes=3)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(images().bfloat16()).shape == (1, 3)


class Counted(QuickVisionTransformer):
    """A model whose first tensor is an integer."""

    @wraps(QuickVisionTransformer.__init__)
    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("seen", torch.tensor(7))


@pytest.mark.parametrize("missing", ["head.weight", "seen"])
def test_what_a_file_lacks_does_not_follow_integers(missing):
    model = Counted(**SMALL).bfloat16()
    state = model.state_dict()
    assert next(iter(state)) == "seen"
    del state[missing]
    found = restore(model.config, state, strict=False, model_class=Counted)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    assert found.seen.dtype == torch.int64


# ---------------------------------------------------------------------- files that are none


class Bomb:
    """A pickle of this makes a folder when it is loaded by a loader that runs code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_small_pickle_does_not_fill_the_memory(tmp_path):
    torch.save({"weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="tensors that are larger than what is stored: weight"):
        read_checkpoint(tmp_path / "model.pth")


def test_code_in_a_pickle_is_not_run(tmp_path):
    trap = tmp_path / "trap"
    torch.save({"model": {"weight": Bomb(trap)}}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"no code of a checkpoint is ever run.*mkdir"):
        read_checkpoint(tmp_path / "model.pth")
    assert not trap.exists()
    # The trap works: a loader that trusts the file falls into it.
    torch.load(tmp_path / "model.pth", weights_only=False)
    assert trap.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_damaged_files_are_refused(suffix, damage, tmp_path):
    path = tmp_path / f"model{suffix}"
    if suffix == ".pth":
        torch.save(build().state_dict(), path)
    else:
        save_checkpoint(build(), path)
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"<html>not found</html>\n" * 9,
        "truncated": content[: len(content) // 2],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file|damaged or holds more"):
        load_checkpoint(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_any_damage_to_a_pickle_is_a_checkpoint_error(legacy, tmp_path):
    path = tmp_path / "model.pth"
    torch.save({"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    for length in range(0, len(content) - 64, len(content) // 50):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_tensors_of_impossible_shapes_are_refused(tmp_path):
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list, expected a dictionary"),
        ({"model": {"weight": torch.zeros(1), "step": 3}}, "entries that are not tensors: step"),
        ({0: torch.zeros(1)}, "entries that are not tensors: 0"),
        ({}, "holds no tensors"),
    ],
)
def test_foreign_pickles_are_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "model.pth")


@pytest.mark.parametrize("nest", ["teacher", "model", "state_dict"])
def test_weights_are_found_where_training_programs_keep_them(nest, tmp_path):
    state = build().state_dict()
    torch.save({nest: state, "epoch": 3}, tmp_path / "model.pth")
    found, config = read_checkpoint(tmp_path / "model.pth")
    assert found.keys() == state.keys()
    assert config is None
    with pytest.raises(CheckpointError, match="does not say of which model"):
        load_checkpoint(tmp_path / "model.pth")


def test_a_plain_pickle_is_refused(tmp_path):
    (tmp_path / "model.pth").write_bytes(pickle.dumps({"weight": [1.0, 2.0]}, protocol=2))
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "model.pth")


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere.safetensors")


# ---------------------------------------------------------------------- configurations that are none


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"depth": ' + "9" * 5000 + "}", "not JSON|depth"),
        ("[1]", "not a dictionary"),
    ],
    ids=["open", "deep", "digits", "list"],
)
def test_a_configuration_must_be_a_dictionary(text, message, file):
    rewrite(file, config=text)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widht": 3}, "does not know: widht"),
        ({"return": None}, "does not know: return"),
        ({"self": 1}, "does not know: self"),
        ({"depth": "2"}, "depth='2'.*expected int"),
        ({"depth": 2.0}, "depth=2.0"),
        ({"depth": True}, "depth=True"),
        ({"qkv_bias": 1}, "qkv_bias=1.*expected bool"),
        ({"family": "h9"}, "cannot be built: unknown family"),
        ({"family": None}, "family=None.*expected str"),
        ({"global_pool": "map"}, "global_pool must be one of .*'max'"),
        ({"img_size": [16, 16, 16]}, "img_size=.*expected int | tuple"),
        ({"img_size": [16, 0]}, "img_size=.*1 or more"),
        ({"num_heads": 0}, "num_heads=0.*1 or more"),
        ({"patch_size": 0}, "patch_size=0.*1 or more"),
        ({"patch_size": [2048, 2048], "img_size": 2048}, "patch_embed.weight of size 2048"),
        ({"reg_tokens": -1}, "reg_tokens=-1.*0 or more"),
        ({"num_classes": 10**12}, "num_classes=1000000000000"),
        ({"depth": 10**400}, "depth=1000.*within reason"),
        ({"mlp_ratio": -(10**400)}, "mlp_ratio=-1000.*within reason"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio=nan"),
        ({"mlp_ratio": 1e300}, "mlp_ratio=1e"),
        ({"drop_rate": 2.0}, "cannot be built"),
        ({"num_heads": 3}, "cannot be built: each head needs"),
        ({"num_heads": 3, "octic_depth": 0}, "cannot be built"),
        ({"class_token": False}, "cannot be built: global_pool='token' needs"),
        # Each of these would take all memory or all day if it were built.
        ({"embed_dim": 2**24}, "does not fit the model: of another shape"),
        ({"embed_dim": 2**30, "mlp_ratio": 2.0**30}, "cannot be built|does not fit"),
        ({"num_classes": 2**30}, "does not fit the model: of another shape head"),
        ({"reg_tokens": 2**30}, "does not fit the model: missing reg_token.weight"),
        ({"depth": 2**30}, "depth of size 1073741824"),
        ({"img_size": 2**20}, "pos_embed.weight of size 262144"),
        ({"pos_grid": 4096}, "pos_embed.weight of size 4096"),
        ({"patch_size": 2048, "img_size": 2048}, "patch_embed.weight of size 2048"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_configuration_must_make_sense(change, message, file):
    _, config = read_checkpoint(file)
    rewrite(file, config=json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(file)


@pytest.mark.parametrize(
    "change",
    [
        {"mean": [0.5, 0.5]},
        {"mean": []},
        {"mean": [0.5, 0.5, "red"]},
        {"mean": [0.5, 0.5, 10**400]},
        {"std": []},
        {"std": [0.5, 0.5, 0.0]},
        {"std": [0.5, 0.5, float("inf")]},
        {"interpolation": "magic"},
        {"crop_pct": 2.0},
        {"crop_mode": ["center"]},
        {"url": "https://example.com"},
        "center",
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_preparation_of_images_must_make_sense(change, file):
    _, config = read_checkpoint(file)
    rewrite(file, config=json.dumps({**config, "preprocessing": change}))
    with pytest.raises(CheckpointError, match="for the preparation of images"):
        load_checkpoint(file)


def test_a_huge_grid_is_refused_even_without_its_tensor(file):
    _, config = read_checkpoint(file)
    config = json.dumps({**config, "depth": 1, "pos_grid": 4096})
    rewrite(file, lambda state: {"norm.bias": state["norm.bias"]}, config)
    with pytest.raises(CheckpointError, match="size 4096, its tensors allow 64"):
        load_checkpoint(file)


# ---------------------------------------------------------------------- the Hub's folder


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_come_back(family, tmp_path):
    model = build(family=family, img_size=(16, 24))
    model.save_pretrained(tmp_path)
    found = QuickVisionTransformer.from_pretrained(tmp_path)
    assert not found.training
    assert_same(found, model, images(16, 24))


def test_folders_keep_changes_after_construction(tmp_path):
    model = changed_model()
    torch.compile(model, backend="eager").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_classes"], config["img_size"], config["pos_grid"]) == (3, [24, 32], 4)
    found = QuickVisionTransformer.from_pretrained(tmp_path)
    assert_same(found, model, images(24, 32))
    found.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
    copied = copy.deepcopy(model)
    copied.reset_classifier(7)
    copied.save_pretrained(tmp_path / "copy")
    assert QuickVisionTransformer.from_pretrained(tmp_path / "copy").num_classes == 7
    assert model.config["num_classes"] == 3


def test_folder_overrides_and_missing_configuration(tmp_path):
    build().save_pretrained(tmp_path)
    found = QuickVisionTransformer.from_pretrained(tmp_path, img_size=24, drop_path_rate=0.2)
    assert (found.img_size, found.config["drop_path_rate"]) == ((24, 24), 0.2)
    with pytest.raises(TypeError, match="drop_paths"):
        QuickVisionTransformer.from_pretrained(tmp_path, drop_paths=0.2)
    # The weights carry their configuration too.
    (tmp_path / "config.json").unlink()
    assert_same(QuickVisionTransformer.from_pretrained(tmp_path), build())


@pytest.mark.parametrize("message", MISFITS)
def test_folders_are_strict(message, tmp_path):
    build().save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", MISFITS[message])
    with pytest.raises(CheckpointError, match=message):
        QuickVisionTransformer.from_pretrained(tmp_path)


def test_folders_with_another_configuration_are_refused(tmp_path):
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"embed_dim": 64}, r"another shape .*norm\.weight|another shape"),
        ({"widht": 1}, "does not know: widht"),
        ({"depth": "two"}, "depth='two'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(CheckpointError, match=message):
            QuickVisionTransformer.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        QuickVisionTransformer.from_pretrained(tmp_path)


def test_folders_load_without_strictness_on_request(tmp_path):
    build().save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", without_bias)
    model = QuickVisionTransformer.from_pretrained(tmp_path, strict=False)
    assert torch.equal(model.norm.bias, torch.zeros(32))
