"""Composes a verb's configuration: YAML over its typed schema, then overrides; nothing starts before all of it holds.

The only module that turns Hydra's objects into the owners' dataclasses: after `compose` the program sees dataclasses.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from burnish.configs import overrides
from burnish.configs.documentation import field_docs
from burnish.configs.verbs import VERBS, Verb
from burnish.envs.errors import UserError


def compose(verb_name: str, texts: Sequence[str] = ()) -> Any:
    """The root dataclass of a verb, composed and validated.

    Args:
        verb_name: a key of VERBS.
        texts: overrides as on the command line (`train.lr=1e-3`, `model=tiny`).

    Raises:
        UserError: an unknown key, a value of the wrong type, a required key without a value.
        ValueError: from the owner's own checks of ranges and combinations.
    """
    cfg = compose_tree(VERBS[verb_name], texts)
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        docs = field_docs(VERBS[verb_name].config_class())
        what = f" ({docs[missing[0]].rstrip('.')})" if docs.get(missing[0]) else ""
        raise UserError(f"{missing[0]} is required{what}: give {missing[0]}=...")
    try:
        return OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error


def compose_tree(verb: Verb, texts: Sequence[str]) -> DictConfig:
    """Compose without resolving: required keys may still lack a value. Raises UserError as `compose` does."""
    ConfigStore.instance().store(name=f"{verb.name}_schema", node=verb.config_class())
    parts = [overrides.split(text) for text in texts]
    with initialize_config_module("burnish.configs", version_base="1.3"):
        try:
            groups = _groups(verb)
            choices = [_choice(part, groups) for part in parts if _is_choice(part, groups)]
            base = hydra_compose(verb.name, choices)
            values = [part for part in parts if not _is_choice(part, groups)]
            checked = [(overrides.check(part, base), overrides.leads_into_mapping(part, base)) for part in values]
            plain = [text for text, is_entry in checked if not is_entry]
            cfg = hydra_compose(verb.name, choices + plain) if plain else base
            return overrides.merged(cfg, [text for text, is_entry in checked if is_entry])
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(sentence(error)) from error


def choices_of(verb: Verb) -> dict[str, list[str]]:
    """The config groups a verb can choose from, with their options."""
    with initialize_config_module("burnish.configs", version_base="1.3"):
        return _groups(verb)


def to_yaml(config: Any) -> str:
    """A root dataclass as YAML: what a run directory's config.yaml and --dry-run hold."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def sentence(error: Exception) -> str:
    """One line for a Hydra or OmegaConf error, with the key it is about."""
    while isinstance(error, HydraException) and isinstance(error.__cause__, HydraException | OmegaConfBaseException):
        error = error.__cause__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    key = getattr(error, "full_key", None)
    return f"{key}: {first}" if key and str(key) not in first else first


def _groups(verb: Verb) -> dict[str, list[str]]:
    """The groups that the defaults list of the verb's YAML names; groups of other verbs are unknown keys here."""
    loader = GlobalHydra.instance().config_loader()
    content = OmegaConf.load(Path(__file__).with_name(f"{verb.name}.yaml"))
    assert isinstance(content, DictConfig), f"{verb.name}.yaml is not a mapping"
    names = [name for entry in content.defaults if isinstance(entry, DictConfig) for name in entry]
    return {str(name): loader.get_group_options(str(name)) for name in names}


def _is_choice(part: overrides.Override, groups: dict[str, list[str]]) -> bool:
    """True for `group=option`; the same word may also be a typed key, whose parts are set with dots."""
    return part.key in groups and not part.value.startswith("{")


def _choice(part: overrides.Override, groups: dict[str, list[str]]) -> str:
    if part.value not in (*groups[part.key], "null"):
        raise UserError(f"{part.key}: no choice '{part.value}'; choose from {', '.join(groups[part.key])}")
    return f"{part.key}={part.value}"
