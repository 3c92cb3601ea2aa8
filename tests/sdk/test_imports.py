"""Which heavy libraries each process loads, seen from a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = ["torch", "numpy", "transformers", "diffusers", "safetensors", "av"]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import chitu_diffusion.client, chitu_diffusion.wire",
        "import chitu_diffusion.cli",
        "import chitu_diffusion.launch",
        "import orchestrator.host, orchestrator.__main__",
    ],
)
def test_client_and_orchestrator_load_no_model_library(statement):
    assert loaded_by(statement) == set()


@pytest.mark.parametrize(
    ("statement", "never"),
    [
        ("import services.encoder.host", {"diffusers", "av"}),
        ("import services.dit.host", {"diffusers", "transformers", "av"}),
        ("import services.vae.host", set()),
    ],
)
def test_a_host_loads_only_its_own_libraries(statement, never):
    loaded = loaded_by(statement)
    assert "torch" in loaded
    assert not loaded & never
