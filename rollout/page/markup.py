"""HTML out of plain text that is never trusted: whatever is not `Html` is escaped where it enters a tag.

So hostile output of a policy cannot leave its place, and no caller has to remember it. No scripts, no outside files; a
content policy in the page says the same to the browser.
"""

import html
import re
from collections.abc import Iterable, Sequence

# what HTML has no place for: control characters but tab and newline, and halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = {"img", "meta", "br"}
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.6em } h2 { font-size: 1.25em; margin-top: 2em; border-bottom: 1px solid #d8dde6 } h3 { font-size: 1.05em }
table { border-collapse: collapse; margin: .6em 0 } td, th { padding: .2em .8em; border-bottom: 1px solid #e6e9ef }
th { text-align: left; font-weight: 600 } td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f5f6f9; padding: .6em .8em; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3em 0 }
pre.said { border-left: 3px solid #3566b8 } pre.heard { border-left: 3px solid #b9c0cc } pre.bad { border-left: 3px solid #b33 }
details { margin: .4em 0 } summary { cursor: pointer } .dim { color: #667085 } .charts img { width: 49%; min-width: 340px }
"""


class Html(str):
    """Text that is markup already."""


def escaped(text: object) -> Html:
    """Any value as text of a page; what HTML cannot hold becomes U+FFFD."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(text).replace("\r\n", "\n").replace("\r", "\n"))))


def tag(name: str, /, *children: object, **attributes: str) -> Html:
    """`<name attributes>children</name>`; children and values that are no Html are escaped. `class_` is class."""
    pairs = "".join(f' {key.rstrip("_")}="{escaped(value)}"' for key, value in attributes.items())
    inside = "".join(escaped(child) for child in children)
    # a newline right after <pre> is swallowed by the reader: one that is text needs another before it
    lead = "\n" if name == "pre" else ""
    return Html(f"<{name}{pairs}>" if name in _VOID else f"<{name}{pairs}>{lead}{inside}</{name}>")


def joined(parts: Iterable[object], between: str = "\n") -> Html:
    """Parts one after the other."""
    return Html(between.join(escaped(part) for part in parts))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table; numbers stand at the right of their cell."""
    head = tag("tr", *(tag("th", heading) for heading in headings))
    body = [tag("tr", *(_cell(value) for value in row)) for row in rows]
    return tag("table", head, *body) if body else tag("p", "nothing yet", class_="dim")


def _cell(value: object) -> Html:
    if isinstance(value, float):
        return tag("td", f"{value:.4g}", class_="n")
    return tag("td", value, class_="n") if isinstance(value, int) and not isinstance(value, bool) else tag("td", value)


def pre(text: str, kind: str = "", limit: int = 6_000) -> Html:
    """Text as it stands, its middle left out where it is longer than `limit` characters."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return tag("pre", text, class_=kind) if kind else tag("pre", text)


def folded(title: object, *children: object) -> Html:
    """Something that opens on a click."""
    return tag("details", tag("summary", title), *children)


def section(title: str, *children: object, level: int = 2) -> Html:
    return joined([tag(f"h{level}", title), *children])


def page(title: str, *children: object) -> str:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        # built by hand: `http-equiv` is no Python name
        Html(f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">'),
        tag("meta", name="viewport", content="width=device-width"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', joined(children)), lang='en')}\n"
