"""Where a checkpoint keeps the text encoder, and its names in the original layout.

The module uses transformers' names. The original layout is one file without a config.json: its
architecture is UMT5's, with the sizes that the tensors have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chitu_diffusion.errors import CheckpointError
from services.common.layout import find_part, translate

FOLDER = "text_encoder"
FILES = "models_t5*"

_ORIGINAL_TO_TRANSFORMERS = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^blocks\.(\d+)\.attn\.([qkvo])\.", r"encoder.block.\1.layer.0.SelfAttention.\2."),
    (
        r"^blocks\.(\d+)\.pos_embedding\.embedding\.",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.",
    ),
    (r"^blocks\.(\d+)\.norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    # The gate is the half that goes through the GELU.
    (r"^blocks\.(\d+)\.ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^blocks\.(\d+)\.ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^blocks\.(\d+)\.ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)


def transformers_name(name: str) -> str:
    """Translate an original name; other names stay as they are."""
    return translate(name, _ORIGINAL_TO_TRANSFORMERS)


def find_weights(ckpt_dir: Path) -> Path:
    """Find the folder of diffusers' layout, else the file of the original one.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    return find_part(ckpt_dir, "text encoder", FOLDER, FILES)


def architecture(shapes: Mapping[str, tuple[int, ...]], file: Path) -> dict[str, Any]:
    """Read UMT5's sizes off the shapes of an original file.

    Raises:
        CheckpointError: tensors that tell them are missing, empty or of another rank.
    """
    try:
        vocab_size, d_model = shapes["token_embedding.weight"]
        d_ff, _ = shapes["blocks.0.ffn.fc1.weight"]
        buckets, heads = shapes["blocks.0.pos_embedding.embedding.weight"]
        inner, _ = shapes["blocks.0.attn.q.weight"]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{file} is not a UMT5 encoder in original names: {error}") from error
    if not heads:
        raise CheckpointError(f"{file}: blocks.0.pos_embedding.embedding.weight has no heads")
    layers = {match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    return {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "d_ff": d_ff,
        "d_kv": inner // heads,
        "num_heads": heads,
        "num_layers": len(layers),
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.0,
    }
