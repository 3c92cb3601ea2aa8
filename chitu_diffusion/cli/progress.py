"""Live progress: bars on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from chitu_diffusion.v1 import dit_pb2
from chitu_diffusion.v1 import generation_pb2 as pb

_EXPERTS = {
    dit_pb2.EXPERT_HIGH_NOISE: ", high-noise expert",
    dit_pb2.EXPERT_LOW_NOISE: ", low-noise expert",
}


class ProgressView:
    """Shows what happens to a task."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._bar: TaskID | None = None
        self._stage = ""
        self._denoise_began = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._progress.stop()

    def saying(self, text: str) -> None:
        """Show something that has no measure."""
        self._show(text, None, None, "")

    def on_event(self, event: pb.GenerateEvent) -> None:
        """Show an event."""
        kind = event.WhichOneof("event")
        if kind == "queued":
            self._show("queued", None, None, f"{event.queued.position} before this one")
        elif kind == "encoding":
            self._show("encode", None, None, "")
        elif kind == "denoising":
            self._on_denoising(event.denoising)
        elif kind == "decoding":
            frame, of = event.decoding.frame, event.decoding.of
            self._show("decode", frame, of, f"frame {frame}/{of}")
        elif kind == "muxing":
            self._show("mux", None, None, "")

    def _on_denoising(self, event: pb.Denoising) -> None:
        if event.step == 0:
            self._denoise_began = time.monotonic()
            self._show("denoise", 0, event.of, f"step 0/{event.of}")
            return
        rate = event.step / max(time.monotonic() - self._denoise_began, 1e-9)
        detail = f"step {event.step}/{event.of}, {rate:.2f} steps/s, {event.eta_s:.0f} s left"
        self._show("denoise", event.step, event.of, detail + _EXPERTS.get(event.expert, ""))

    def _show(self, stage: str, done: int | None, of: int | None, detail: str) -> None:
        new = stage != self._stage
        self._stage = stage
        if not self._live:
            if new or (done is not None and of is not None and done == of):
                self._console.print(f"{stage} {detail}".rstrip(), highlight=False)
            return
        if new and self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
        if self._bar is None:
            self._bar = self._progress.add_task(stage, total=of, detail=detail)
        self._progress.update(self._bar, completed=done or 0, total=of, detail=detail)
