"""The first slices of a pool: they meet what would otherwise slow down, or fail, a user's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

import torch

from chitu_diffusion.config.rules import warmup_shapes
from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import DeadlineError
from chitu_diffusion.v1 import dit_pb2
from services.dit.denoiser import make_plan
from services.dit.experts import hosted
from services.dit.jobs import Order
from services.dit.parallel import Layout
from services.dit.replies import layout_message
from services.dit.request import parse_params
from services.dit.stream import SliceStream

log = logging.getLogger(__name__)


async def warm_up(
    config: Config,
    groups: Sequence[tuple[Layout, Sequence[int]]],
    submit: Callable[[Order], SliceStream],
) -> None:
    """Run two steps of every configured shape on every group, with each of the model's experts.

    Args:
        config: of the pool.
        groups: layouts and ranks; those of one layout that follow each other run side by side.
        submit: begins a slice.

    Raises:
        DeadlineError: it took longer than services.dit.warmup_timeout_s.
        ChituError: a slice failed.
    """
    limit, began = config.services.dit.warmup_timeout_s, time.monotonic()
    try:
        async with asyncio.timeout(limit):
            for frames, height, width in warmup_shapes(config):
                for layout, blocks in itertools.groupby(groups, key=lambda group: group[0]):
                    orders = [
                        _order(config, (frames, height, width), layout, ranks)
                        for _, ranks in blocks
                    ]
                    started = time.monotonic()
                    await asyncio.gather(*(_run(submit(order)) for order in orders))
                    log.info(
                        "warm-up: %dx%dx%d, %s, on %d groups: %.2f s",
                        *(frames, height, width, layout, len(orders)),
                        time.monotonic() - started,
                    )
    except TimeoutError:
        raise DeadlineError(
            f"the warm-up was not over within services.dit.warmup_timeout_s={limit:g}"
        ) from None
    log.info("warm-up took %.1f s", time.monotonic() - began)


async def _run(stream: SliceStream) -> None:
    try:
        async for _ in stream:
            pass
    finally:
        stream.cancel()


def _order(
    config: Config, shape: tuple[int, int, int], layout: Layout, ranks: Sequence[int]
) -> Order:
    model = config.models
    two = model.boundary_ratio is not None
    params = dit_pb2.DenoiseParams(
        num_frames=shape[0],
        height=shape[1],
        width=shape[2],
        num_inference_steps=2,  # timesteps 1000 and 500: high noise and low noise
        guidance_scale=2.0,
        flow_shift=1.0,
        solver="euler",
    )
    if two:
        params.guidance_scale_high, params.boundary_ratio = 2.0, 0.75
    start = dit_pb2.DenoiseStart(
        task_id=f"warm-up of {layout} on {list(ranks)}",
        params=params,
        end_step=2,
        source=dit_pb2.LATENT_SOURCE_NOISE,
        layout=layout_message(layout),
        ranks=ranks,
    )
    plan = make_plan(parse_params(params, model))
    rows = torch.zeros((1, model.transformer.text_dim))
    tensors = {"prompt_embeds": rows, "negative_prompt_embeds": rows}
    here = hosted(config).values()
    if 1 not in here and two:
        start.end_step = 1
    if 0 not in here:
        start.first_step, start.source = 1, dit_pb2.LATENT_SOURCE_CHECKPOINT
        start.solver_state.CopyFrom(dit_pb2.SolverState(solver="euler", step=1, order=1))
        tensors["latents"] = torch.zeros((1, model.transformer.in_channels, *plan.params.grid))
    return Order(start, plan, tensors)
