"""Names of Wan's weights: the published layouts, and where a checkpoint keeps its experts.

The module uses the diffusers names. A checkpoint in the original layout is recognised by its keys.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from chitu_diffusion.errors import CheckpointNotFoundError
from services.common.layout import translate

_ORIGINAL_TO_DIFFUSERS = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^(blocks\.\d+)\.self_attn\.([qkv])\.", r"\1.attn1.to_\2."),
    (r"^(blocks\.\d+)\.self_attn\.o\.", r"\1.attn1.to_out.0."),
    (r"^(blocks\.\d+)\.self_attn\.", r"\1.attn1."),
    (r"^(blocks\.\d+)\.cross_attn\.([qkv])\.", r"\1.attn2.to_\2."),
    (r"^(blocks\.\d+)\.cross_attn\.o\.", r"\1.attn2.to_out.0."),
    (r"^(blocks\.\d+)\.cross_attn\.", r"\1.attn2."),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
    (r"^(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
)

# Used once a task or on a few values, where rounding would cost quality and saves nothing.
_FLOAT32 = re.compile(r"scale_shift_table$|norm[\w]*\.weight$|norm2\.bias$|time_embedder|time_proj")


def diffusers_name(name: str) -> str:
    """Translate a name of either layout to the diffusers one; other names stay as they are."""
    return translate(name, _ORIGINAL_TO_DIFFUSERS)


def weight_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """Choose the type of a weight: float32 in norms, modulation and time MLP, else `compute`."""
    return torch.float32 if _FLOAT32.search(name) else compute


def expert_folders(ckpt_dir: Path, two_experts: bool) -> list[Path]:
    """Find the folders of the transformers: the only one, or high noise and then low noise.

    Raises:
        CheckpointNotFoundError: `ckpt_dir` is neither in diffusers' nor in the original layout.
    """
    if not ckpt_dir.is_dir():
        raise CheckpointNotFoundError(f"checkpoint folder {ckpt_dir} does not exist")
    diffusers = ["transformer", "transformer_2"] if two_experts else ["transformer"]
    original = ["high_noise_model", "low_noise_model"] if two_experts else ["."]
    layouts = [[ckpt_dir / name for name in names] for names in (diffusers, original)]
    for folders in layouts:
        if all(folder.is_dir() for folder in folders) and any(
            next(folder.glob("diffusion_pytorch_model*"), None) for folder in folders
        ):
            return folders
    raise CheckpointNotFoundError(
        f"{ckpt_dir} holds neither {' and '.join(diffusers)} (diffusers' layout) nor "
        f"{' and '.join(original) if two_experts else 'diffusion_pytorch_model*'} (original layout)"
    )
