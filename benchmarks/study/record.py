"""What a run of the paper's scale says, tested and written down for the report.

    python benchmarks/study/record.py RUN --imagenet IMAGENET [--ade20k ADE20K] [--voc2012 VOC2012] …

RUN is a folder of `quickvit train deit3` or `dinov2`. A classifier is tested on ImageNet, upright and turned; frozen
features by `quickvit eval all`, on every data set that is given. Writes
RESULTS/PLACE-SIZE-STUDY/FAMILY-SEED.json for each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from study import HERE, MAIN, QUICKVIT, about

from quickvit.cli.protocols import PLACES
from quickvit.provenance import write
from quickvit.report.tables import frozen

CLASSIFIED = "imagenet"


def answers(*command: str) -> dict[str, Any]:
    """What an evaluation prints."""
    done = subprocess.run([*QUICKVIT, "eval", *command, "--json"], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def records(folder: Path, places: Mapping[str, str], options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A record of the run for each data set."""
    found = about(folder)
    family, size = family_and_size(found["model"]["name"])

    def record(study: str, place: str, poses: list[dict[str, Any]]) -> dict[str, Any]:
        return {"study": study, "dataset": f"{place}-{size}", "name": family, **found, "poses": poses}

    if found["training"]["recipe"] == "deit3":
        if places.keys() != {CLASSIFIED}:
            raise ValueError(f"{folder} is a classifier, which is tested on --{CLASSIFIED} alone")
        result = answers("rotation", str(folder), f"--data={places[CLASSIFIED]}", *options)
        yield record(MAIN, CLASSIFIED, result["rows"])
        return
    row = answers("all", str(folder), *(f"--{place}={path}" for place, path in places.items()), *options)
    for place in places:
        scores = {name: row[f"{place} {name}"] for name in ("linear", "knn")}
        yield record(frozen.STUDY, place, [{"pose": "upright", "scores": scores}])


def family_and_size(model: str) -> tuple[str, str]:
    """Of a model's name: vit and large of baseline_large_patch16_224."""
    words = model.split("_")
    if words[0] == "baseline":
        return "vit", words[1]
    if words[0] != "quickvit":
        raise ValueError(f"the run's model is {model}; expected a Quick ViT or a baseline")
    return words[1], words[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Test a run, and write what it says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    for place in PLACES:
        parser.add_argument(f"--{place}", help="folder of the data set")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further options of the tests")
    arguments = parser.parse_args(argv)
    places = {place: path for place in PLACES if (path := getattr(arguments, place))}
    if not places:
        parser.error(f"give at least one of {', '.join(f'--{place}' for place in PLACES)}")
    for record in records(arguments.run, places, arguments.extra):
        folder = arguments.results / f"{record['dataset']}-{record['study']}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{record['name']}-{record['seed']}.json"
        write(record, file)
        print(file)


if __name__ == "__main__":
    main()
