"""Generate the held-out prompts with diffusers' `WanPipeline` and judge the pixels."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray

from . import shapes
from .judge import Verdict, judge
from .models import FLOW_SHIFT, TEXT_LEN
from .sheet import save_sheet
from .train_vae import object_mask, reconstruct, to_model

__all__ = ["Verdict", "evaluate", "generate", "judge", "report", "score"]

ASPECTS = ("colour", "direction", "shape", "background")
CHANCE = {"colour": 1 / 6, "direction": 1 / 4, "shape": 1 / 3, "background": 1 / 3}
STEPS, GUIDANCE, SEED = 20, 4.0, 1000
BATCH = 12


def load(folder: Path) -> WanPipeline:
    """Load a checkpoint in fp32, from local files alone."""
    pipeline = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: WanPipeline, prompts: Sequence[str], *, steps: int = STEPS, seed: int = SEED
) -> list[NDArray[np.uint8]]:
    """Return one clip (F, H, W, 3) for each prompt; prompt n starts from the noise of seed + n."""
    clips: list[NDArray[np.uint8]] = []
    for first in range(0, len(prompts), BATCH):
        batch = list(prompts[first : first + BATCH])
        seeds = range(seed + first, seed + first + len(batch))
        output = pipeline(
            batch,
            negative_prompt=[""] * len(batch),
            height=shapes.SIZE,
            width=shapes.SIZE,
            num_frames=shapes.CLIP.frames,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            max_sequence_length=TEXT_LEN,
            generator=[torch.Generator().manual_seed(number) for number in seeds],
            output_type="np",
        )
        clips.extend(np.rint(output.frames * 255).astype(np.uint8))
    return clips


def score(verdicts: Sequence[Verdict], scenes: Sequence[shapes.Scene]) -> dict[str, float]:
    """Return the share of verdicts, 0..1, that agree with the scene asked for, by aspect."""
    pairs = list(zip(verdicts, scenes, strict=True))
    return {
        aspect: sum(getattr(seen, aspect) == getattr(asked, aspect) for seen, asked in pairs)
        / len(pairs)
        for aspect in ASPECTS
    }


def shuffled_score(
    verdicts: Sequence[Verdict], scenes: Sequence[shapes.Scene], rounds: int = 100
) -> dict[str, float]:
    """Return the mean score against shuffled prompts: near chance, or the judge is no judge."""
    rng = np.random.default_rng(0)
    totals = dict.fromkeys(ASPECTS, 0.0)
    for _ in range(rounds):
        others = [scenes[index] for index in rng.permutation(len(scenes))]
        for aspect, value in score(verdicts, others).items():
            totals[aspect] += value / rounds
    return totals


def _error_on_object(decoded: NDArray[np.uint8], clips: NDArray[np.uint8]) -> float:
    """Return the mean absolute error of clips (B, F, H, W, 3) on the object, in levels."""
    mask = object_mask(to_model(clips))[:, 0].numpy().astype(bool)
    return float(np.abs(decoded.astype(np.int16) - clips)[mask].mean())


def evaluate(folder: Path, sheet: Path | None = None) -> dict[str, object]:
    """Evaluate one checkpoint on the held-out scenes; write its clips to `sheet` if asked."""
    pipeline = load(folder)
    scenes = shapes.held_out_scenes()
    since = time.monotonic()
    clips = generate(pipeline, [scene.caption() for scene in scenes])
    seconds = time.monotonic() - since
    if sheet is not None:
        save_sheet(clips, sheet)
    verdicts = [judge(clip) for clip in clips]
    rng = np.random.default_rng(SEED)
    rendered = np.stack([shapes.render(scene, rng) for scene in scenes])
    parts = [
        reconstruct(pipeline.vae, rendered[first : first + BATCH])
        for first in range(0, len(rendered), BATCH)
    ]
    decoded = np.concatenate(parts)
    return {
        "checkpoint": folder.name,
        "prompts": len(scenes),
        "score": score(verdicts, scenes),
        "shuffled": shuffled_score(verdicts, scenes),
        "rendered": score([judge(clip) for clip in rendered], scenes),
        "through_vae": score([judge(clip) for clip in decoded], scenes),
        "vae_error_on_object": _error_on_object(decoded, rendered),
        "seconds_per_clip": seconds / len(scenes),
        "missed": [
            {"prompt": scene.caption(), "seen": seen.__dict__}
            for scene, seen in zip(scenes, verdicts, strict=True)
            if any(getattr(scene, aspect) != getattr(seen, aspect) for aspect in ASPECTS)
        ],
    }


def _machine() -> str:
    """Return the processor and the versions, in words."""
    name = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    return f"{os.cpu_count()} CPU cores ({name}), {versions}"


def _row(name: str, score: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{100 * score[aspect]:.1f} %" for aspect in ASPECTS) + " |"


def report(results: Sequence[dict[str, object]]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# What the tiny checkpoints make of prompts they were not trained on",
        "",
        f"{results[0]['prompts']} prompts, each a combination of colour, shape, direction and "
        "background that no training clip shows.",
        f"Sampled with diffusers' `WanPipeline`: UniPC, {STEPS} steps, flow shift {FLOW_SHIFT:g}, "
        f"guidance {GUIDANCE:g}, empty negative prompt, {shapes.CLIP.frames} frames of "
        f"{shapes.SIZE}x{shapes.SIZE}, fp32 from the bf16 files, seeds {SEED} and up.",
        "Judged on the pixels alone, by `tools/tiny_wan/judge.py`.",
        f"Machine: {_machine()}.",
        "",
        "| | " + " | ".join(ASPECTS) + " |",
        "|---" * (len(ASPECTS) + 1) + "|",
    ]
    for result in results:
        lines.append(_row(f"`{result['checkpoint']}`", result["score"]))  # type: ignore[arg-type]
    for result in results:
        name = f"`{result['checkpoint']}`, prompts shuffled"
        lines.append(_row(name, result["shuffled"]))  # type: ignore[arg-type]
    lines.append(_row("drawn clips (the judge's own errors)", results[0]["rendered"]))  # type: ignore[arg-type]
    lines.append(_row("drawn clips through the VAE", results[0]["through_vae"]))  # type: ignore[arg-type]
    lines += [_row("chance", CHANCE), ""]
    lines.append("Shuffled: the same clips against 100 shuffles of the prompts, on average.")
    for result in results:
        lines.append(
            f"`{result['checkpoint']}`: {result['seconds_per_clip']:.2f} s a clip; its VAE is off "
            f"by {result['vae_error_on_object']:.1f} of 255 levels on the object."
        )
    names = " ".join(f"assets/{result['checkpoint']}" for result in results)
    lines += ["", f"Made by `python -m tools.tiny_wan evaluate {names} --report FILE`.", ""]
    return "\n".join(lines)


def run(folders: Sequence[Path], report_path: Path | None, sheets: Path | None) -> None:
    """Evaluate checkpoints, print JSON and the table, and write the table to `report_path`."""
    results = []
    for folder in folders:
        sheet = None if sheets is None else sheets / f"{folder.name}.png"
        results.append(evaluate(folder, sheet))
    text = report(results)
    print(json.dumps(results, indent=2))
    print(text)
    if report_path is not None:
        report_path.write_text(text)
