"""The Wan VAE over a whole clip at once, for training.

diffusers runs this VAE chunk by chunk (1 frame, then 4 at a time) with a feature cache, and clamps
what it decodes to [-1, 1]. For training one pass over all frames is faster, and the clamp would
kill gradients. These two functions compute the same thing in one pass (a test of equality is in
`check_against_diffusers`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import Tensor


class _PictureConv(WanCausalConv3d):
    """A causal convolution that, for one frame, leaves out the taps on the zeros before it."""

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if x.shape[2] > 1 or cache_x is not None or self._padding[4] == 0:
            return super().forward(x, cache_x)
        return F.conv3d(F.pad(x, self._padding[:4]), self.weight[:, :, -1:], self.bias)


@torch.no_grad()
def start_from_pictures(vae: AutoencoderKLWan) -> None:
    """Make an untrained VAE treat every frame as a picture of its own, and start it well.

    All taps on earlier frames start at zero, and resampling in time starts near the identity on
    the newest frame, so that what is learnt on pictures is a good start for clips. A third of the
    taps makes pictures cheaper, too. Weights keep the variance of what passes through, and biases
    start at zero: torch's defaults let the signal drown in the biases on its way through the
    narrow latent. Parameters and their names stay as they are.
    """
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.bias.zero_()
            newest = module.weight[:, :, -1] if module.weight.dim() == 5 else module.weight
            fan_in = newest[0].numel()
            if module.kernel_size == (3, 1, 1):  # (dim, dim) going down, (2 * dim, dim) going up
                module.weight.mul_(0.3)
                same = torch.eye(module.in_channels)
                newest[:, :, 0, 0] = same.repeat(module.out_channels // len(same), 1)
            else:
                module.weight.zero_()
                newest.normal_(std=fan_in**-0.5)
        if type(module) is WanCausalConv3d:
            module.__class__ = _PictureConv
    vae.quant_conv.weight[vae.config.z_dim :].zero_()
    # Nearly noiseless latents: with the usual variance of 1 the decoder sees noise alone.
    vae.quant_conv.bias[vae.config.z_dim :].fill_(-6.0)


def _spatial(layer: WanResample, x: Tensor) -> Tensor:
    """Apply the 2-D half of a resampling layer to every frame of x (B, C, T, H, W)."""
    batch, channels, frames, height, width = x.shape
    flat = x.transpose(1, 2).reshape(batch * frames, channels, height, width)
    flat = layer.resample(flat)
    return flat.reshape(batch, frames, *flat.shape[1:]).transpose(1, 2)


def _resample(layer: WanResample, x: Tensor) -> Tensor:
    """Resample x (B, C, T, H, W) in space and, for the 3-D modes, in time.

    The first frame is never resampled in time: 1 + 2n frames become 1 + n, or the other way round.
    """
    if layer.mode == "upsample3d":
        first, rest = x[:, :, :1], x[:, :, 1:]
        if rest.shape[2]:
            batch, channels, frames, height, width = rest.shape
            pair = layer.time_conv(rest).reshape(batch, 2, channels, frames, height, width)
            rest = pair.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, -1, height, width)
            x = torch.cat([first, rest], dim=2)
    x = _spatial(layer, x)
    if layer.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)
    return x


def encode_moments(vae: AutoencoderKLWan, clip: Tensor) -> Tensor:
    """Clip (B, 3, 1 + 4n, H, W) in [-1, 1] -> (B, 2 * z_dim, 1 + n, H/8, W/8): mean and log var."""
    encoder = vae.encoder
    x = encoder.conv_in(clip)
    for layer in encoder.down_blocks:
        x = _resample(layer, x) if isinstance(layer, WanResample) else layer(x)
    x = encoder.mid_block(x)
    return vae.quant_conv(encoder.conv_out(F.silu(encoder.norm_out(x))))


def decode_unclamped(vae: AutoencoderKLWan, latent: Tensor) -> Tensor:
    """Latent (B, z_dim, 1 + n, h, w), not normalised -> clip (B, 3, 1 + 4n, 8h, 8w), unclamped."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latent)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsamplers is not None:
            x = _resample(block.upsamplers[0], x)
    return decoder.conv_out(F.silu(decoder.norm_out(x)))


@torch.no_grad()
def check_against_diffusers(vae: AutoencoderKLWan, frames: int = 17, size: int = 64) -> float:
    """Largest absolute difference between one pass and diffusers' cached, chunked VAE."""
    clip = torch.rand(1, 3, frames, size, size) * 2 - 1
    moments = encode_moments(vae, clip)
    cached = vae.encode(clip).latent_dist.parameters
    latent = moments.chunk(2, dim=1)[0]
    decoded = decode_unclamped(vae, latent).clamp(-1, 1)
    return max(
        (moments - cached).abs().max().item(),
        (decoded - vae.decode(latent).sample).abs().max().item(),
    )
