"""Timing of launches: CUDA-graph replay over several input sets, so that neither launches nor caches are measured."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

_LEAST_LAUNCHES = 20
"""Launches in a graph: the replay's own start is spread over them."""


def median_us(run: Callable[[Any], Any], states: Sequence[Any], *, replays: int = 15) -> float:
    """Median time of one `run(state)` in microseconds.

    Args:
        run: launches work on the current stream, without host synchronisation.
        states: input sets, used in turn.
        replays: timed replays of the graph.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for state in states[:3]:
            run(state)
    torch.cuda.current_stream().wait_stream(stream)
    rounds = -(-_LEAST_LAUNCHES // len(states))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for state in states:
                run(state)
    times = []
    for index in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1e3 / (rounds * len(states)))
    del graph
    return statistics.median(times)


def l2_bytes() -> int:
    """Bytes of the current device's L2 cache."""
    return torch.cuda.get_device_properties(0).L2_cache_size
