"""diffusers' UniPC on the grid that Wan publishes."""

from typing import Any

import numpy as np
from diffusers import UniPCMultistepScheduler


class PublishedUniPC(UniPCMultistepScheduler):  # type: ignore[misc]
    """Noise levels from 1 - 1/1000 down to, not including, 0; then shifted.

    The scheduler's own default runs from 1 down to, not including, 1/1000: with 50 steps and a
    shift of 5 its last timestep is 96, where the published list ends at 92.
    """

    def set_timesteps(self, num_inference_steps: int, **_: Any) -> None:
        levels = np.linspace(float(np.float32(0.999)), 0.0, num_inference_steps + 1)[:-1]
        super().set_timesteps(sigmas=levels)
