"""How a reward function is called and what its result means: the plain form, verl's and TRL's. Knows no process.

A result is one finite number, or an object of them with `reward` (verl: `score`) among them. Anything else is no reward:
a None, a NaN or a text never becomes a 0.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from burnish.verifiers.config import Style

# the parameter by which a function says how it wants to be called
TELLING = {"completions": Style.trl, "solution_str": Style.verl, "completion": Style.plain}
ANSWERS = ("answer", "ground_truth")


class CallError(ValueError):
    """The function cannot be called this way, or what it returned is no reward."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is graded, and what a function may know about it. Plain values: it crosses a process border as JSON."""

    completion: str
    prompt: str | list[dict[str, str]]
    answer: Any = None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    """Every column of the record but the prompt's, for TRL."""


NOTHING = Call(completion="", prompt="")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A function and the way it is called, checked."""

    function: Callable[..., Any]
    style: Style
    names: frozenset[str]
    """Parameters it declares."""
    required: frozenset[str]
    """Those without a default."""
    takes_any: bool
    """It has **kwargs."""
    options: Mapping[str, Any]

    @property
    def needs_answer(self) -> bool:
        """It compares with an answer: without one it could only be wrong."""
        return self.style is not Style.trl and bool(self.required & set(ANSWERS))

    @property
    def wanted_columns(self) -> list[str]:
        """Columns that every prompt must have."""
        return sorted(self.required - self.options.keys() - offered(self.style, NOTHING).keys())

    def arguments(self, call: Call) -> dict[str, Any]:
        """The keyword arguments of this call."""
        given = offered(self.style, call)
        chosen = given if self.takes_any else {name: given[name] for name in self.names & given.keys()}
        return {**chosen, **self.options}

    def rewards(self, call: Call) -> dict[str, float]:
        """Calls the function; `reward` is among what comes back.

        Raises:
            CallError: the result is no reward. Whatever the function raises itself passes through.
        """
        result = self.function(**self.arguments(call))
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return rewards_of(only_item(result) if self.style is Style.trl else result)


def offered(style: Style, call: Call) -> dict[str, Any]:
    """What a function of this style is given, by parameter."""
    if style is Style.trl:
        says = {"role": "assistant", "content": call.completion}
        completion = call.completion if isinstance(call.prompt, str) else [says]
        given = {name: [value] for name, value in call.columns.items()}
        return given | {"prompts": [call.prompt], "completions": [completion]}
    if style is Style.verl:
        return {
            "data_source": call.data_source,
            "solution_str": call.completion,
            "ground_truth": call.answer,
            "extra_info": call.extra,
        }
    return {
        "completion": call.completion,
        "answer": call.answer,
        "ground_truth": call.answer,
        "prompt": call.prompt,
        "extra": call.extra,
        "data_source": call.data_source,
    }


def form_of(function: Any, style: Style, options: Mapping[str, Any]) -> Form:
    """Checks a function before anything is graded with it.

    Raises:
        CallError: it is no function, does not say how it is called, or wants arguments that there are not.
    """
    if isinstance(function, type) or not callable(function):
        raise CallError(f"is a {'class' if isinstance(function, type) else type(function).__name__}, not a function")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise CallError("does not show its parameters; wrap it in a function of your own") from None
    if blind := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
        raise CallError(f"wants {blind[0]} by position, but arguments are given by name")
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = frozenset(p.name for p in named)
    if style is Style.auto:
        style = next((told for name, told in TELLING.items() if name in names), style)
    if style is Style.auto:
        raise CallError(
            f"has none of the parameters {', '.join(TELLING)}, so it does not say how it is called; set grading.style"
        )
    form = Form(
        function=function,
        style=style,
        names=names,
        required=frozenset(p.name for p in named if p.default is p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
        options=options,
    )
    check_form(form)
    return form


def check_form(form: Form) -> None:
    """Raises:
    CallError: see `form_of`.
    """
    telling = next(name for name, told in TELLING.items() if told is form.style)
    given = offered(form.style, NOTHING)
    if not form.takes_any and telling not in form.names:
        raise CallError(f"has no parameter {telling}, in which grading.style={form.style} gives the completion")
    if twice := sorted(form.options.keys() & given.keys()):
        raise CallError(f"gets {twice[0]} from the run; grading.options must not give it")
    if not form.takes_any and (unknown := sorted(form.options.keys() - form.names)):
        raise CallError(f"has no parameter {unknown[0]}, which grading.options gives")
    if form.style is not Style.trl and form.wanted_columns:
        known = ", ".join(given)
        raise CallError(f"wants the argument {form.wanted_columns[0]}; grading.style={form.style} gives {known}")


def only_item(result: Any) -> Any:
    """The one reward in the list of a TRL function."""
    as_list = getattr(result, "tolist", None)
    items = as_list() if callable(as_list) else result
    if not isinstance(items, list | tuple) or len(items) != 1:
        raise CallError(f"returned {shown(items)}; a TRL reward function returns a list with one reward a completion")
    if items[0] is None:
        raise CallError("returned [None], which is no reward")
    return items[0]


def rewards_of(result: Any) -> dict[str, float]:
    """Raises:
    CallError: not a finite number, nor an object with one.
    """
    if not isinstance(result, Mapping):
        return {"reward": number_of(result, "")}
    rewards = {}
    for name, value in result.items():
        # what it read out of the completion, and other remarks, are no numbers; nulls among them are no reward either
        if isinstance(value, str | list | tuple | Mapping) or value is None:
            if name in ("reward", "score"):
                raise CallError(f"returned {name} = {shown(value)}, which is no number")
            continue
        rewards[str(name)] = number_of(value, f"{name} = ")
    if "reward" not in rewards:
        if "score" not in rewards and len(rewards) != 1:
            raise CallError(f"returned an object without `reward` or `score`: {', '.join(map(str, result)) or 'empty'}")
        rewards["reward"] = rewards["score"] if "score" in rewards else next(iter(rewards.values()))
    return rewards


def number_of(value: Any, what: str) -> float:
    """A finite float; numpy's and torch's single values count, true is 1 and false 0."""
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, bool | int | float):
        try:
            value = item()
        except (ValueError, RuntimeError, TypeError):
            raise CallError(f"returned {what}{shown(value)}, which is not one number") from None
    if not isinstance(value, bool | int | float | Fraction):
        raise CallError(f"returned {what}{shown(value)}, which is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CallError(f"returned {what}{number}, which is no reward")
    return number


def shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}" if value is not None else "None"
