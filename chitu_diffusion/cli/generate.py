"""`chitu-diffusion generate`: a prompt in, an MP4 out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf import json_format

from chitu_diffusion import config as configuration
from chitu_diffusion.cli.progress import ProgressView
from chitu_diffusion.client import Client, Result
from chitu_diffusion.request import GenerationRequest

_REQUEST = "Request"
_LOCAL = "Local run (without --server)"


def generate(
    prompt: Annotated[str, typer.Argument(help="What the video shows.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The video file.")] = Path(
        "out.mp4"
    ),
    server: Annotated[
        str | None, typer.Option(help="Address of an orchestrator; without it all runs here.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="Write the frames side by side as PNG.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model; a local run starts it.", rich_help_panel=_REQUEST)
    ] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What it should not show.", rich_help_panel=_REQUEST)
    ] = None,
    num_frames: Annotated[
        int | None, typer.Option(help="Frames, 4n+1.", rich_help_panel=_REQUEST)
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Pixels, a multiple of 16.", rich_help_panel=_REQUEST)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Pixels, a multiple of 16.", rich_help_panel=_REQUEST)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Denoise steps.", rich_help_panel=_REQUEST),
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="0 to 100.", rich_help_panel=_REQUEST)
    ] = None,
    guidance_scale_high: Annotated[
        float | None,
        typer.Option(help="Of the high-noise expert.", rich_help_panel=_REQUEST),
    ] = None,
    boundary_ratio: Annotated[
        float | None,
        typer.Option(help="Where the experts change, 0 to 1.", rich_help_panel=_REQUEST),
    ] = None,
    flow_shift: Annotated[
        float | None, typer.Option(help="Shift of the noise grid.", rich_help_panel=_REQUEST)
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="unipc, dpm++ or euler.", rich_help_panel=_REQUEST)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same video.", rich_help_panel=_REQUEST)
    ] = None,
    fps: Annotated[
        int | None, typer.Option(help="Frames per second.", rich_help_panel=_REQUEST)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hydra override, repeatable.", rich_help_panel=_LOCAL),
    ] = None,
) -> None:
    """Generate a video from a prompt."""
    if server is not None and overrides:
        raise typer.BadParameter("--set configures a local run: it has no effect on a server")
    _check_writable(output, report, contact_sheet)
    # The name of a local model is the name of its configuration in lower case.
    local = [*([f"models={model.lower()}"] if model else []), *(overrides or [])]
    request = GenerationRequest(
        prompt=prompt,
        negative_prompt=negative_prompt,
        model=model if server else None,
        num_frames=num_frames,
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        guidance_scale_high=guidance_scale_high,
        boundary_ratio=boundary_ratio,
        flow_shift=flow_shift,
        solver=solver,
        seed=seed,
        fps=fps,
    )
    began = time.monotonic()
    with ProgressView() as view, _server(server, local, view) as address, Client(address) as client:
        result = client.generate(request, on_event=view.on_event)
        view.saying("saving")
        _save(result, output, report, contact_sheet)
    video, params = result.video, result.report.params
    typer.echo(
        f"{output}: {video.num_frames} frames, {video.width}x{video.height}, {video.fps} fps, "
        f"{video.byte_size / 1e3:.0f} kB, seed {params.seed}, "
        f"{time.monotonic() - began:.1f} s ({result.report.run_seconds:.1f} s to generate)"
    )
    for warning in result.report.warnings:
        typer.echo(f"note: {warning}", err=True)


@contextlib.contextmanager
def _server(server: str | None, overrides: list[str], view: ProgressView) -> Iterator[str]:
    """The address to talk to; without `--server`, of a system started for this call."""
    if server is not None:
        yield server
        return
    from chitu_diffusion.launch import embedded

    config = configuration.load(["orchestrator.results_url=memory://chitu-results", *overrides])
    with embedded(config, on_stage=view.saying) as address:
        yield address


def _check_writable(*paths: Path | None) -> None:
    """Find out about a wrong path before the work, not after it."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder: name a file in it")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot make the folder of {path}: {error}") from None


def _save(result: Result, output: Path, report: Path | None, sheet: Path | None) -> None:
    output.write_bytes(result.data)
    if report is not None:
        text = json_format.MessageToJson(
            result.report,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        report.write_text(text + "\n")
    if sheet is not None:
        from chitu_diffusion.cli.contact_sheet import write_contact_sheet

        write_contact_sheet(output, sheet)
