"""Write the diffusers folders `tiny-wan` and `tiny-wan2.2`, swapping each into place whole."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, ModelMixin, WanTransformer3DModel
from transformers import UMT5EncoderModel

from .latents import training_latents
from .models import BOUNDARY, build_scheduler
from .tokenizer import TOKENIZER_CLASS, save_tokenizer
from .train_dit import load_pair
from .train_vae import load_vae


@dataclass
class Parts:
    """The trained models. `low` is the low-noise expert of a two-expert checkpoint, else None."""

    vae: AutoencoderKLWan
    text_encoder: UMT5EncoderModel
    transformer: WanTransformer3DModel
    low: WanTransformer3DModel | None = None


def _model_index(two_experts: bool) -> dict[str, object]:
    """Return what `model_index.json` of a published Wan2.1 or Wan2.2 folder says."""
    return {
        "_class_name": "WanPipeline",
        "_diffusers_version": importlib.metadata.version("diffusers"),
        "boundary_ratio": BOUNDARY if two_experts else None,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", TOKENIZER_CLASS],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if two_experts else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def _save_model(model: ModelMixin | UMT5EncoderModel, folder: Path) -> None:
    """Save a model rounded to bf16 (safetensors, contiguous) and leave it in fp32 behind."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    model.to(torch.float32)


def export(parts: Parts, folder: Path) -> int:
    """Write `folder` beside itself first, then swap; return its size in bytes.

    The models' weights are rounded to bf16 in place.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    _save_model(parts.vae, fresh / "vae")
    _save_model(parts.text_encoder, fresh / "text_encoder")
    _save_model(parts.transformer, fresh / "transformer")
    if parts.low is not None:
        _save_model(parts.low, fresh / "transformer_2")
    save_tokenizer(fresh / "tokenizer")
    build_scheduler().save_pretrained(fresh / "scheduler")
    index = json.dumps(_model_index(parts.low is not None), indent=2)
    (fresh / "model_index.json").write_text(index + "\n")
    for path in fresh.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def export_all(work: Path, out: Path, seed: int) -> list[tuple[Path, int]]:
    """Export what `work` holds: `tiny-wan`, and `tiny-wan2.2` once both experts are there."""
    vae = load_vae(work)
    _, mean, std = training_latents(work, seed)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    pair = load_pair(work, "dit")
    done = []
    parts = Parts(vae, pair.text_encoder, pair.transformer)
    done.append((out / "tiny-wan", export(parts, out / "tiny-wan")))
    if (work / "high.pt").exists() and (work / "low.pt").exists():
        high, low = (load_pair(work, name).transformer for name in ("high", "low"))
        parts = Parts(vae, pair.text_encoder, high, low)
        done.append((out / "tiny-wan2.2", export(parts, out / "tiny-wan2.2")))
    return done
