"""Compiled blocks: the same result, from a cache that outlives the process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import ConfigError
from services.dit.host import make_pool
from services.dit.models.family import Transformer
from tests.dit.slices import job, latents, run
from tests.dit.test_ranks import close_to

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
async def test_equals_the_plain_model(
    make_config: Callable[..., Config], tmp_path: Path, world_size: int
) -> None:
    made = []
    for compile_ in ("off", "block"):
        config = make_config(
            "one-diffusers",
            f"distributed.world_size={world_size}",
            f"infer.compile={compile_}",
            f"infer.compile_cache={tmp_path}/cache",
            "services.dit.warmup=5x32x48",
        )
        pool = make_pool(config)
        await pool.load()
        made.append(latents(await run(pool, job())))
        await pool.close()
    assert close_to(made[1], made[0])
    assert any((tmp_path / "cache").iterdir()), "compiled code is kept"


def test_a_family_that_cannot_be_compiled() -> None:
    class Plain(Transformer):
        def __init__(self) -> None:  # without a configuration
            pass

        def prepare(self, *_: object) -> None:
            raise AssertionError

    with pytest.raises(ConfigError, match=r"infer\.compile='block': Plain does not offer it"):
        Plain().compile_blocks()
