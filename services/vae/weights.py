"""Where a checkpoint keeps the VAE, and its names in the original layout.

The module uses diffusers' names. The original layout is one file without a config.json: its
architecture is that of the Wan2.1 VAE, with the sizes that the tensors have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chitu_diffusion.errors import CheckpointError
from services.common.layout import find_part

FOLDER = "vae"
FILES = "Wan2.1_VAE.*"

_LEVELS = 4
# Published with the Wan2.1 VAE: mean and deviation of each latent channel.
_LATENTS_MEAN = [
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
]
_LATENTS_STD = [
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
]

_INNER = (
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
_OUTER = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"^(encoder|decoder)\.middle\.0\.", r"\1.mid_block.resnets.0."),
    (r"^(encoder|decoder)\.middle\.1\.", r"\1.mid_block.attentions.0."),
    (r"^(encoder|decoder)\.middle\.2\.", r"\1.mid_block.resnets.1."),
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
)


def find_weights(ckpt_dir: Path) -> Path:
    """Find the folder of diffusers' layout, else the file of the original one.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    return find_part(ckpt_dir, "VAE", FOLDER, FILES)


def diffusers_name(num_res_blocks: int) -> Callable[[str], str]:
    """Make the translation of original names for a decoder with so many blocks a level."""

    def up_block(match: re.Match[str]) -> str:
        # A level is num_res_blocks + 1 residual blocks and, save the last, an upsampler.
        level, place = divmod(int(match[1]), num_res_blocks + 2)
        if place == num_res_blocks + 1:
            return f"decoder.up_blocks.{level}.upsamplers.0."
        return f"decoder.up_blocks.{level}.resnets.{place}."

    def translate(name: str) -> str:
        for pattern, replacement in (*_OUTER, *_INNER):
            name = re.sub(pattern, replacement, name)
        return re.sub(r"^decoder\.upsamples\.(\d+)\.", up_block, name)

    return translate


def architecture(shapes: Mapping[str, tuple[int, ...]], file: Path) -> dict[str, Any]:
    """Read the sizes of an original file off its tensors' shapes.

    Raises:
        CheckpointError: tensors that tell them are missing or empty, or the latents are not those
            of the published VAE, whose mean and deviation the file does not hold.
    """
    try:
        base_dim = shapes["encoder.conv1.weight"][0]
        z_dim = shapes["conv2.weight"][0]
        resamplers = sorted(_down_index(name) for name in shapes if ".resample.1.weight" in name)
        num_res_blocks = next(index for index in resamplers if index >= 0)
        levels = [(num_res_blocks + 1) * level for level in range(_LEVELS)]
        widths = [shapes[f"encoder.downsamples.{i}.residual.2.weight"][0] for i in levels]
    except (KeyError, IndexError, StopIteration) as error:
        raise CheckpointError(f"{file} is not a Wan2.1 VAE in original names: {error!r}") from error
    if not base_dim:
        raise CheckpointError(f"{file}: encoder.conv1.weight has no channels")
    if z_dim != len(_LATENTS_MEAN):
        raise CheckpointError(
            f"{file} has {z_dim} latent channels: the original layout is that of the published "
            f"VAE with {len(_LATENTS_MEAN)}"
        )
    return {
        "_class_name": "AutoencoderKLWan",
        "base_dim": base_dim,
        "z_dim": z_dim,
        "num_res_blocks": num_res_blocks,
        "dim_mult": [width // base_dim for width in widths],
        "temperal_downsample": [
            f"encoder.downsamples.{first - 1}.time_conv.weight" in shapes for first in levels[1:]
        ],
        "latents_mean": _LATENTS_MEAN,
        "latents_std": _LATENTS_STD,
    }


def _down_index(name: str) -> int:
    match = re.match(r"encoder\.downsamples\.(\d+)\.", name)
    return int(match[1]) if match else -1
