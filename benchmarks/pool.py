"""A DiT pool of four ranks: layouts side by side, changes of layout, checkpoints, cancels, kills.

The tiny model at a shape of 2304 tokens; on the CPU the ranks share its cores, so a layout cannot
be faster than the cores allow: the figures tell what sharing costs, not what it gains. Layouts run
in turn, round by round, so that a drift of the machine's speed meets all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch

from chitu_diffusion import config as configuration
from chitu_diffusion.errors import CancelledTaskError, ChituError, UnavailableError
from chitu_diffusion.v1 import dit_pb2
from services.dit.denoiser import make_plan
from services.dit.jobs import Order
from services.dit.parallel import Layout
from services.dit.ranks.front import RankPool
from services.dit.replies import layout_message
from services.dit.request import parse_params

SHAPE = {"num_frames": 33, "height": 256, "width": 256}
STEPS = 6
LAYOUTS = [
    Layout(),
    Layout(2, 1, 1),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(2, 2, 1),
    Layout(1, 2, 2),
    Layout(1, 1, 4),
]
KILLS, CANCELS = 3, 20

Responses = list[dit_pb2.DenoiseResponse]


class Bench:
    """A pool, and slices for it."""

    def __init__(self, pool: RankPool, config: Any) -> None:
        self.pool, self._config = pool, config
        self._count = 0

    def order(self, task_id: str = "", **fields: Any) -> Order:
        """All steps of a task from noise, unless the fields say otherwise."""
        self._count += 1
        model = self._config.models
        params = dit_pb2.DenoiseParams(
            **SHAPE,
            num_inference_steps=STEPS,
            guidance_scale=5.0,
            flow_shift=5.0,
            solver="unipc",
        )
        start = dit_pb2.DenoiseStart(
            task_id=task_id or f"bench {self._count}",
            params=params,
            **({"end_step": STEPS, "source": dit_pb2.LATENT_SOURCE_NOISE} | fields),
        )
        rows = torch.ones((64, model.transformer.text_dim))
        tensors = {"prompt_embeds": rows, "negative_prompt_embeds": -rows}
        return Order(start, make_plan(parse_params(params, model)), tensors)

    async def run(self, **fields: Any) -> Responses:
        """A slice's responses."""
        return [response async for response in self.pool.submit(self.order(**fields))]

    async def serving(self) -> None:
        """Wait until slices are taken."""
        while True:
            try:
                self.pool.check()
            except UnavailableError:
                await asyncio.sleep(0.01)
            else:
                return


def run(rounds: int) -> tuple[dict[str, Any], str]:
    """Figures and a Markdown table."""
    figures = asyncio.run(_run(rounds))
    return figures, table(figures)


@asynccontextmanager
async def _bench() -> AsyncIterator[Bench]:
    config = configuration.load(
        [
            "models=tiny-wan",
            "distributed.world_size=4",
            "infer.num_threads=1",
            "services.dit.warmup=33x256x256",
        ]
    )
    pool = RankPool(config)
    await pool.load()
    try:
        yield Bench(pool, config)
    finally:
        await pool.close()


async def _run(rounds: int) -> dict[str, Any]:
    async with _bench() as bench:
        return {
            "rounds": rounds,
            "step_s": await step_times(bench, rounds),
            "change_s": await layout_changes(bench, rounds),
            "checkpoint_delay": await checkpoint_delay(bench, rounds),
            "cancel_steps": await cancel_latency(bench),
            "kill_to_serving_s": await kills(bench),
        }


def seconds(responses: Responses) -> float:
    """Median time of a slice's steps behind the first, which prepares the prompts."""
    steps = [response.step.seconds for response in responses if response.HasField("step")]
    return statistics.median(steps[1:])


