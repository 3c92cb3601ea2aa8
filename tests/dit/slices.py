"""Slices of the small model."""

from __future__ import annotations

from typing import Any

import torch

from services.dit.denoiser import make_plan
from services.dit.jobs import Event, Slice, SliceDone, Source
from services.dit.pool import LocalPool
from tests.dit.conftest import make_embeds, make_params


def job(task_id: str = "a", **changes: Any) -> Slice:
    fields: dict[str, Any] = {
        "task_id": task_id,
        "attempt": 1,
        "plan": make_plan(make_params()),
        "first_step": 0,
        "end_step": 6,
        "source": Source.NOISE,
        "prompt_embeds": make_embeds(1, 9)[0, :9],
        "negative_prompt_embeds": make_embeds(2, 4)[0, :4],
        "return_latents": True,
    }
    return Slice(**(fields | changes))


async def run(pool: LocalPool, job: Slice) -> list[Event]:
    return [event async for event in pool.submit(job)]


def latents(events: list[Event]) -> torch.Tensor:
    assert isinstance(events[-1], SliceDone)
    assert events[-1].latents is not None
    return events[-1].latents
