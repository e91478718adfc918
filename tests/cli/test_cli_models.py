"""`quickvit models` and `info`."""

import json

import pytest


class TestModels:
    def test_json_has_every_variant_of_a_size(self, run):
        code, out, err = run("models", "--size", "huge", "--json")
        rows = json.loads(out)
        assert (code, err) == (0, "")
        assert list(rows[0]) == [
            *("name", "family", "size", "patch_size", "invariant"),
            *("parameters", "gmacs", "gflops"),
        ]
        kinds = [(row["family"], row["invariant"], row["patch_size"]) for row in rows]
        for patch in (14, 16):
            assert {(family, invariant) for family, invariant, p in kinds if p == patch} == {
                ("vit", None),
                ("d8", "power_spectrum"),
                ("i8", "power_spectrum"),
                ("i8", "polynomial"),
                ("h8", None),
                ("h2", None),
            }
        row = next(r for r in rows if (r["name"], r["family"]) == ("quickvit_h8_huge_patch14_224", "h8"))
        assert round(row["parameters"] / 1e6, 1) == 355.8
        assert row["gmacs"] == pytest.approx(101.6, rel=0.01)
        assert row["gflops"] == 2 * row["gmacs"]

    def test_table(self, run):
        code, out, _ = run("models", "--family", "i8", "--size", "large", "--patch", "16")
        lines = [line.split() for line in out.splitlines()]
        assert code == 0
        assert lines[0] == ["name", "family", "invariant", "parameters", "(M)", "GMACs"]
        assert lines[2:] == [
            ["quickvit_i8_large_patch16_224", "i8", "power_spectrum", "172.1", "37.5"],
            ["quickvit_i8_large_patch16_224", "i8", "polynomial", "175.5", "38.2"],
        ]

    def test_unknown_family(self, run):
        code, out, err = run("models", "--family", "h9")
        assert (code, out) == (2, "")
        assert err == "quickvit: error: unknown family 'h9'; expected one of vit, d8, i8, h8, h2\n"


class TestInfo:
    def test_parts_add_up(self, run):
        _, out, _ = run("info", "quickvit_i8_22b_patch14_224", "--json")
        result = json.loads(out)
        assert result["family"] == "i8"
        assert result["octic_depth"] == 24
        assert [p["part"] for p in result["parts"]] == [
            *("lift", "octic_blocks", "invariant", "standard_blocks", "head")
        ]
        for key in ("parameters", "gmacs", "gflops"):
            assert sum(part[key] for part in result["parts"]) == pytest.approx(result[key])

    @pytest.mark.parametrize(
        "name", ["baseline_tiny_patch16_224", "vit_tiny_patch16_224", "deit3_small_patch16_224"]
    )
    def test_standard_vits(self, run, name):
        code, out, _ = run("info", name)
        assert code == 0
        assert "standard blocks" in out
        assert "octic blocks" not in out

    def test_files_and_runs(self, run, trained):
        printed = [
            json.loads(run("info", name, "--json")[1]) for name in (trained, trained / "model.safetensors")
        ]
        for result in printed:
            assert (result["family"], result["embed_dim"], result["img_size"]) == ("i8", 64, [16, 16])
        assert printed[0]["parameters"] == printed[1]["parameters"] > 0

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("quickvit_h8_larg_patch16_224", "did you mean quickvit_h8_large_patch16_224,"),
            ("%%%", "`quickvit models` lists the names"),
            ("resnet50", "resnet50 is neither a Quick ViT nor a ViT of timm"),
        ],
    )
    def test_unknown_names(self, run, name, message):
        code, out, err = run("info", name)
        assert (code, out) == (2, "")
        assert err.startswith("quickvit: error: ")
        assert message in err
        assert err.count("\n") == 1
