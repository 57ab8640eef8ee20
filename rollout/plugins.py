"""Finding a component by built-in name or by import path `package.module:attribute`, with errors that name the setting."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from burnish.envs.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


def resolve(spec: str, built_in: Mapping[str, F], kind: str) -> F:
    """The component a setting names.

    Args:
        spec: a name in `built_in`, or `package.module:attribute`.
        kind: what the setting is called, for the error message.

    Raises:
        UserError: unknown name, module or attribute, or something that cannot be called.
    """
    if ":" not in spec:
        if spec not in built_in:
            raise UserError(
                f"{kind}={spec!r}: expected one of {', '.join(sorted(built_in))}, or an import path package.module:attribute"
            )
        return built_in[spec]
    module_name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # a module that exists but lacks one of its own imports is named too
        raise UserError(f"{kind}={spec!r}: cannot import {module_name!r}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise UserError(f"{kind}={spec!r}: module {module_name!r} has no attribute {attribute!r}")
    if not callable(found):
        raise UserError(f"{kind}={spec!r}: {attribute!r} is a {type(found).__name__}, expected something callable")
    return cast(F, found)


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of the keyword-only parameters: the options a component accepts."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def bind(function: Callable[..., Any], options: Mapping[str, Any], kind: str, spec: str) -> Callable[..., Any]:
    """Fixes the options of a component; an option it does not have is an error, never ignored.

    Raises:
        UserError: unknown option.
    """
    known = options_of(function)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"{kind}={spec!r} has no option {unknown[0]!r}: expected {', '.join(sorted(known)) or 'none'}")
    return partial(function, **options)
