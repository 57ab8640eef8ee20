"""A small model of every mechanism, short enough for hundreds of schedules: window 8, top-k 6, pool of 3 blocks of 4."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_model import small_config
from text_server import Client, Serve, TextEngine

from burnish.policy.config import ModelConfig
from burnish.policy.model.transformer import Transformer


@pytest.fixture(autouse=True)
def one_thread():
    """The suite's own speed on a shared machine; results do not depend on it (tested in test_exact_replay)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="small_config")
def small_config_fixture() -> ModelConfig:
    return small_config()


@pytest.fixture(scope="session")
def make_model(make_core: Callable[..., Transformer], small_config: ModelConfig) -> Callable[..., Transformer]:
    """Random weights by seed, biases and sinks included."""

    def make(seed: int = 0, config: ModelConfig | None = None) -> Transformer:
        return make_core(seed, config or small_config).requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Transformer]) -> Transformer:
    """Weights that no test changes; tests that swap weights make their own."""
    return make_model(0)


@pytest.fixture
def serve(spell: Callable[[str], list[int]]) -> Iterator[Serve]:
    """Makes clients of servers whose engine samples the given texts."""
    clients: list[Client] = []

    def serve(*texts: str, step_s: float = 0.0, **options: Any) -> Client:
        clients.append(Client(TextEngine(spell, *texts, step_s=step_s), **options))
        return clients[-1]

    yield serve
    for client in clients:
        client.thread.stop()
