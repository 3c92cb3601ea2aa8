"""The VAE in the original layout, against diffusers' own reading of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.vae.wan_vae import WanVae
from services.vae.weights import architecture, diffusers_name
from tests.vae.conftest import make_latents

CPU = torch.device("cpu")
FILE = "Wan2.1_VAE.pth"
BLOCK = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
PLACES = {
    "quant_conv.": "conv1.",
    "post_quant_conv.": "conv2.",
    "conv_in.": "conv1.",
    "norm_out.": "head.0.",
    "conv_out.": "head.2.",
    "mid_block.resnets.0.": "middle.0.",
    "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.1.": "middle.2.",
    "down_blocks.": "downsamples.",
}


def original_name(name: str) -> str:
    """Where the original layout keeps one of diffusers' names, with two blocks a level."""
    up = re.fullmatch(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.+)", name)
    if up:
        place = 4 * int(up[1]) + (int(up[3]) if up[2] == "resnets" else 3)
        name = f"decoder.upsamples.{place}.{up[4]}"
    for ours, theirs in PLACES.items():
        name = re.sub(rf"^(encoder\.|decoder\.|){re.escape(ours)}", rf"\g<1>{theirs}", name)
    if "samples." in name or "middle." in name:
        for ours, theirs in BLOCK.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
    return name.replace("conv_shortcut", "shortcut")


@pytest.fixture(scope="module")
def published() -> AutoencoderKLWan:
    """The published architecture at a quarter of its width."""
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=24).eval()


@pytest.fixture(scope="module")
def weights(published: AutoencoderKLWan) -> dict[str, torch.Tensor]:
    return {original_name(key): value for key, value in published.state_dict().items()}


def test_diffusers_understands_the_names_alike(
    published: AutoencoderKLWan, weights: dict[str, torch.Tensor]
) -> None:
    converted = convert_wan_vae_to_diffusers(dict(weights))
    translate = diffusers_name(2)
    assert set(converted) == {translate(name) for name in weights} == set(published.state_dict())
    assert all(converted[translate(name)] is value for name, value in weights.items())


@pytest.mark.parametrize("name", [FILE, "Wan2.1_VAE.safetensors"])
def test_it_decodes_as_diffusers_single_file_loader_does(
    published: AutoencoderKLWan, weights: dict[str, torch.Tensor], tmp_path: Path, name: str
) -> None:
    if name == FILE:
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    published.save_config(tmp_path / "config")
    theirs = AutoencoderKLWan.from_single_file(
        str(tmp_path / name), config=str(tmp_path / "config")
    ).eval()
    latents = make_latents(2, 4, 4)
    latents = torch.cat([latents] * (16 // latents.shape[1]), dim=1)[:, :16]
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (theirs.config.latents_mean, theirs.config.latents_std)
    )
    with torch.no_grad():
        expected = theirs.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    video = torch.cat(list(WanVae.load(tmp_path, CPU, torch.float32).decode(latents)), dim=2)
    assert video.std() > 0
    assert torch.equal(video, expected.clamp(-1, 1))


def test_the_published_vae_is_recognised(tmp_path: Path) -> None:
    with torch.device("meta"):
        full = AutoencoderKLWan()
    shapes = {original_name(k): tuple(v.shape) for k, v in full.state_dict().items()}
    found = architecture(shapes, tmp_path)
    for key, value in found.items():
        if key != "_class_name":
            assert (
                list(full.config[key]) == value
                if isinstance(value, list)
                else full.config[key] == value
            ), key


def test_a_missing_or_another_vae_is_named(
    weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"neither vae/.* nor Wan2\.1_VAE"):
        WanVae.load(tmp_path, CPU, torch.float32)
    torch.save({"something": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"is not a Wan2\.1 VAE"):
        WanVae.load(tmp_path, CPU, torch.float32)
    torch.save(weights | {"conv2.weight": torch.zeros(8, 8, 1, 1, 1)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="8 latent channels"):
        WanVae.load(tmp_path, CPU, torch.float32)
    torch.save(weights | {"encoder.conv1.weight": torch.zeros(0, 3, 3, 3, 3)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=rf"{FILE}: encoder\.conv1\.weight has no channels"):
        WanVae.load(tmp_path, CPU, torch.float32)
    torch.save({k: v for k, v in weights.items() if k != "decoder.head.2.bias"}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"1 missing: decoder\.conv_out\.bias"):
        WanVae.load(tmp_path, CPU, torch.float32)


def test_the_layout_is_logged_and_diffusers_wins(
    ckpt_dir: Path,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    torch.save(weights, tmp_path / FILE)
    (tmp_path / f"{FILE}.part").write_bytes(b"")
    WanVae.load(tmp_path, CPU, torch.float32)
    assert f"VAE: {tmp_path / FILE} (original layout)" in caplog.messages
    shutil.copytree(ckpt_dir / "vae", tmp_path / "vae")
    (tmp_path / FILE).write_bytes(b"")
    assert WanVae.load(tmp_path, CPU, torch.float32).parameter_count
    assert f"VAE: {tmp_path / 'vae'} (diffusers' layout), not {FILE}" in caplog.messages
