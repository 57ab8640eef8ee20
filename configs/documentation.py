"""Reads the docs of config fields: the string literal under each field of a dataclass, which Python itself forgets."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any


def field_docs(kind: type) -> dict[str, str]:
    """Dotted key -> the first paragraph under the field, for a dataclass and every dataclass inside it."""
    docs: dict[str, str] = {}
    own = _own_docs(kind)
    for name, hint in typing.get_type_hints(kind).items():
        docs[name] = own.get(name, "")
        inner = next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)
        if isinstance(inner, type) and typing.get_origin(hint) not in (list, dict):
            docs[name] = docs[name] or first_paragraph(inner.__doc__ or "")
            docs |= {f"{name}.{key}": doc for key, doc in field_docs(inner).items()}
    return docs


def _own_docs(kind: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in_source(base)
    return docs


def _docs_in_source(kind: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    assert isinstance(tree.body[0], ast.ClassDef)
    docs: dict[str, str] = {}
    field_name: str | None = None
    for node in tree.body[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field_name = node.target.id
            continue
        if field_name and isinstance(node, ast.Expr) and _text(node.value):
            docs[field_name] = first_paragraph(_text(node.value))
        field_name = None
    return docs


def _text(node: Any) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def first_paragraph(text: str) -> str:
    """The first paragraph of a docstring as one line."""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