async def step_times(bench: Bench, rounds: int) -> dict[str, float]:
    """Median step time of each layout."""
    times: dict[str, list[float]] = {str(layout): [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout in LAYOUTS:
            given = await bench.run(layout=layout_message(layout))
            times[str(layout)].append(seconds(given))
    return {name: statistics.median(values) for name, values in times.items()}


async def layout_changes(bench: Bench, rounds: int) -> dict[str, float]:
    """Time of a slice of two steps that goes on in the same group, in another, or elsewhere."""
    ways = {
        "the same ranks": (Layout(1, 2, 1), (0, 1)),
        "another layout, the same ranks": (Layout(2, 1, 1), (0, 1)),
        "two ranks more": (Layout(2, 2, 1), (0, 1, 2, 3)),
        "two other ranks": (Layout(1, 2, 1), (2, 3)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, (layout, ranks) in ways.items():
            task = f"change {round_} {name}"
            before = layout_message(Layout(1, 2, 1))
            await bench.run(task_id=task, end_step=2, keep_state=True, layout=before, ranks=(0, 1))
            began = time.perf_counter()
            given = await bench.run(
                task_id=task,
                source=dit_pb2.LATENT_SOURCE_HELD,
                first_step=2,
                end_step=4,
                layout=layout_message(layout),
                ranks=ranks,
            )
            steps = sum(response.step.seconds for response in given)
            if round_:  # the first one opens the groups
                times[name].append(time.perf_counter() - began - steps)
    return {name: statistics.median(values) for name, values in times.items()}


async def checkpoint_delay(bench: Bench, rounds: int) -> float:
    """How much longer a task takes with a checkpoint behind every step; ratio - 1."""
    ratios = []
    for _ in range(rounds):
        took = []
        for interval in (0.0, 1e-9):
            began = time.perf_counter()
            await bench.run(layout=layout_message(Layout()), checkpoint_interval_s=interval)
            took.append(time.perf_counter() - began)
        ratios.append(took[1] / took[0])
    return statistics.median(ratios) - 1


async def cancel_latency(bench: Bench) -> float:
    """Steps that end behind a cancel; the most of all tries."""
    most = 0.0
    for number in range(CANCELS):
        stream = bench.pool.submit(bench.order())
        behind = 0
        try:
            async for response in stream:
                behind += stream.cancelled and response.HasField("step")
                if response.step.step == number % (STEPS - 1):
                    stream.cancel()
        except CancelledTaskError:
            pass
        most = max(most, behind)
    return most


async def kills(bench: Bench) -> list[float]:
    """Seconds from kill -9 of a busy rank until the pool takes slices again, warmed up."""
    times = []
    for number in range(KILLS):
        slice_ = asyncio.ensure_future(bench.run())
        await asyncio.sleep(0.2)
        os.kill(bench.pool.describe().ranks[number % 4].pid, signal.SIGKILL)
        began = time.perf_counter()
        with suppress(ChituError):
            await slice_
        await bench.serving()
        times.append(time.perf_counter() - began)
    return times


def table(figures: dict[str, Any]) -> str:
    """Figures as Markdown."""
    alone = figures["step_s"][str(Layout())]
    rows = [
        f"| {name} | {value * 1000:.1f} | {alone / value:.2f} |"
        for name, value in figures["step_s"].items()
    ]
    changes = [f"| {name} | {value * 1000:.1f} |" for name, value in figures["change_s"].items()]
    kills_s = ", ".join(f"{value:.1f}" for value in figures["kill_to_serving_s"])
    return "\n".join(
        [
            f"A pool of four ranks, tiny model, 2304 tokens, {figures['rounds']} rounds, median.",
            "",
            "| layout | step, ms | one rank's time / this |",
            "|---|---|---|",
            *rows,
            "",
            "| a slice of two steps goes on with | ms besides its steps |",
            "|---|---|",
            *changes,
            "",
            f"- a checkpoint behind every step: {figures['checkpoint_delay']:+.1%} of a task",
            f"- steps behind a cancel: at most {figures['cancel_steps']:g} in {CANCELS} tries",
            f"- kill -9 of a rank to serving again, warmed up: {kills_s} s",
            "",
        ]
    )
