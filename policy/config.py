"""ModelConfig: the architecture's constants and their rules; released_config.py reads and writes config.json. Torch-free.

Knows nothing of weights or devices. Source of every field and rule: the released file's `text_config`; the layer
schedule (`layers`) is derived from it as the reference implementations do.
"""

import itertools
import math
from dataclasses import dataclass, field
from enum import StrEnum


class ConfigError(ValueError):
    """A config.json or preset that does not describe a model: names the file and the key."""


class LayerMode(StrEnum):
    """What a layer's long-range attention owns (CSA2)."""

    window = "window"
    """Compression ratio 0: the sliding window alone."""
    full = "full"
    """Writes main entries and index keys, selects its own."""
    reindex = "reindex"
    """Reads a source's entries, selects with its own index queries."""
    reuse = "reuse"
    """Reads a source's entries and another layer's selection."""


@dataclass(kw_only=True)
class RopeScaling:
    """Frequency-only YaRN of the layers with a compression ratio; no attention temperature."""

    factor: float = 16.0
    """Frequencies below the ramp are divided by this."""
    beta_fast: float = 32.0
    """Rotations over the original length above which a frequency stays as it is."""
    beta_slow: float = 1.0
    """Rotations below which a frequency is fully scaled."""
    original_max_position_embeddings: int = 65536
    """Original context length, tokens."""


_SIZES = (
    "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "n_routed_experts", "num_experts_per_tok",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks",
    "candidate_block_size", "hc_mult", "hc_sinkhorn_iters",
)  # fmt: skip
_POSITIVE = (
    "swiglu_limit", "rms_norm_eps", "initializer_range", "rope_theta", "compress_rope_theta", "routed_scaling_factor",
    "gate_temp", "hc_eps",
)  # fmt: skip


