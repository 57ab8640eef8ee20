"""Reward functions as users write them, good and bad, for tests. Load as `reward_functions:NAME`."""

import os
import signal
import subprocess
import sys
import threading
import time

CALLS = []


def plain(completion, answer, prompt, extra, bonus=0.0):
    return {"reward": float(completion.strip() == answer) + bonus, "length": len(completion), "asked": str(prompt)}


def truth(completion, ground_truth, **rest):
    assert set(rest) == {"answer", "prompt", "extra", "data_source"}
    return completion == ground_truth


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source
    assert extra_info is None or isinstance(extra_info, dict)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def length_reward(completions, **kwargs):
    assert all(isinstance(values, list) and len(values) == 1 for values in kwargs.values())
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(text) / 10 for text in texts]


def solution_reward(prompts, completions, solution):
    assert len(prompts) == len(completions) == len(solution) == 1
    said = completions[0] if isinstance(prompts[0], str) else completions[0][-1]["content"]
    return [1.0 if said == solution[0] else 0.0]


async def patient(completion, answer):
    return float(completion == answer)


def by_length(completion):
    """0 or 1, whichever way an untrained policy goes on: groups get variance."""
    return float(sum(map(ord, completion)) % 2)


def contains(completion, answer):
    """Something that a tiny policy learns within a few steps."""
    return answer in completion


def printing(completion):
    sys.stdout.write(f"looked at {completion}\n")
    os.write(1, b"noise on the descriptor\n")
    return 1


def raising(completion):
    sys.stderr.write("so far so good")
    raise KeyError(completion)


def leaving(completion):
    raise SystemExit(3)


def dying(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(completion):
    if completion == "quick":
        return 1.0
    # what it started has to go too
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    while True:
        time.sleep(1)


def spinning(completion):
    import re

    return float(re.fullmatch(r"(a+)+b", "a" * 40) is None)


def hoarding(completion):
    return float(len(bytearray(1 << 40)))


def alarmed(completion, answer):
    """As math libraries do it: an alarm, which only the main thread may set."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("slow")))
    signal.alarm(5)
    try:
        return float(completion == answer)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def returning(completion):
    """Whatever the completion says in Python: the test's own text."""
    import decimal
    import fractions

    import numpy as np

    return eval(completion, {"np": np, "Fraction": fractions.Fraction, "Decimal": decimal.Decimal})


def counting(completion):
    CALLS.append(completion)
    return len(CALLS) / 100


class Scorer:
    def __call__(self, completion):
        return 1.0


instance = Scorer()
not_a_function = 3


def by_position(completion, /):
    return 1.0


def says_nothing(**kwargs):
    return float("completion" in kwargs)


def wants_more(completion, difficulty):
    return 1.0
