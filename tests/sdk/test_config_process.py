"""The configuration as processes take it."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SERVE = ["chitu_diffusion.cli", "serve"]
FREE_PORTS = [f"services.{name}.listen=127.0.0.1:0" for name in ("encoder", "dit", "vae")]

# Importing torch._dynamo, as transformers and diffusers do, tries the system's temporary folder
# and makes an empty one in it for compiled kernels, which nothing here uses.
TORCH_MAKES = re.compile(rf"{re.escape(tempfile.gettempdir())}/(torchinductor_\w+|[a-z0-9_]{{8}})")

# Imported by every Python process that finds it on its path: tells each file that is written.
HOOK = """
import os, sys

WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def tell(event, args):
    if event == "open" and args[2] & WRITE or event in ("os.mkdir", "os.rename", "os.symlink"):
        if not str(args[0]).startswith("/dev/"):
            os.write(2, f"WRITES {args[0]}\\n".encode())

sys.addaudithook(tell)
"""


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    "command",
    [["services.encoder"], ["services.dit"], ["services.vae"], ["orchestrator"], SERVE],
    ids=lambda command: command[0],
)
def test_every_process_stops_at_a_wrong_key(command):
    process = run(*command, "+infer.atn_type=sdpa")
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert "infer.atn_type='sdpa'" in line
    assert "did you mean 'infer.attn_type'" in line


@pytest.mark.parametrize(
    "override",
    [
        "infer.atn_type=sdpa",
        "++infer.atn_type=sdpa",
        "~infer.atn_type",
        "infer.num_threads=-1",
        "infer.num_threads=many",
        "infer.attn_type=sage2",
        "models=tinywan",
    ],
)
def test_a_process_tells_key_and_value_in_one_line(override):
    process = run("orchestrator", override)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    key, _, value = override.lstrip("+~").partition("=")
    assert key in line
    assert value in line


@contextlib.contextmanager
def nowhere(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process where nothing can be written: nobody can make a file in /proc, not even root.

    Gives the process and its standard error, which tells every file that it writes.
    """
    (folder / "sitecustomize.py").write_text(HOOK)
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd="/proc",
            env={
                "PATH": os.environ["PATH"],
                "HOME": "/proc",
                "PYTHONPATH": f"{folder}:{ROOT}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        yield process, log
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_writing_is_seen(tmp_path):
    code = f"open({str(tmp_path / 'x')!r}, 'w')"
    with nowhere(tmp_path, "-c", code) as (process, log):
        assert process.wait(60) == 0
    assert f"WRITES {tmp_path / 'x'}" in log.read_text()


def test_all_services_start_and_write_nothing_and_tell_the_configuration_once(tmp_path):
    arguments = [*FREE_PORTS, "orchestrator.listen=127.0.0.1:0", "infer.num_threads=1"]
    with nowhere(tmp_path, "-m", *SERVE, *arguments) as (process, log):
        lines = list(itertools.takewhile(lambda line: line != "ready\n", process.stdout))
    assert process.returncode == 0, log.read_text()
    assert len(lines) == 4
    text = log.read_text()
    written = re.findall("^WRITES (.*)$", text, re.M)
    assert [path for path in written if not TORCH_MAKES.fullmatch(path)] == []
    assert text.count("low_mem_level: 0") == 1
    assert "ckpt_dir: " + str(ROOT / "assets" / "tiny-wan") in text, "paths are told whole"


@pytest.mark.parametrize("parent", [None, str(os.getpid())])
def test_a_service_tells_its_configuration_unless_its_parent_has(parent):
    env = {**os.environ, **({"CHITU_PARENT_PID": parent} if parent else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "orchestrator.listen=127.0.0.1:0"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith('{"service": "orchestrator"')
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log.count("low_mem_level: 0") == (0 if parent else 1)