@dataclass(kw_only=True)
class ModelConfig:
    """DeepSeek-V4.1 text tower; field names are the release's."""

    vocab_size: int = 129280
    """Rows of embedding and head."""
    hidden_size: int = 5120
    """D, channels of one residual stream."""
    moe_intermediate_size: int = 2304
    """Width of one routed or shared expert."""
    num_hidden_layers: int = 40
    """Backbone blocks."""
    num_attention_heads: int = 64
    """Query heads; all read one latent."""
    num_key_value_heads: int = 1
    """Must be 1: key and value are the same latent."""
    head_dim: int = 512
    """Channels of a head and of the latent."""
    qk_rope_head_dim: int = 64
    """Rotated tail of a head and of an index head."""
    q_lora_rank: int = 1280
    """Query latent."""
    o_lora_rank: int = 1024
    """Output rank of one head group."""
    o_groups: int = 8
    """Head groups of the output projection."""
    swiglu_limit: float = 10.0
    """Clamp inside SwiGLU."""
    rms_norm_eps: float = 1e-20
    """Every text-side RMS statistic."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    max_position_embeddings: int = 1048576
    """Context length, tokens."""
    rope_theta: float = 10000.0
    """Base of layers with ratio 0."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """YaRN of layers with a ratio."""
    compress_rope_theta: float = 160000.0
    """Base of layers with a ratio."""
    n_routed_experts: int = 384
    """Experts a layer."""
    n_shared_experts: int = 1
    """Must be 1."""
    num_experts_per_tok: int = 6
    """Experts a token."""
    norm_topk_prob: bool = True
    """Renormalise the chosen scores."""
    routed_scaling_factor: float = 1.5
    """Factor on the renormalised scores."""
    gate_temp: float = 1.0
    """Router logits are divided by it."""
    sliding_window: int = 128
    """W, window keys a query sees, itself included."""
    compress_ratios: list[int] = field(default_factory=lambda: [0, 0] + [2] * 18 + [1] * 20 + [0] * 3)
    """Tokens an entry of the cache that a layer reads stands for; 0: window only. Draft layers follow the backbone's."""
    kv_source_layer_ids: list[int] = field(default_factory=lambda: [2, 8, 14, 20])
    """Full layers."""
    index_source_layer_ids: list[int] = field(default_factory=lambda: [2, 8, 14, 20, 24, 28, 32, 36])
    """Full and Reindex layers."""
    index_n_heads: int = 32
    """Index query heads."""
    index_head_dim: int = 128
    """Channels of an index head."""
    index_topk: int = 512
    """Entries a query selects at most."""
    candidate_source_layer_id: int = 20
    """Layer that publishes the candidate pool; -1: none."""
    candidate_topk_blocks: int = 2048
    """Blocks in the pool."""
    candidate_block_size: int = 8
    """Entries a block."""
    hc_mult: int = 4
    """S, residual streams."""
    hc_sinkhorn_iters: int = 20
    """Column normalisations of the mixing matrix."""
    hc_eps: float = 1e-6
    """Added in pre, comb and every Sinkhorn denominator."""
    engram_layer_ids: list[int] = field(default_factory=lambda: [1, 14])
    """Layers with an n-gram memory before the block."""
    engram_num_embeddings: list[int] = field(default_factory=lambda: [384006168, 384016682])
    """Rows of each memory table."""
    engram_max_ngram_size: int = 4
    """Longest n-gram hashed."""
    engram_vocab_size: int = 16000000
    """Start of the prime search."""
    engram_n_heads: int = 8
    """Hash heads an order."""
    engram_head_dim: int = 256
    """Row width."""
    engram_pad_token_id: int = 2
    """Raw id that pads n-grams."""
    engram_compressed_vocab_size: int = 99092
    """Classes of the tokenizer compression."""
    num_nextn_predict_layers: int = 3
    """DSpark blocks; 0: no draft."""
    dspark_block_size: int = 5
    """Tokens drafted at once."""
    dspark_noise_token_id: int = 128799
    """Placeholder of un-drafted slots."""
    dspark_target_layer_ids: list[int] = field(default_factory=lambda: [37, 38, 39])
    """Layers whose inputs feed the draft."""
    dspark_markov_rank: int = 256
    """Rank of the Markov head."""
    dspark_n_routed_experts: int = 128
    """Experts of a draft block."""
    dspark_num_experts_per_tok: int = 3
    """Experts a draft token."""
    bos_token_id: int = 0
    """Begin of sentence."""
    eos_token_id: int = 1
    """End of sentence."""
    pad_token_id: int = 2
    """Padding."""
    image_token_id: int = 129264
    """Every token of an image span."""

    def __post_init__(self) -> None:
        checks = [
            (self.num_key_value_heads == 1, "num_key_value_heads", "1", self.num_key_value_heads),
            (self.n_shared_experts == 1, "n_shared_experts", "1", self.n_shared_experts),
            (
                self.o_groups >= 1 and self.num_attention_heads % self.o_groups == 0,
                "num_attention_heads",
                f"a multiple of o_groups ({self.o_groups})",
                self.num_attention_heads,
            ),
            (
                self.qk_rope_head_dim % 2 == 0 and self.qk_rope_head_dim <= min(self.head_dim, self.index_head_dim),
                "qk_rope_head_dim",
                f"even and at most {min(self.head_dim, self.index_head_dim)}",
                self.qk_rope_head_dim,
            ),
            (
                len(self.compress_ratios) >= self.num_hidden_layers + self.num_nextn_predict_layers,
                "compress_ratios",
                f"{self.num_hidden_layers + self.num_nextn_predict_layers} entries (backbone and draft)",
                len(self.compress_ratios),
            ),
            (
                all(isinstance(r, int) and r >= 0 for r in self.compress_ratios),
                "compress_ratios",
                "whole numbers, none negative",
                self.compress_ratios,
            ),
            (
                set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids),
                "kv_source_layer_ids",
                f"a subset of index_source_layer_ids {self.index_source_layer_ids}",
                self.kv_source_layer_ids,
            ),
            (
                self.candidate_source_layer_id == -1 or self.candidate_source_layer_id in self.kv_source_layer_ids,
                "candidate_source_layer_id",
                f"-1 or one of kv_source_layer_ids {self.kv_source_layer_ids}",
                self.candidate_source_layer_id,
            ),
            (
                len(self.engram_layer_ids) == len(self.engram_num_embeddings),
                "engram_num_embeddings",
                f"one entry for each of engram_layer_ids ({len(self.engram_layer_ids)})",
                len(self.engram_num_embeddings),
            ),
            (
                self.num_experts_per_tok <= self.n_routed_experts,
                "num_experts_per_tok",
                f"at most n_routed_experts ({self.n_routed_experts})",
                self.num_experts_per_tok,
            ),
        ]
        for name in _SIZES:
            checks.append((getattr(self, name) >= 1, name, "at least 1", getattr(self, name)))
        for name in _POSITIVE:
            value = getattr(self, name)
            checks.append((math.isfinite(value) and value > 0, name, "a finite number above 0", value))
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, name)
            rising = all(a < b for a, b in itertools.pairwise(ids))
            checks.append((rising, name, "strictly increasing layer ids", ids))
            inside = all(0 <= i < self.num_hidden_layers for i in ids)
            checks.append((inside, name, f"layer ids below num_hidden_layers ({self.num_hidden_layers})", ids))
        for ok, key, expected, got in checks:
            if not ok:
                raise ConfigError(f"model config: {key} must be {expected}, got {got}")
        self.layers()  # raises on a schedule that names no source

    def layers(self) -> list["LayerPlan"]:
        """The schedule: for each backbone layer its mode, ratio and the layers whose entries and selection it reads.

        Raises:
            ConfigError: a layer with a ratio has no source of that ratio at or below it.
        """
        plans, kv_source, index_source = [], -1, -1
        for layer in range(self.num_hidden_layers):
            ratio = self.compress_ratios[layer]
            if ratio == 0:
                if layer in self.index_source_layer_ids:
                    raise ConfigError(f"model config: compress_ratios[{layer}] is 0, but layer {layer} is a source")
                plans.append(LayerPlan(layer=layer, mode=LayerMode.window, ratio=0, kv_source=-1, index_source=-1))
                continue
            if layer in self.kv_source_layer_ids:
                kv_source = layer
            if layer in self.index_source_layer_ids:
                index_source = layer
            if kv_source < 0 or self.compress_ratios[kv_source] != ratio:
                raise ConfigError(
                    f"model config: layer {layer} has compression ratio {ratio}, but no kv_source_layer_ids entry "
                    f"at or below it has that ratio"
                )
            mode = LayerMode.reuse
            if layer == kv_source:
                mode = LayerMode.full
            elif layer == index_source:
                mode = LayerMode.reindex
            pooled = mode is LayerMode.reindex and 0 <= self.candidate_source_layer_id < layer
            plans.append(
                LayerPlan(
                    layer=layer, mode=mode, ratio=ratio, kv_source=kv_source, index_source=index_source, pooled=pooled
                )
            )
        return plans

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last layer that writes global entries (20 in Flash).

        Without such a layer every layer may run on fewer rows.
        """
        return self.kv_source_layer_ids[-1] if self.kv_source_layer_ids else 0

    @property
    def placeholder_ids(self) -> list[int]:
        """Ids that stand for something else in the input and are never sampled: padding, images, un-drafted slots."""
        ids = {self.pad_token_id, self.image_token_id}
        if self.num_nextn_predict_layers:
            ids.add(self.dspark_noise_token_id)
        return sorted(ids - {self.eos_token_id})

    @property
    def main_row_bytes(self) -> int:
        """Bytes of one stored main entry: E2M1 payload and one E4M3 scale for 16 channels (288 in Flash)."""
        return self.head_dim // 2 + self.head_dim // 16

    @property
    def index_row_bytes(self) -> int:
        """Bytes of one stored index key: E2M1 payload and one E8M0 scale for 32 channels (68 in Flash)."""
        return self.index_head_dim // 2 + self.index_head_dim // 32

    @property
    def window_row_bytes(self) -> int:
        """Bytes of one stored window key: E4M3 payload and one E8M0 scale for 32 channels (528 in Flash)."""
        return self.head_dim + self.head_dim // 32

    def global_bytes(self, num_tokens: int) -> int:
        """Bytes of global cache that `num_tokens` tokens of one context hold (890 a token in Flash)."""
        entry = self.main_row_bytes + self.index_row_bytes
        return sum(num_tokens // self.compress_ratios[layer] * entry for layer in self.kv_source_layer_ids)


@dataclass(kw_only=True)
class InitRun:
    """`burnish init`."""

    out: str = "policies/tiny"
    """Policy folder to write."""
    preset: str = "tiny"
    """mini, small or tiny."""
    seed: int = 0
    """Of the weights."""
    overwrite: bool = False
    """Replace a folder that is there."""


@dataclass(kw_only=True)
class ParityRun:
    """`burnish parity DIR`."""

    dir: str = ""
    """Folder of golden cases."""
    cases: str = "*"
    """Comma-separated patterns of case names."""

    def __post_init__(self) -> None:
        if not self.dir:
            raise ConfigError("parity needs the folder of golden cases: burnish parity DIR")


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Static role of one backbone layer."""

    layer: int
    mode: LayerMode
    ratio: int
    """Tokens an entry; 0: none."""
    kv_source: int
    """Layer whose main entries are read, -1: none."""
    index_source: int
    """Layer whose selection is read, -1: none."""
    pooled: bool = False
    """Selection is restricted to the candidate pool."""
