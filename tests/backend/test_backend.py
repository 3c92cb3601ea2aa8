"""What the backend promises beyond its page's examples."""

import hashlib
import logging

import pytest
import torch
from diffusers import WanPipeline
from diffusers.models import WanTransformer3DModel

from chitu_diffusion.backend import (
    BackendState,
    DiffusionBackend,
    chitu_generate,
    chitu_init,
    chitu_is_terminated,
    chitu_start,
    chitu_terminate,
)
from chitu_diffusion.client import Client
from chitu_diffusion.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from chitu_diffusion.launch import embedded
from tests.backend.conftest import PROMPT, run_by_hand, settings
from tests.e2e.conftest import ROOT

TINY = ROOT / "assets" / "tiny-wan"
TINY22 = ROOT / "assets" / "tiny-wan2.2"


@pytest.fixture(scope="module")
def pipe():
    return WanPipeline.from_pretrained(str(TINY), torch_dtype=torch.float32)


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class TestComponents:
    def test_a_text_is_embedded_as_diffusers_does(self, backend, pipe):
        expected, _ = pipe.encode_prompt(
            PROMPT, do_classifier_free_guidance=False, max_sequence_length=64
        )
        embeds = backend.text_encoder(PROMPT)
        assert embeds.shape == expected.shape == (1, 64, 64)
        torch.testing.assert_close(embeds, expected, rtol=1e-5, atol=1e-5)
        both = backend.text_encoder([PROMPT, ""])
        assert torch.equal(both[0], embeds[0])
        assert both[1, 0].any()
        assert not both[1, 1:].any()

    def test_token_ids_are_embedded_as_transformers_does(self, backend, pipe):
        tokens = pipe.tokenizer([PROMPT, "a blue square"], padding=True, return_tensors="pt")
        expected = pipe.text_encoder(**tokens).last_hidden_state
        embeds = backend.text_encoder(**tokens)
        mask = tokens.attention_mask.unsqueeze(-1)
        torch.testing.assert_close(embeds, expected * mask, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({}, "text"),
            ({"text": "a", "input_ids": torch.ones(1, 2, dtype=torch.long)}, "text"),
            ({"input_ids": torch.ones(1, 1, 2, dtype=torch.long)}, "input_ids"),
            ({"input_ids": torch.full((1, 2), 10**6)}, "inputs"),
            (
                {"input_ids": torch.ones(1, 2, dtype=torch.long), "attention_mask": torch.ones(1)},
                "attention_mask",
            ),
            (
                {
                    "input_ids": torch.ones(1, 2, dtype=torch.long),
                    "attention_mask": torch.tensor([[0, 1]]),
                },
                "attention_mask",
            ),
        ],
    )
    def test_a_wrong_call_of_the_encoder_is_named(self, backend, given, field):
        with pytest.raises(InvalidRequestError, match=field):
            backend.text_encoder(**given)

    def test_a_forward_is_that_of_diffusers(self, backend, pipe):
        latents, text = seeded(2, 16, 3, 8, 8), backend.text_encoder([PROMPT, "a blue square"])
        with torch.no_grad():
            expected = pipe.transformer(
                latents, torch.tensor([750.0, 10.0]), text, return_dict=False
            )[0]
        velocity = backend.model_pool[0](latents, torch.tensor([750.0, 10.0]), text)
        torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-4)

    def test_experts_are_in_order(self, two_experts):
        latents, text = seeded(1, 16, 3, 8, 8), two_experts.text_encoder(PROMPT)
        for model, folder in zip(
            two_experts.model_pool, ("transformer", "transformer_2"), strict=True
        ):
            reference = WanTransformer3DModel.from_pretrained(str(TINY22), subfolder=folder)
            with torch.no_grad():
                expected = reference(latents, torch.tensor([900.0]), text, return_dict=False)[0]
            velocity = model(latents, 900.0, text)
            torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-4)

    def test_latents_are_decoded_as_diffusers_does(self, backend, pipe):
        latents = seeded(2, 16, 2, 8, 8)
        config = pipe.vae.config
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        with torch.no_grad():
            expected = pipe.vae.decode(latents * std + mean, return_dict=False)[0]
        video = backend.vae.decode(latents)
        torch.testing.assert_close(video, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("shape", [(16, 2, 8, 8), (0, 16, 2, 8, 8), (1, 15, 2, 8, 8)])
    def test_latents_of_the_wrong_shape_are_refused(self, backend, shape):
        with pytest.raises(InvalidRequestError, match="latent"):
            backend.vae.decode(torch.zeros(shape))

    def test_a_component_describes_itself(self, backend):
        assert "on cpu" in repr(backend.model_pool[0])
        assert "text_encoder of tiny-wan" in repr(backend.text_encoder)

    def test_an_unknown_component_is_named_with_the_known_ones(self, backend):
        with pytest.raises(NotFoundError, match="'dit': there are text_encoder, transformer, vae"):
            backend.offload_to_cpu("dit")
        with pytest.raises(InvalidRequestError, match="target"):
            backend.vae.to("cuda:7")

    def test_work_goes_on_after_moves(self, backend):
        before = run_by_hand(backend, prompt=PROMPT, seed=3, num_inference_steps=2)
        for name in ("text_encoder", "transformer", "vae"):
            backend.offload_to_cpu(name)
        assert run_by_hand(backend, prompt=PROMPT, seed=3, num_inference_steps=2) == before


class TestTasks:
    def test_a_loop_by_hand_gives_what_generate_gives(self, backend, tmp_path):
        data = run_by_hand(backend, prompt=PROMPT, seed=7)
        with embedded(settings(tmp_path)) as address, Client(address) as client:
            served = client.generate(PROMPT, seed=7)
        assert hashlib.sha256(data).hexdigest() == served.video.sha256

    def test_a_step_is_a_stage_or_a_slice(self, backend):
        task = backend.submit(prompt=PROMPT, num_inference_steps=8)
        seen = []
        while not task.ended:
            assert backend.step() == task.id
            seen.append((task.stage, task.work.next_step))
        assert seen == [(2, 0), (2, 6), (3, 8), (3, 0)]
        assert backend.step() is None

    def test_a_task_can_be_given_by_id_and_only_once_at_a_time(self, backend):
        task = backend.submit(prompt=PROMPT, num_inference_steps=1)
        assert backend.scheduler.queue_length == 1
        for _ in range(3):
            backend.generator.generate_step(task.id)
        assert backend.result(task)
        assert backend.scheduler.schedule() is None
        with pytest.raises(PreconditionError, match="DONE"):
            backend.generator.generate_step(task)
        with pytest.raises(NotFoundError, match="nope"):
            backend.generator.generate_step("nope")

    def test_a_wrong_request_is_refused_before_it_queues(self, backend):
        with pytest.raises(InvalidRequestError, match="num_frames"):
            backend.submit(prompt=PROMPT, num_frames=8)
        assert backend.scheduler.queue_length == 0

    def test_a_result_that_is_not_there(self, backend):
        task = backend.submit(prompt=PROMPT, num_inference_steps=1)
        with pytest.raises(PreconditionError, match="no result"):
            backend.result(task)
        while backend.step():
            pass

    def test_clients_are_told_who_drives(self, backend):
        with Client(backend.address) as client, pytest.raises(PreconditionError, match="drive"):
            client.generate(PROMPT)


@pytest.fixture
def fresh(tmp_path, nobody):
    """Configuration for a test that makes its own backend."""
    return settings(tmp_path)


class TestState:
    def test_the_whole_way_by_functions(self, fresh):
        backend = chitu_init(fresh)
        assert DiffusionBackend.state is BackendState.Initialized
        assert not chitu_is_terminated()
        with pytest.raises(PreconditionError, match="Initialized"):
            backend.submit(prompt=PROMPT)
        chitu_start()
        chitu_start()
        task = backend.submit(prompt=PROMPT, num_inference_steps=1)
        while not task.ended:
            assert chitu_generate() == task.id
        assert chitu_generate() is None
        chitu_terminate()
        chitu_terminate()
        assert chitu_is_terminated()
        assert DiffusionBackend.model_pool == []
        assert DiffusionBackend.vae is None

    def test_forbidden_transitions(self, fresh):
        backend = DiffusionBackend(fresh)
        with pytest.raises(PreconditionError, match="no way back"):
            backend.state = BackendState.Uninitialized
        DiffusionBackend.state = BackendState.Running
        with pytest.raises(PreconditionError, match="no way back"):
            DiffusionBackend.state = BackendState.Initialized
        with pytest.raises(ValueError, match="must be a BackendState"):
            backend.state = 2
        vae = backend.vae
        backend.state = BackendState.Terminated
        backend.state = BackendState.Terminated
        with pytest.raises(PreconditionError, match="cannot be started"):
            backend.state = BackendState.Running
        with pytest.raises(UnavailableError, match="terminated"):
            vae.decode(torch.zeros(1, 16, 1, 8, 8))

    def test_a_second_live_backend_is_refused(self, fresh):
        DiffusionBackend(fresh)
        with pytest.raises(RuntimeError, match="Initialized in this process"):
            DiffusionBackend(fresh)
        chitu_terminate()
        assert DiffusionBackend(fresh).state is BackendState.Initialized

    def test_parts_cannot_be_replaced(self, fresh):
        backend = DiffusionBackend(fresh)
        with pytest.raises(AttributeError, match="vae"):
            backend.vae = None
        with pytest.raises(AttributeError, match="vae"):
            DiffusionBackend.vae = None

    @pytest.mark.parametrize("cancel", [True, False])
    def test_terminating_drains_or_cancels(self, fresh, cancel):
        backend = DiffusionBackend(fresh)
        backend.start()
        tasks = [backend.submit(prompt=PROMPT, num_inference_steps=1) for _ in range(2)]
        backend.step()
        backend.terminate(cancel=cancel)
        assert [task.ended for task in tasks] == [True, True]
        assert [task.result is None for task in tasks] == [cancel, cancel]
        assert all(task.cancel_reason == ("shutdown" if cancel else None) for task in tasks)

    def test_a_driven_backend_serves_clients(self, fresh):
        backend = DiffusionBackend(fresh)
        backend.start()
        backend.drive()
        with Client(backend.address) as client:
            result = client.generate(PROMPT, seed=7, num_inference_steps=2)
        assert result.data == backend.result(backend.task(result.task_id))

    def test_logging_level(self, fresh):
        try:
            DiffusionBackend(fresh, logging_level="ERROR")
            assert logging.getLogger("orchestrator").level == logging.ERROR
        finally:
            for name in ("chitu_diffusion", "orchestrator", "services"):
                logging.getLogger(name).setLevel(logging.NOTSET)
        with pytest.raises(ValueError, match="LOUD"):
            DiffusionBackend(fresh, logging_level="LOUD")

    def test_without_a_backend(self, nobody):
        with pytest.raises(PreconditionError):
            DiffusionBackend.get_cp_size()
