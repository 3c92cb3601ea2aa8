"""The Wan2.1 video autoencoder: latents to frames, one latent frame at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError, ComponentError
from services.common.checkpoint import load_weights, shapes
from services.common.placement import move_module
from services.vae.weights import architecture, diffusers_name, find_weights


class WanVae:
    """The decoder half of a Wan2.1 VAE with its weights.

    It keeps no state between or during calls: two decodes may take turns latent frame by latent
    frame. Calls that compute must not overlap in time.
    """

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Take a loaded `AutoencoderKLWan` that lives on `device` in `dtype`."""
        parts = {"decoder": model.decoder, "post_quant_conv": model.post_quant_conv}
        self._parts = nn.ModuleDict(parts).eval().requires_grad_(False)
        self._decoder, self._post_quant_conv = parts.values()
        # One entry a causal convolution; those that keep nothing leave theirs unused.
        self._cache_size = sum(isinstance(part, nn.Conv3d) for part in self._decoder.modules())
        self._mean = _per_channel(model.config.latents_mean, device)
        self._std = _per_channel(model.config.latents_std, device)
        self.device = device
        self.dtype = dtype
        self.channels: int = model.config.z_dim
        self.spatial_stride: int = model.config.scale_factor_spatial
        self.temporal_stride: int = model.config.scale_factor_temporal

    @classmethod
    def load(cls, ckpt_dir: Path, device: torch.device, dtype: torch.dtype) -> WanVae:
        """Read the VAE of a checkpoint in diffusers' or the original layout.

        Raises:
            CheckpointNotFoundError: it has none, or its config.json is missing.
            CheckpointError: another architecture, or weights that do not fit it exactly.
        """
        weights = find_weights(ckpt_dir)
        original = weights.is_file()
        config = architecture(shapes(weights), weights) if original else _read_config(weights)
        # On the meta device nothing is allocated or initialised; the loader brings the memory.
        with torch.device("meta"):
            model = AutoencoderKLWan.from_config(config)
        rename = diffusers_name(config["num_res_blocks"]) if original else None
        load_weights(model, weights, rename=rename, dtype=dtype, device=device)
        return cls(model, device, dtype)

    @property
    def parameter_count(self) -> int:
        """Number of parameters held."""
        return sum(parameter.numel() for parameter in self._parts.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters in memory."""
        return sum(parameter.nbytes for parameter in self._parts.parameters())

    def to(self, device: torch.device) -> None:
        """Move the weights; `OutOfMemoryError` if they do not fit, and they are where they were."""
        move_module(self._parts, device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        self.device = device

    def num_frames(self, latent_frames: int) -> int:
        """Frames of `latent_frames` >= 1: the first gives one, each later one four."""
        return 1 + self.temporal_stride * (latent_frames - 1)

    def decode(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Decode latents, computing each latent frame when its frames are asked for.

        The convolutions look back in time only, so what they need of earlier frames is kept in a
        cache that belongs to this call. Leaving the iterator ends the work.

        Args:
            latents: (1, channels, F, H, W) in the model's normalised latent space, finite.

        Yields:
            F tensors (1, 3, f, H x 8, W x 8) float32 on the CPU in [-1, 1]; f is 1 for the first,
            4 for the others.

        Raises:
            ComponentError: a value is not finite.
        """
        hidden = self._enter(latents)
        cache: list[Any] = [None] * self._cache_size
        for index in range(hidden.shape[2]):
            # The model may have moved while the caller was busy: what is kept follows it.
            hidden, cache = self._follow(hidden), [self._follow(kept) for kept in cache]
            yield self._decode_frame(hidden, cache, index)

    def _follow(self, kept: Any) -> Any:
        """Bring a tensor to where the model is; marks of the cache stay as they are."""
        return kept.to(self.device) if isinstance(kept, torch.Tensor) else kept

    @torch.inference_mode()
    def _enter(self, latents: torch.Tensor) -> torch.Tensor:
        """De-normalise, once, in float32; then what the decoder does to all frames alike."""
        latents = latents.to(device=self.device, dtype=torch.float32)
        # Dividing by the reciprocal rounds as diffusers' pipeline does.
        latents = latents / (1.0 / self._std) + self._mean
        hidden: torch.Tensor = self._post_quant_conv(latents.to(self.dtype))
        return hidden

    @torch.inference_mode()
    def _decode_frame(self, hidden: torch.Tensor, cache: list[Any], index: int) -> torch.Tensor:
        frames: torch.Tensor = self._decoder(
            hidden[:, :, index : index + 1],
            feat_cache=cache,
            feat_idx=[0],
            first_chunk=index == 0,
        )
        if not torch.isfinite(frames).all():
            raise ComponentError(f"vae: pixels of latent frame {index} are not finite")
        return frames.clamp(-1.0, 1.0).float().cpu()


def _per_channel(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointNotFoundError(f"{file}: not found")
    try:
        config: dict[str, Any] = AutoencoderKLWan.load_config(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from error
    kind = config.get("_class_name")
    if kind != "AutoencoderKLWan":
        raise CheckpointError(f"{file}: _class_name={kind!r}: must be 'AutoencoderKLWan'")
    if config.get("patch_size") is not None or config.get("is_residual"):
        raise CheckpointError(
            f"{file}: patch_size={config.get('patch_size')}, "
            f"is_residual={config.get('is_residual')}: only the Wan2.1 VAE (neither) is supported"
        )
    for key in ("latents_mean", "latents_std"):
        if len(config.get(key, [])) != config.get("z_dim"):
            raise CheckpointError(
                f"{file}: {key} has {len(config.get(key, []))} values, z_dim={config.get('z_dim')}"
            )
    return config
