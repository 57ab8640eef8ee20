"""Staleness and admission: a discrete-event simulation over random durations, and the public cases by hand."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from burnish.rollout.buffer import Buffer


@dataclass
class Simulation:
    """Episodes of random length, a trainer that takes a fixed time a step, and the buffer between them."""

    buffer: Buffer
    group_size: int
    durations: list[float]
    """Of each slot, in the run's order."""
    train_s: float
    consumed: list[tuple[str, int, int]] = field(default_factory=list)
    """(group, version it was born under, version trained)."""
    most_running: int = 0

    def run(self) -> None:
        events: list[tuple[float, int, str]] = []
        now, version, next_slot, is_training = 0.0, 0, 0, False
        num_groups = len(self.durations) // self.group_size
        born: dict[str, int] = {}
        while True:
            while next_slot < len(self.durations):
                group_id = f"{next_slot // self.group_size:06d}"
                if not self.buffer.may_start(group_id):
                    break
                born.setdefault(group_id, version)
                self.buffer.start(group_id, self.group_size, version)
                heapq.heappush(events, (now + self.durations[next_slot], next_slot, group_id))
                next_slot += 1
            self.most_running = max(self.most_running, self.buffer.num_running)
            if not is_training:
                batch = self.buffer.next_batch(version, is_last=next_slot == len(self.durations))
                if batch is not None:
                    self.consumed += [(group_id, born[group_id], version) for group_id in batch]
                    is_training = True
                    heapq.heappush(events, (now + self.train_s, -1, ""))
                    continue
            if len(self.consumed) == num_groups:
                return
            assert events, f"nothing runs and nothing can start: {len(self.consumed)} of {num_groups} groups consumed"
            now, slot, group_id = heapq.heappop(events)
            if slot >= 0:
                self.buffer.finish(group_id)
            else:
                # the new weights answer from here on, not from the start of the step
                version, is_training = version + 1, False
                self.buffer.published(is_step=True)


def simulate(*, groups, group_size, batch, steps, durations, train_s, max_running=10_000) -> Simulation:
    simulation = Simulation(
        Buffer(groups_per_batch=batch, max_offpolicy_steps=steps, max_running=max_running, remaining_batches=groups),
        group_size,
        durations[: groups * group_size],
        train_s,
    )
    simulation.run()
    return simulation


@pytest.mark.parametrize("max_offpolicy_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_age_is_bounded_and_every_group_is_consumed_once_whatever_the_durations(seed, max_offpolicy_steps):
    draw = random.Random(seed)
    durations = [draw.paretovariate(1.1) if seed % 2 else draw.expovariate(0.2) for _ in range(60 * 4)]
    simulation = simulate(
        groups=60,
        group_size=4,
        batch=draw.choice([1, 3, 7]),
        steps=max_offpolicy_steps,
        durations=durations,
        train_s=draw.choice([0.0, 1.0, 20.0]),
        max_running=draw.choice([4, 16, 10_000]),
    )
    ages = [trained - born for _, born, trained in simulation.consumed]
    assert max(ages) <= max_offpolicy_steps
    assert min(ages) >= 0
    assert sorted(group_id for group_id, _, _ in simulation.consumed) == [f"{i:06d}" for i in range(60)]


def test_slow_prompts_are_trained_as_often_as_they_are_offered():
    # public case 69: durations 1 and 10 steps, K = 4; discarding what is late would never train the slow half
    simulation = simulate(groups=40, group_size=1, batch=4, steps=4, durations=[1.0, 10.0] * 20, train_s=1.0)
    assert len(simulation.consumed) == 40
    slow = [born_and_trained for group_id, *born_and_trained in simulation.consumed if int(group_id) % 2]
    assert len(slow) == 20
    assert max(trained - born for born, trained in slow) <= 4


def test_running_episodes_stay_below_their_cap():
    simulation = simulate(groups=30, group_size=4, batch=5, steps=2, durations=[1.0] * 120, train_s=0.5, max_running=10)
    assert simulation.most_running == 10


def test_a_recovered_run_gets_no_burst():
    # public case 66: eta = 1, batch 4, recovered at version 10: capacity 8, not 48
    buffer = Buffer(groups_per_batch=4, max_offpolicy_steps=1, max_running=1_000, remaining_batches=100)
    started = 0
    while buffer.may_start(f"{started:06d}"):
        buffer.start(f"{started:06d}", 1, policy_version=10)
        started += 1
    assert started == 8


def test_what_was_restored_counts_against_admission():
    buffer = Buffer(groups_per_batch=2, max_offpolicy_steps=1, max_running=1_000, remaining_batches=100)
    buffer.restore("000000", 4, born=5, done=4)
    buffer.restore("000001", 4, born=5, done=1)
    started = [group_id for group_id in ("000002", "000003", "000004") if buffer.may_start(group_id)]
    for group_id in started[:1]:
        buffer.start(group_id, 4, 5)
    assert buffer.may_start("000001"), "a half done group is always completed"
    assert buffer.may_start("000003")
    buffer.start("000003", 4, 5)
    assert not buffer.may_start("000004")


def test_ten_ready_ask_four_six_remain():
    # public case 70
    buffer = Buffer(groups_per_batch=4, max_offpolicy_steps=9, max_running=100, remaining_batches=100)
    for i in range(10):
        buffer.restore(f"{i:06d}", 1, born=0, done=1)
    assert buffer.next_batch(0) == ["000000", "000001", "000002", "000003"]
    assert len(buffer.open) == 6


def test_the_oldest_group_goes_first_and_the_end_of_the_data_makes_a_smaller_batch():
    buffer = Buffer(groups_per_batch=2, max_offpolicy_steps=3, max_running=100, remaining_batches=100)
    for group_id, born in (("000007", 3), ("000001", 2), ("000004", 3)):
        buffer.restore(group_id, 1, born=born, done=1)
    assert buffer.next_batch(3) == ["000001", "000004"]
    assert buffer.next_batch(4) is None, "a short batch waits while more can come"
    assert buffer.next_batch(4, is_last=True) == ["000007"]
    assert buffer.next_batch(4, is_last=True) is None


def test_a_batch_waits_for_a_group_that_no_later_one_could_take_in_time():
    buffer = Buffer(groups_per_batch=1, max_offpolicy_steps=1, max_running=100, remaining_batches=100)
    buffer.start("000000", 1, policy_version=0)  # slow
    buffer.restore("000001", 1, born=0, done=1)
    assert buffer.next_batch(0) == ["000001"]
    buffer.restore("000002", 1, born=1, done=1)
    assert buffer.next_batch(1) is None, "000000 would be two versions old at the next batch"
    buffer.finish("000000")
    assert buffer.next_batch(1) == ["000000"]
    assert buffer.next_batch(2) == ["000002"]
