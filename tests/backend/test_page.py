"""Every example of the backend API page, block by block, in its order.

What a block cannot have here is put in its place: the tiny checkpoint for "/path/to/checkpoint",
and without CUDA "auto" for the attention kernel "sage" and gloo for nccl.
"""

import inspect
import os
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra

from chitu_diffusion.backend import BackendState, DiffusionBackend
from tests.backend.conftest import PROMPT
from tests.e2e.conftest import ROOT

CUDA = torch.cuda.is_available()
CHECKPOINT = str(ROOT / "assets" / "tiny-wan")


@pytest.fixture
def args():
    """What `initialize` and `compose` give to a program in examples/."""
    GlobalHydra.instance().clear()
    with initialize(config_path="../../examples/config", version_base=None):
        return compose(config_name="wan")


@pytest.fixture
def process_group(tmp_path, monkeypatch):
    """Stands in for `dist.init_process_group(backend="nccl")` under torchrun."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rdzv", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_class_attributes_before_there_is_a_backend():
    code = (
        "from chitu_diffusion.backend import BackendState, DiffusionBackend as B\n"
        "assert B.model_pool == [] and B.state == BackendState.Uninitialized\n"
        "assert B.text_encoder is B.vae is B.scheduler is B.generator is None\n"
        "assert B.flexcache_manager is B.attn_backend is B.cp_group is B.world_group is None\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def test_constructor_signature():
    parameters = list(inspect.signature(DiffusionBackend.__init__).parameters.values())
    assert [p.name for p in parameters] == ["self", "args", "logging_level"]
    assert parameters[2].default is None


def test_model_pool(backend, capsys):
    models = DiffusionBackend.model_pool
    print(f"Loaded {len(models)} DiT models")
    assert capsys.readouterr().out == "Loaded 1 DiT models\n"


def test_text_encoder(backend):
    token_ids = torch.tensor([[5, 9, 1, 0, 0], [7, 8, 9, 4, 1]])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])

    text_encoder = DiffusionBackend.text_encoder
    embeddings = text_encoder(input_ids=token_ids, attention_mask=attention_mask)

    assert embeddings.shape == (2, 5, 64)
    assert embeddings[0, :3].abs().sum() > 0
    assert not embeddings[0, 3:].any()


def test_vae(backend):
    latent = torch.randn(1, 16, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    vae = DiffusionBackend.vae
    video = vae.decode(latent)

    assert video.shape == (1, 3, 9, 64, 64)
    assert video.abs().max() <= 1


def test_scheduler_and_generator(backend):
    task = backend.submit(prompt=PROMPT, seed=7, num_inference_steps=2)

    scheduler = DiffusionBackend.scheduler
    task_id = scheduler.schedule()
    assert task_id == task.id

    generator = DiffusionBackend.generator
    generator.generate_step(task)
    while (task_id := scheduler.schedule()) is not None:
        generator.generate_step(backend.task(task_id))
    assert task.result is not None


def test_backend_state_enum():
    assert issubclass(BackendState, Enum)
    assert {state.name: state.value for state in BackendState} == {
        "Uninitialized": 0,
        "Initialized": 1,
        "Running": 2,
        "Terminated": 3,
    }


def test_state_checking(backend, capsys):
    if DiffusionBackend.state == BackendState.Running:
        print("Backend is running")
    DiffusionBackend.state = BackendState.Running
    assert backend.state == BackendState.Running
    assert capsys.readouterr().out == "Backend is running\n"


def test_group_information(backend, process_group):
    cp_size = DiffusionBackend.get_cp_size()
    cfg_size = DiffusionBackend.get_cfg_size()
    world_size = dist.get_world_size()
    cp_rank = DiffusionBackend.get_cp_rank()
    cfg_rank = DiffusionBackend.get_cfg_rank()
    global_rank = dist.get_rank()
    assert (cp_size, cfg_size, world_size) == (1, 1, 1)
    assert (cp_rank, cfg_rank, global_rank) == (0, 0, 0)


@pytest.mark.parametrize("component", ["text_encoder", "vae", "transformer"])
def test_offload_to_cpu_and_back(backend, component):
    assert backend.offload_to_cpu(component).device == "cpu"
    assert {c.name: c.device for c in backend.memory_report().components}[component] == "cpu"
    assert backend.load_to_device(component).device == ("cuda:0" if CUDA else "cpu")


@pytest.mark.parametrize("component", ["text_encoder", "vae"])
def test_a_component_moves_by_to(backend, component):
    getattr(backend, component).to("cpu")
    assert getattr(backend, component).device == "cpu"
    getattr(backend, component).to("device")


def test_memory_monitoring(backend):
    report = backend.memory_report()
    here = next(p for p in report.processes if p.pid == os.getpid())
    print(f"Allocated: {here.allocated_bytes / 1024**3:.2f} GB")
    print(f"Reserved: {here.reserved_bytes / 1024**3:.2f} GB")
    print(f"Max allocated: {here.max_allocated_bytes / 1024**3:.2f} GB")
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert here.rss_bytes == pytest.approx(rss, rel=0.2)
    assert here.peak_rss_bytes >= here.rss_bytes
    if CUDA:
        assert here.max_allocated_bytes > 0


def test_flexcache(backend):
    flexcache_manager = DiffusionBackend.flexcache_manager
    assert flexcache_manager is None


def test_attention_backend(backend, capsys):
    attn_backend = DiffusionBackend.attn_backend
    print(f"Using attention backend: {attn_backend.type}")
    assert capsys.readouterr().out.split()[-1] in ("sdpa", "flash_attn")


def test_two_stage_model(two_experts):
    stage1_model = DiffusionBackend.model_pool[0]
    stage2_model = DiffusionBackend.model_pool[1]
    assert (stage1_model.name, stage1_model.expert) == ("transformer", "high_noise")
    assert (stage2_model.name, stage2_model.expert) == ("transformer_2", "low_noise")
    assert stage1_model.describe().parameter_count == stage2_model.describe().parameter_count


@pytest.mark.usefixtures("nobody")
class TestErrors:
    def test_invalid_configuration(self, args):
        args.infer.attn_type = "sage2"
        with pytest.raises(ValueError, match=r"infer\.attn_type='sage2'.*sage"):
            DiffusionBackend(args)

    def test_checkpoint_not_set(self, args):
        args.models.ckpt_dir = None
        with pytest.raises(ValueError, match=r"models\.ckpt_dir"):
            DiffusionBackend(args)

    def test_checkpoint_not_found(self, args):
        args.models.ckpt_dir = "/path/to/checkpoint"
        with pytest.raises(FileNotFoundError, match="/path/to/checkpoint"):
            DiffusionBackend(args)

    @pytest.mark.skipif(CUDA, reason="the kernel may run here")
    def test_a_kernel_that_cannot_run(self, args):
        args.infer.attn_type = "sage"
        with pytest.raises(ValueError, match="sage"):
            DiffusionBackend(args)

    def test_the_next_one_works(self, args):
        backend = DiffusionBackend(args)
        assert backend.state == BackendState.Initialized
        backend.terminate()


def test_complete_example(args, process_group, nobody):
    args.models.ckpt_dir = CHECKPOINT
    args.infer.attn_type = "sage" if CUDA else "auto"
    args.infer.diffusion.low_mem_level = 2

    backend = DiffusionBackend(args)
    assert backend.state == BackendState.Initialized

    print(f"Loaded {len(backend.model_pool)} models")
    assert backend.text_encoder is not None
    assert backend.vae is not None
    assert backend.scheduler is not None
    assert backend.generator is not None

    backend.state = BackendState.Running
    task = backend.submit(prompt=PROMPT, num_inference_steps=2)
    while not task.ended:
        backend.step()
    assert backend.result(task)

    backend.state = BackendState.Terminated
    assert DiffusionBackend.state == BackendState.Terminated
    dist.destroy_process_group()
