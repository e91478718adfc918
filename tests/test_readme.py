"""The README says what is so. That its example runs, is tested with the pages of docs/."""

import re
from collections import defaultdict
from pathlib import Path

from records import WHOLE_MODELS, measured

README = Path(__file__).parent.parent / "README.md"


def test_the_commands_exist():
    from quickvit.cli import COMMANDS

    named = set(re.findall(r"`quickvit (\w+)", README.read_text()))
    assert named - {"COMMAND"} <= set(COMMANDS)
    assert set(COMMANDS) <= named


def test_the_table_of_sizes_is_what_the_command_says():
    from quickvit.bench.flops import Variant

    text = README.read_text()
    (header,) = re.findall(r"^\| \| (ViT \| h2 .*) \|$", text, re.MULTILINE)
    families = [name.strip().lower() for name in header.split("|")]
    for label, size, patch in (("L/16", "large", 16), ("H/14", "huge", 14)):
        costs = [Variant(family, size, patch).cost() for family in families]
        parameters = " | ".join(f"{cost.parameters / 1e6:.1f}" for cost in costs)
        gmacs = " | ".join(f"{cost.macs / 1e9:.1f}" for cost in costs)
        assert f"| {label}: parameters (M) | {parameters} |" in text
        assert f"| {label}: GMACs | {gmacs} |" in text


def test_the_table_of_speed_is_what_was_measured():
    text = README.read_text()
    for name in ("cpu_model", "cpu_train"):
        record = measured(name)
        assert re.sub(r" --out \S+", "", record["command"]) in text
        for vit, d8 in zip(record["results"][::2], record["results"][1::2], strict=True):
            assert f"| {vit['case']} | {vit['ms']:.0f} | {d8['ms']:.0f} | {d8['ratio']:.2f}× |" in text


def test_the_speed_on_a_gpu_is_what_was_measured():
    text = README.read_text()
    for name in WHOLE_MODELS:
        record = measured(name)
        ratios = defaultdict(dict)
        for row in record["results"]:
            if row["ratio"] is not None:
                ratios[row["case"]][row["name"]] = f"{row['ratio']:.2f}×"
        for case, found in ratios.items():
            assert f"| {case} | {found.get('h8', '–')} | {found['d8']} |" in text
    d8 = measured("h200_train_large_graph")["results"][1]
    assert f"compiled as one graph it is {d8['ratio']:.2f}× as" in text


def test_the_headline_is_what_was_measured():
    def ratio(name, case):
        record = measured(name)
        return next(r["ratio"] for r in record["results"] if (r["case"], r["name"]) == (case, "d8"))

    cpu, gpu = (ratio(name, "ViT-Large/16 forward") for name in ("cpu_model", "h200_model"))
    assert f"{cpu:.1f}× as fast as timm's on a CPU and {gpu:.1f}× as fast on an H200" in README.read_text()
