"""The latents that diffusers' Wan pipeline makes of the same prompts and noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

from services.dit.denoiser import DenoiseParams, Prompts
from tests.published import PublishedUniPC


def published_latents(
    params: DenoiseParams, experts: list[WanTransformer3DModel], prompts: Prompts
) -> torch.Tensor:
    """Run the whole pipeline but the text encoder and the VAE."""
    pipe = pipeline(params, experts, reference_scheduler(params))
    pipe.set_progress_bar_config(disable=True)
    latents: torch.Tensor = pipe(
        prompt_embeds=prompts.positive,
        negative_prompt_embeds=prompts.negative,
        num_frames=params.num_frames,
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale_high or params.guidance_scale,
        guidance_scale_2=params.guidance_scale if params.boundary_ratio else None,
        generator=torch.Generator().manual_seed(params.seed),
        output_type="latent",
    ).frames
    return latents


def pipeline(
    params: DenoiseParams, experts: list[WanTransformer3DModel], scheduler: Any
) -> WanPipeline:
    two = params.boundary_ratio is not None
    return WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=scheduler,
        transformer=experts[0],
        transformer_2=experts[1] if two else None,
        boundary_ratio=params.boundary_ratio,
    )


def reference_scheduler(params: DenoiseParams) -> Any:
    flow = {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": params.flow_shift,
    }
    if params.solver == "unipc":
        return PublishedUniPC(solver_order=2, **flow)
    levels = np.linspace(1.0, 0.0, params.num_inference_steps + 1)[:-1]
    shifted = params.flow_shift * levels / (1 + (params.flow_shift - 1) * levels)

    class Dpm(DPMSolverMultistepScheduler):  # type: ignore[misc]
        def set_timesteps(self, num_inference_steps: int, **_: Any) -> None:
            super().set_timesteps(num_inference_steps)
            self.sigmas = torch.tensor([*shifted, 0.0], dtype=torch.float32)
            self.timesteps = torch.from_numpy((1000 * shifted).astype(np.int64))

    class Euler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
        def set_timesteps(self, num_inference_steps: int, **_: Any) -> None:
            super().set_timesteps(sigmas=levels)

    if params.solver == "dpm++":
        return Dpm(solver_order=2, algorithm_type="dpmsolver++", **flow)
    return Euler(shift=params.flow_shift)
