"""EngineConfig and ServeRun: sizes and modes of the engine and of its server. Torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from burnish.policy.encoding.config import EncodingConfig

PAGE_TOKENS = 64
"""Tokens of one page of global cache; a multiple of every compression ratio and of the candidate block."""


@dataclass(kw_only=True)
class EngineConfig:
    """One engine. Memory is taken once, at the start, from `num_pages` and `max_contexts`."""

    num_pages: int = 1024
    """Pages of 64 tokens in the global pool, shared by all contexts."""
    max_contexts: int = 160
    """Window states: contexts that can be alive at once, running or resident between two turns."""
    max_running: int = 64
    """Requests that sample at once; the others wait."""
    max_step_rows: int = 512
    """Rows of one step: decode rows first, the rest for prefill chunks. >= max_running."""
    max_context_tokens: int = 0
    """Tokens of one context, prompt and output; 0: the model's limit. Never more than the pool holds."""
    deterministic: bool = False
    """Logits bit for bit equal to the trainer's and independent of the batch (16-row tiles)."""
    record_routes: bool = True
    """Keep the experts of every row that is fed."""
    reserved_ids: list[int] = field(default_factory=list)
    """Ids never sampled, beside the model's padding, image and draft placeholders."""

    def __post_init__(self) -> None:
        for name in ("num_pages", "max_contexts", "max_running", "max_step_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_step_rows < self.max_running:
            raise ValueError(
                f"engine.max_step_rows must be at least engine.max_running ({self.max_running}), so that every running "
                f"request gets its row in each step; got {self.max_step_rows}"
            )
        if self.max_contexts < self.max_running:
            raise ValueError(
                f"engine.max_contexts must be at least engine.max_running ({self.max_running}), got {self.max_contexts}"
            )
        if self.max_context_tokens < 0:
            raise ValueError(
                f"engine.max_context_tokens must be 0 (the model's) or more, got {self.max_context_tokens}"
            )

    def reserving(self, token_ids: Iterable[int]) -> "EngineConfig":
        """These settings with more ids that are never sampled, such as a tokenizer's `never_written`."""
        return replace(self, reserved_ids=sorted({*self.reserved_ids, *token_ids}))


@dataclass(kw_only=True)
class ServeRun:
    """`burnish serve`: an OpenAI chat and completions endpoint over one engine."""

    policy: str = "???"  # required; omegaconf's marker, spelt out so that policy/ does not import it
    """Folder of the policy."""
    name: str = ""
    """Model name in answers; default the folder's name."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Sizes and modes of the engine."""
    encoding: EncodingConfig = field(default_factory=EncodingConfig)
    """Chat encoding where a request does not say."""
    max_body_mib: int = 32
    """Largest request body, in MiB; a larger one is refused with 413."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 (a free one) to 65535, got {self.port}")
        if self.max_body_mib < 1:
            raise ValueError(f"max_body_mib must be at least 1, got {self.max_body_mib}")
