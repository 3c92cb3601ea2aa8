import json
import signal
import subprocess
import time

import av
import pytest

from tests.e2e.conftest import COMMAND


def run(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=110, **options
    )


def test_generate_starts_everything_and_leaves_nothing(tmp_path):
    out, report, sheet = tmp_path / "a" / "v.mp4", tmp_path / "r.json", tmp_path / "s.png"
    done = run(
        "generate", "a red circle", "-o", out, "--report", report, "--contact-sheet", sheet,
        "--model", "tiny-wan2.2", "--steps", 4, "--seed", 0, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "9 frames, 64x64, 16 fps" in done.stdout
    assert "seed 0" in done.stdout
    for stage in ("encode", "denoise", "decode", "mux"):
        assert stage in done.stderr
    data = json.loads(report.read_text())
    assert data["params"]["seed"] == "0"
    assert data["params"]["num_inference_steps"] == 4
    experts = [(s["timestep"] >= 875, s["expert"]) for s in data["steps"]]
    assert set(experts) == {(True, "EXPERT_HIGH_NOISE"), (False, "EXPERT_LOW_NOISE")}
    with av.open(str(out)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 9
    with av.open(str(sheet)) as container:
        (picture,) = container.decode(video=0)
        assert (picture.width, picture.height) == (3 * 130 - 2, 3 * 130 - 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "r.json", "s.png"]


def test_generate_on_a_server(tiny_wan, tmp_path):
    server = tiny_wan.addresses["orchestrator"]
    outputs = [tmp_path / "1.mp4", tmp_path / "2.mp4"]
    for output in outputs:
        done = run("generate", "x", "-o", output, "--server", server, "--seed", 3, "--steps", 2)
        assert done.returncode == 0, done.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-frames", 16], "params.num_frames: 16: must be 4n+1"),
        (["--guidance-scale", "nan"], "params.guidance_scale: nan: must be finite"),
        (["--solver", "ddpm"], "params.solver: 'ddpm': must be one of unipc"),
        (["--model", "tinywan"], "did you mean 'tiny-wan'"),
        (["--set", "infer.dtyp=auto"], "did you mean 'infer.dtype'"),
        (["-o", "/"], "is a folder"),
        (["--server", "h:1", "--model", "m", "--set", "infer.device=cpu"], "has no effect on a"),
    ],
)
def test_wrong_usage_is_explained_in_seconds(arguments, message, tmp_path):
    done = run("generate", "x", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_missing_checkpoint_is_named(tmp_path):
    done = run("generate", "x", "--set", "models.ckpt_dir=nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path / "nowhere") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_is_not_there_is_an_error(tmp_path):
    done = run("generate", "x", "--server", "127.0.0.1:1", "-o", tmp_path / "x.mp4")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") or "error: " in done.stderr
    assert not (tmp_path / "x.mp4").exists()


@pytest.mark.parametrize("stage", ["loading weights", "denoise"])
def test_ctrl_c_in_the_middle_ends_it_cleanly(tmp_path, stage):
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "--steps", "1000", "-o", str(tmp_path / "x.mp4")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    for line in process.stderr:
        if line.startswith(stage):
            break
    time.sleep(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(20) == 130, rest
    assert time.monotonic() - began < 10
    assert "Traceback" not in rest
    assert rest.endswith("interrupted\n")
    assert list(tmp_path.iterdir()) == []
