"""Launches side by side: in CUDA graphs only, and nothing after them begins before all have ended."""

import torch

from quickvit.ops import streams

DEVICE = torch.device("cuda")


class Stream:
    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.events.append(f"on {self.name}")

    def __exit__(self, *_):
        self.events.append("back")


def events(monkeypatch, capturing):
    seen = []
    monkeypatch.setattr(streams, "_side_stream", lambda device, lane: Stream(f"lane {lane}", seen))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", seen))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    with streams.side_by_side(DEVICE, 1) as branch:
        with branch:
            seen.append("one")
        seen.append("other")
    return seen


def test_in_a_graph_a_branch_leaves_and_comes_back(monkeypatch):
    expected = ["lane 1 waits for main", "on lane 1", "one", "back", "other", "main waits for lane 1"]
    assert events(monkeypatch, True) == expected


def test_elsewhere_one_comes_after_the_other(monkeypatch):
    assert events(monkeypatch, False) == ["one", "other"]
    with streams.side_by_side(torch.device("cpu")) as branch, branch:
        pass
