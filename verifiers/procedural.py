"""The reward of problems that `burnish prompts` wrote: the package's own scorer on the text between answer tags, else on all."""

import re
from typing import Any

from burnish.envs.prompts.procedural import score_text

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(*, completion: str, data_source: str, extra: dict[str, Any]) -> float:
    """0 to 1, as reasoning_gym scores the last `<answer>...</answer>` of the completion, or the whole of it without tags.

    Raises:
        ValueError: the prompt is none of `burnish prompts`.
    """
    if "entry" not in extra or not data_source:
        raise ValueError("the prompt has no entry and data_source; make the file with `burnish prompts`")
    tagged = TAGGED.findall(completion)
    text = (tagged[-1] if tagged else completion).strip()
    return score_text(data_source, text, extra["entry"], extra.get("options") or {})
