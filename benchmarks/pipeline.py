"""A whole task: our four processes against diffusers' WanPipeline in one process.

Same tiny checkpoint, prompt, seed, 20 UniPC steps with guidance, float32, and at the end an MP4
from the same muxer with the same settings. The two sides run in turn, so that a drift of the
machine's speed meets both. Start-up and two warm-up rounds are left out. Limit: one task at a time
on one machine; the tiny model has small matrices, so fixed costs weigh more than on the real ones.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.serving import serving
from chitu_diffusion import config
from chitu_diffusion.client import Client

PROMPT = "a red circle moving left on a black background"
STEPS, SEED, WARM_UP = 20, 7, 2
STAGES = ("encode", "denoise", "decode")

Seconds = dict[str, float]


def run(rounds: int) -> tuple[dict[str, Any], str]:
    """Figures and a Markdown table."""
    diffusers = Diffusers()
    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    with serving() as address, Client(address) as client:
        for round_ in range(WARM_UP + rounds):
            a, b = through_services(client), diffusers.generate()
            if round_ >= WARM_UP:
                ours.append(a)
                theirs.append(b)
    figures = {
        "rounds": rounds,
        "steps": STEPS,
        "ours_s": ours,
        "diffusers_s": theirs,
        "ratio": {
            key: statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True))
            for key in (*STAGES, "total")
        },
        "overhead": statistics.median(a["total"] / a["work"] - 1 for a in ours),
    }
    return figures, table(figures)


def through_services(client: Client) -> Seconds:
    """Seconds of a task by stage as the orchestrator saw them, and in total as the client did."""
    began = time.perf_counter()
    result = client.generate(PROMPT, seed=SEED, num_inference_steps=STEPS)
    total = time.perf_counter() - began
    stages = result.report.stages
    seconds = dict(zip(STAGES, (stage.seconds for stage in stages), strict=True))
    return {**seconds, "work": sum(s.service.seconds for s in stages), "total": total}


class Diffusers:
    """WanPipeline and the muxer, timed by stage."""

    def __init__(self) -> None:
        import torch
        from diffusers import WanPipeline

        self.model = config.load().models
        self.pipe = WanPipeline.from_pretrained(self.model.ckpt_dir, torch_dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def generate(self) -> Seconds:
        """Seconds of a task by stage and in total."""
        import torch

        defaults = self.model.request_defaults
        text_len = self.model.transformer.text_len
        began = time.perf_counter()
        with torch.no_grad():
            embeds, negative = self.pipe.encode_prompt(
                PROMPT, defaults.negative_prompt, max_sequence_length=text_len
            )
            encoded = time.perf_counter()
            latents = self.pipe(
                prompt_embeds=embeds,
                negative_prompt_embeds=negative,
                height=defaults.height,
                width=defaults.width,
                num_frames=defaults.num_frames,
                num_inference_steps=STEPS,
                guidance_scale=defaults.guidance_scale,
                max_sequence_length=text_len,
                generator=torch.Generator().manual_seed(SEED),
                output_type="latent",
            ).frames
            denoised = time.perf_counter()
            self._decode(latents)
        ended = time.perf_counter()
        return {
            "encode": encoded - began,
            "denoise": denoised - encoded,
            "decode": ended - denoised,
            "total": ended - began,
        }

    def _decode(self, latents: Any) -> None:
        """What the pipeline does with latents, and the file."""
        import torch

        from services.vae.video import VideoFormat, VideoWriter

        vae, settings = self.pipe.vae, config.load().services.vae
        mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
        video = vae.decode(latents * std + mean, return_dict=False)[0]
        frames = self.pipe.video_processor.postprocess_video(video, output_type="np")[0]
        fps = self.model.request_defaults.fps
        size = VideoFormat(*frames.shape[1:3], fps, settings.crf, settings.preset)
        writer = VideoWriter(lambda offset, data: None, size, {})
        writer.write((frames * 255).round().astype("uint8"))
        writer.finish()


def table(figures: dict[str, Any]) -> str:
    """Medians and ranges, one row a stage."""

    def cell(side: str, key: str) -> str:
        values = [1e3 * seconds[key] for seconds in figures[side]]
        return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"

    rows = "\n".join(
        f"| {key} | {cell('ours_s', key)} | {cell('diffusers_s', key)} | "
        f"{figures['ratio'][key]:.2f} |"
        for key in (*STAGES, "total")
    )
    return (
        f"tiny-wan, {figures['steps']} steps, {figures['rounds']} rounds in turn; "
        "milliseconds, median (range)\n\n"
        f"| stage | four services | WanPipeline in process | ratio |\n|---|---|---|---|\n{rows}\n\n"
        f"Overhead of the split (wall time over the sum of the services' work): "
        f"{100 * figures['overhead']:.1f} %\n"
    )
