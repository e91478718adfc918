"""`quickvit explore`: a page on which images are turned, and features and answers watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from torch import nn
from tqdm import tqdm

from quickvit.cli.arguments import add_data
from quickvit.cli.build import choose_device, load_model
from quickvit.cli.command import Command
from quickvit.data import Sample, Source, Unreadable, open_source
from quickvit.data.sources.base import UNLABELLED
from quickvit.evaluate.labels import class_names, class_numbers
from quickvit.provenance import require_file, surroundings
from quickvit.report.exploration import ask_in_poses, model_name
from quickvit.report.exploration import explore as explore_images
from quickvit.report.exploration_file import save_exploration
from quickvit.report.explorer import explorer_page

# For each image that is shown, so many are looked at to find different classes and answers that change.
POOL = 16


def explore(arguments: Namespace) -> int:
    """Write a page on which images are turned and mirrored, and an octic model watched beside a baseline."""
    if arguments.changing < 0:
        raise ValueError(f"--changing must be at least 0, got {arguments.changing}")
    for path in (arguments.out, arguments.save):
        if path is not None:
            require_file(path)
    device = choose_device(arguments.device)
    model, baseline = (load_model(name).to(device) for name in (arguments.model, arguments.baseline))
    source = open_source(arguments.data, arguments.split)
    numbers, others = (class_numbers(each, source.classes, source.name) for each in (model, baseline))
    if numbers != others:
        raise ValueError(f"{arguments.model} and {arguments.baseline} have their classes in different orders")
    pool = _classes_in_turn(_pool(source, arguments.images))
    turned = list(islice(_changing(baseline, pool[arguments.images :]), arguments.changing))
    samples = pool[: arguments.images] + turned
    exploration = explore_images(
        model,
        baseline,
        [sample.image for sample in samples],
        class_names(model) or source.classes,
        [UNLABELLED if sample.target == UNLABELLED else numbers[sample.target] for sample in samples],
        channels=arguments.channels,
        progress=True,
    )
    first = arguments.images
    chosen = f"Shown are the first {first} of {len(pool)} images at even distances, from the classes in turn"
    if turned:
        chosen += (
            f", and the next {len(turned)} that the {model_name(baseline)} answers differently when turned"
        )
    exploration = replace(exploration, chosen=f"{chosen}.", credit=arguments.credit)
    page = explorer_page(exploration)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}: {len(samples)} images, {len(page) / 1000:.0f} kB; open it in a browser")
    print(f"features follow the image within {exploration.difference:.1e} of their largest value")
    if arguments.save is not None:
        save_exploration(exploration, arguments.save, surroundings(device, arguments.command_line))
    return 0


def _pool(source: Source, images: int) -> list[Sample]:
    """Samples at even distances, more than are asked for, and those of the largest distances first.

    What cannot be read is passed over.
    """
    if not 1 <= images <= len(source):
        raise ValueError(f"--images must be from 1 to the {len(source)} of {source.name}, got {images}")
    count = min(POOL * images, len(source))
    pool = []
    for number in (number for first in range(POOL) for number in range(first, count, POOL)):
        try:
            pool.append(source.read(number * len(source) // count))
        except Unreadable:
            continue
    if len(pool) < images:
        raise ValueError(f"only {len(pool)} of {count} images of {source.name} that were tried could be read")
    return pool


def _classes_in_turn(samples: Iterable[Sample]) -> list[Sample]:
    """The first sample of each class, then the second of each, and so on."""
    seen: Counter[int] = Counter()
    rounds = []
    for sample in samples:
        rounds.append((seen[sample.target], sample))
        seen[sample.target] += 1
    return [sample for _, sample in sorted(rounds, key=itemgetter(0))]


def _changing(baseline: nn.Module, samples: Iterable[Sample]) -> Iterator[Sample]:
    """The samples that a model does not give the same answer in all poses."""
    for sample in tqdm(samples, desc="images that change their answer"):
        labels = ask_in_poses(baseline, sample.image).argmax(-1)
        if (labels != labels[0]).any():
            yield sample


def _add_explore(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="an i8, h8 or d8: safetensors file, or the folder of a run")
    parser.add_argument("--baseline", required=True, help="what it is compared with, for example a ViT")
    add_data(parser)
    parser.add_argument("--split", default="val", help="train, val, test or all")
    parser.add_argument("--images", type=int, default=6, help="how many images to choose from")
    parser.add_argument(
        "--changing",
        type=int,
        default=2,
        help="further images, that the baseline answers differently when turned",
    )
    parser.add_argument("--credit", default="", help="whose images these are, for the page")
    parser.add_argument("--channels", type=int, default=2, help="channels of each irrep that are shown")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--out", default="explorer.html", help="page to write")
    parser.add_argument("--save", help="JSON file to write too, for `quickvit report`")


COMMANDS = {"explore": Command(explore, _add_explore)}
