"""The one command: `burnish VERB [key=value ...] [--dry-run]`.

Exit codes: 0 done, 1 a failure (a check that does not hold, or a bug with its traceback), 2 a user's mistake in one
sentence, 130 stopped by Ctrl-C. Modules are imported when their verb runs, so that `burnish --help` never loads torch.
"""

import difflib
import importlib.metadata
import logging
import os
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence

from burnish.configs.ranks import is_rank, launch
from burnish.configs.refusals import sentence_of
from burnish.configs.verbs import VERBS, Verb
from burnish.envs.errors import UserError

RANK_PATIENCE_S = 2.0
USAGE = "usage: burnish VERB [key=value ...] [--dry-run] [--help]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        _write(_overview())
        return 0 if args else 2
    if args[0] == "--version":
        _write(f"burnish {importlib.metadata.version('burnish')}")
        return 0
    name, *rest = args
    try:
        return _run(_verb(name), rest)
    except KeyboardInterrupt:
        sys.stderr.write(f"burnish {name}: stopped\n")
        return 130
    # seen by sentence_of, which leaves what is ours to Python and its traceback
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        if os.environ.get("BURNISH_TRACEBACK"):
            traceback.print_exc()
        # ranks make the same mistake at the same time: where the first one says it, the launcher ends the others here
        if os.environ.get("RANK", "0") != "0":
            time.sleep(RANK_PATIENCE_S)
        sys.stderr.write(f"burnish {name}: {sentence}\n")
        return 2


def _run(verb: Verb, args: list[str]) -> int:
    words = [arg for arg in args if arg not in ("--dry-run", "-h", "--help")]
    if len(words) < len(args) and {"-h", "--help"} & set(args):
        _write(_verb_help(verb))
        return 0
    # imported here: hydra takes a quarter of a second that `burnish --help` need not wait for
    from burnish.configs.schema import compose, to_yaml

    config = compose(verb.name, as_overrides(verb, words))
    if "--dry-run" in args:
        plan = f"{verb.plan_of(config)}\n" if verb.plan else ""
        _write(f"# burnish {verb.name}: {verb.summary}\n{plan}# would run {verb.entry} with\n{to_yaml(config)}")
        return 0
    _start_logging()
    num_ranks = getattr(getattr(config, "batch", None), "num_ranks", 1)
    if num_ranks > 1 and not is_rank():
        return launch(num_ranks, [verb.name, *args])
    return int(verb.entry_point()(config) or 0)


def as_overrides(verb: Verb, words: list[str]) -> list[str]:
    """Rewrite a verb's positional words and its options as overrides.

    Raises:
        UserError: an unknown option, an option without a value, or a bare word that the verb has no place for.
    """
    from burnish.configs.overrides import quoted

    found: list[str] = []
    pending = iter(words)
    places = list(verb.positionals)
    for word in pending:
        if word.startswith("-"):
            option, has_value, value = word.partition("=")
            if option not in verb.flags:
                known = ", ".join(["--dry-run", "--help", *verb.flags])
                raise UserError(f"unknown option '{option}'; the options are {known}")
            value = value if has_value else next(pending, None)
            if value is None:
                raise UserError(f"option {option} needs a value")
            found.append(f"{verb.flags[option]}={quoted(value)}")
        elif "=" not in word and not word.startswith(("+", "~")) and places:
            # a plain word needs no quotes, and a message that shows it is easier to read without
            found.append(f"{places.pop(0)}={word if word.isidentifier() else quoted(word)}")
        else:
            found.append(word)
    return found


def _verb(name: str) -> Verb:
    if name in VERBS:
        return VERBS[name]
    near = difflib.get_close_matches(name, VERBS, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"the verbs are {', '.join(VERBS)}"
    raise UserError(f"unknown verb '{name}'; {hint}")


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS.values()]
    return "\n".join(
        [USAGE, "", *lines, "", "burnish VERB --help lists the keys of a verb; README.md has a first run."]
    )


def _verb_help(verb: Verb) -> str:
    from omegaconf import OmegaConf

    from burnish.configs.documentation import field_docs
    from burnish.configs.overrides import type_name, type_of
    from burnish.configs.schema import choices_of, compose_tree

    extra = "".join(f" {key.upper()}" for key in verb.positionals)
    extra += "".join(f" [{option} {key.upper()}]" for option, key in verb.flags.items())
    lines = [
        f"burnish {verb.name}: {verb.summary}",
        "",
        f"usage: burnish {verb.name}{extra} [key=value ...] [--dry-run]",
    ]
    cfg = compose_tree(verb, [])
    choices = choices_of(verb)
    if choices:
        lines += ["", "choices"] + [f"  {group}={'|'.join(options)}" for group, options in choices.items()]
    lines += ["", "keys"]
    required = OmegaConf.missing_keys(cfg)
    columns = shutil.get_terminal_size((110, 20)).columns
    for key, doc in field_docs(verb.config_class()).items():
        node = OmegaConf.select(cfg, key, throw_on_missing=False) if not OmegaConf.is_missing(cfg, key) else "???"
        if OmegaConf.is_dict(node) and key not in choices and type_name(type_of(key, cfg)) != "mapping":
            continue  # its parts follow, one a line
        default = "required" if key in required else f"= {_shown(node)}"
        lines.append(f"  {key}  ({type_name(type_of(key, cfg))}, {default})")
        if doc:
            lines += textwrap.wrap(doc, max(columns, 60), initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _shown(value: object) -> str:
    from omegaconf import OmegaConf

    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)  # pyright: ignore[reportArgumentType]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _start_logging() -> None:
    # of several ranks the first speaks; the others are heard when something is wrong
    level = os.environ.get("BURNISH_LOG", "INFO" if os.environ.get("RANK", "0") == "0" else "WARNING").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")


if __name__ == "__main__":
    sys.exit(main())
