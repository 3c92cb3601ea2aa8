"""A key of the configuration that no code reads does not exist."""

import dataclasses
import sys

import pytest

from chitu_diffusion import config
from chitu_diffusion.client import Client
from chitu_diffusion.config import schema
from chitu_diffusion.launch import embedded
from tests.e2e.conftest import ROOT

CLASSES = [c for c in vars(schema).values() if dataclasses.is_dataclass(c)]

# Read by code that this test does not see; with the line that does it.
ELSEWHERE = {
    ("DitConfig", "warmup"): ("chitu_diffusion/config/rules.py", "services.dit.warmup"),
    ("ServicesConfig", "stop_grace_s"): ("chitu_diffusion/rpc/server.py", "services.stop_grace_s"),
}


def is_use(frame) -> bool:
    """Whether this frame does something with a value, other than to check or copy the tree."""
    module = frame.f_globals.get("__name__", "")
    if module == "dataclasses":
        return "asdict" in frame.f_code.co_name  # defaults of a request, by name
    return not module.startswith(("chitu_diffusion.config", "omegaconf"))


def test_every_key_is_read(monkeypatch, tmp_path):
    read = set()

    def recording(self, name):
        value = object.__getattribute__(self, name)
        if is_use(sys._getframe(1)):
            read.add((type(self).__name__, name))
        return value

    for class_ in CLASSES:
        monkeypatch.setattr(class_, "__getattribute__", recording)
    for model, ranks in (("tiny-wan", 2), ("tiny-wan2.2", 1)):
        settings = config.load(
            [
                f"models={model}",
                f"distributed.world_size={ranks}",
                f"orchestrator.results_url={tmp_path}",
                "infer.num_threads=1",
            ]
        )
        with embedded(settings) as address, Client(address) as client:
            client.models()
            client.generate("a red circle", num_inference_steps=2)
    fields = {(c.__name__, f.name) for c in CLASSES for f in dataclasses.fields(c)}
    assert fields - read == set(ELSEWHERE)


@pytest.mark.parametrize(("file", "text"), ELSEWHERE.values())
def test_what_is_read_elsewhere(file, text):
    assert f"config.{text}" in (ROOT / file).read_text()
