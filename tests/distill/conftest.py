"""One tiny student with two teachers, and what it said under its own engine, for all tests of distillation."""

import asyncio

import pytest
from distill_world import World, make_policies, play


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    folder = tmp_path_factory.mktemp("distill")
    make_policies(folder)
    return World(folder, asyncio.run(play(folder)))
