"""`quickvit explore`: a page on which images are turned, and features and answers watched."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.arguments import add_data
from quickvit.cli.build import choose_device, load_model
from quickvit.cli.command import Command
from quickvit.data import Sample, Source, Unreadable, open_source
from quickvit.report.exploration import explore as explore_images
from quickvit.report.explorer import explorer_page


def explore(arguments: Namespace) -> int:
    """Write a page on which images are turned and mirrored, and an octic model watched beside a baseline."""
    device = choose_device(arguments.device)
    model, baseline = (load_model(name).to(device) for name in (arguments.model, arguments.baseline))
    source = open_source(arguments.data, arguments.split)
    samples = _evenly(source, arguments.images)
    exploration = explore_images(
        model,
        baseline,
        [sample.image for sample in samples],
        source.classes,
        [sample.target for sample in samples],
        channels=arguments.channels,
        progress=True,
    )
    page = explorer_page(exploration)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}: {len(samples)} images, {len(page) / 1000:.0f} kB; open it in a browser")
    print(f"features follow the image within {exploration.difference:.1e} of their largest value")
    return 0


def _evenly(source: Source, count: int) -> list[Sample]:
    """Samples at even distances, in a folder of different classes; the next one where one cannot be read."""
    if not 1 <= count <= len(source):
        raise ValueError(f"--images must be from 1 to the {len(source)} of {source.name}, got {count}")
    samples: list[Sample] = []
    index, end = 0, len(source)
    while len(samples) < count and index < end:
        try:
            samples.append(source.read(index))
        except Unreadable:
            index += 1
            continue
        index = max(index + 1, len(samples) * end // count)
    if len(samples) < count:
        raise ValueError(f"only {len(samples)} of the images of {source.name} that were tried could be read")
    return samples


def _add_explore(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="an i8, h8 or d8: safetensors file, or the folder of a run")
    parser.add_argument("--baseline", required=True, help="what it is compared with, for example a ViT")
    add_data(parser)
    parser.add_argument("--split", default="val", help="train, val, test or all")
    parser.add_argument("--images", type=int, default=6, help="how many images to choose from")
    parser.add_argument("--channels", type=int, default=2, help="channels of each irrep that are shown")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--out", default="explorer.html", help="page to write")


COMMANDS = {"explore": Command(explore, _add_explore)}
