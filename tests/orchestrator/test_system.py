"""The orchestrator end to end, with stand-ins for the models."""

import asyncio
import os
import time

import grpc
import pytest

from chitu_diffusion import errors
from chitu_diffusion.v1 import (
    backend_pb2,
    backend_pb2_grpc,
    component_pb2,
    generation_pb2_grpc,
)
from chitu_diffusion.v1 import generation_pb2 as pb
from tests.orchestrator.stand_ins import Script, latents_of, video_of


def kinds(events) -> list[str]:
    return [e.WhichOneof("event") for e in events]


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the stand-ins set no event
            await asyncio.sleep(0.005)


async def test_a_prompt_becomes_a_file(start_system):
    system = await start_system()
    events = []
    result = await system.client.generate(
        "a cat", seed=3, num_inference_steps=2, on_event=events.append
    )
    assert result.data == video_of(latents_of(3).data)
    assert kinds(events) == [
        "queued",
        "encoding",
        "denoising",
        "denoising",
        "denoising",
        "decoding",
        "muxing",
        "done",
    ]
    assert [e.sequence for e in events] == list(range(1, 9))
    assert [e.denoising.step for e in events[2:5]] == [0, 1, 2]
    assert "text a cat" in system.script.log


async def test_the_report_has_the_effective_parameters(start_system):
    system = await start_system()
    result = await system.client.generate("a cat", num_inference_steps=2, seed=0)
    report = result.report
    assert report.params.seed == 0
    assert report.params.num_frames == 9
    assert report.params.guidance_scale == 4.0
    assert report.params.attn_type == "sdpa"
    assert [s.stage for s in report.stages] == [
        pb.STAGE_ENCODE,
        pb.STAGE_DENOISE,
        pb.STAGE_DECODE,
    ]
    assert report.stages[1].service.peak_memory_bytes == 7
    assert len(report.steps) == 2
    assert report.prompt.token_count == 600
    assert any("600 tokens" in w for w in report.warnings)
    assert report.run_seconds > 0


async def test_a_missing_seed_is_drawn_and_reported(start_system):
    system = await start_system()
    seeds = [(await system.client.generate("x")).report.params.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    again = await system.client.generate("x", seed=seeds[0])
    assert again.data == video_of(latents_of(seeds[0]).data)


async def test_guidance_of_one_or_less_encodes_no_negative_prompt(start_system):
    system = await start_system()
    result = await system.client.generate(
        "a", negative_prompt="b", guidance_scale=1.0, seed=1, num_inference_steps=1
    )
    assert "text b" not in system.script.log
    assert "denoise+ 1 prompt_embeds" in system.script.log
    assert any("no effect" in w for w in result.report.warnings)
    await system.client.generate("a", negative_prompt="b", guidance_scale=1.5, seed=2)
    assert "text b" in system.script.log
    assert "denoise+ 2 prompt_embeds/negative_prompt_embeds" in system.script.log


async def test_stages_of_different_tasks_overlap(start_system):
    script = Script(encode_s=0.05, step_s=0.05, decode_s=0.05)
    system = await start_system(script=script)
    tasks = [await system.client.submit("x", seed=i, num_inference_steps=1) for i in range(6)]
    for task in tasks:
        [event async for event in system.client.watch(task.id)]
    running = {"encode": 0, "denoise": 0, "decode": 0}
    overlap = 0
    for line in script.log:
        stage = line.split()[0]
        if stage[:-1] in running:
            running[stage[:-1]] += 1 if stage[-1] == "+" else -1
            assert running[stage[:-1]] <= 1
            overlap = max(overlap, sum(running.values()))
    assert overlap == 3


async def test_tasks_are_denoised_in_order_of_acceptance(start_system):
    system = await start_system(script=Script(step_s=0.01))
    tasks = [await system.client.submit("x", seed=i, num_inference_steps=1) for i in range(8)]
    for task in tasks:
        [event async for event in system.client.watch(task.id)]
    order = [line.split()[1] for line in system.script.log if line.startswith("denoise+")]
    assert order == [str(i) for i in range(8)]


async def test_slices_continue_from_the_state_that_the_pool_holds(start_system):
    system = await start_system("orchestrator.slice_steps=2")
    result = await system.client.generate("x", seed=1, num_inference_steps=5)
    slices = system.script.slices
    assert [(s.first_step, s.end_step) for s in slices] == [(0, 2), (2, 4), (4, 5)]
    assert [s.keep_state for s in slices] == [True, True, False]
    assert [s.return_latents for s in slices] == [False, False, True]
    assert len(result.report.steps) == 5
    denoise = result.report.stages[1]
    assert denoise.service.seconds == pytest.approx(3.0)


async def test_a_failed_task_says_why_and_the_next_one_runs(start_system):
    system = await start_system(script=Script(fail_seeds={13}))
    with pytest.raises(errors.ComponentError, match="seed 13 is cursed"):
        await system.client.generate("x", seed=13)
    failed = next(iter([t async for t in system.client.tasks()]))
    assert failed.state == pb.TASK_STATE_FAILED
    task = await system.client.task(failed.id)
    assert task.error.stage == pb.STAGE_DENOISE
    assert task.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert not task.error.retryable
    assert (await system.client.generate("x", seed=1)).data


async def test_a_host_that_is_gone_fails_the_task_as_retryable(start_system):
    system = await start_system()
    await system.servers["vae"].stop(0)
    with pytest.raises(errors.UnavailableError):
        await system.client.generate("x")
    task = next(iter([t async for t in system.client.tasks()]))
    assert task.error.retryable
    assert task.error.stage == pb.STAGE_DECODE


async def test_a_file_damaged_on_the_way_is_no_result(start_system, socket_dir):
    system = await start_system(script=Script(damage_video=True))
    with pytest.raises(errors.DataLossError):
        await system.client.generate("x")
    assert list((socket_dir / "results").iterdir()) == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (pb.GenerationParams(num_frames=16), "params.num_frames"),
        (pb.GenerationParams(height=72), "params.height"),
        (pb.GenerationParams(num_inference_steps=0), "params.num_inference_steps"),
        (pb.GenerationParams(num_inference_steps=2_000_000), "params.num_inference_steps"),
        (pb.GenerationParams(guidance_scale=float("nan")), "params.guidance_scale"),
        (pb.GenerationParams(solver="ddpm"), "params.solver"),
        (pb.GenerationParams(fps=0), "params.fps"),
        (pb.GenerationParams(seed=-1), "params.seed"),
        (pb.GenerationParams(boundary_ratio=0.5), "params.boundary_ratio"),
        (pb.GenerationParams(prompt="x" * 1_000_000), "params.prompt"),
        (pb.GenerationParams(preview_interval=1), "params.preview_interval"),
        (pb.GenerationParams(model="sora"), "params.model"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_bad_input_is_refused_before_a_task_exists(start_system, params, field):
    system = await start_system()
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for call in (
            stub.SubmitTask(pb.SubmitTaskRequest(params=params)),
            stub.Generate(pb.GenerateRequest(params=params)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = errors.from_rpc_error(caught.value)
            assert [v.field for v in error.violations] == [field]
    assert [t async for t in system.client.tasks()] == []


@pytest.mark.parametrize(
    ("path", "field"),
    [(b"\x0a\x04\x0a\x02\xff\xfe", "params.prompt"), (b"\x12\x01\xff", "request_id")],
)
async def test_text_that_is_not_utf8_is_refused_by_name(start_system, path, field):
    system = await start_system()
    async with grpc.aio.insecure_channel(system.address) as channel:
        for method in ("SubmitTask", "Generate"):
            make = channel.unary_unary if method == "SubmitTask" else channel.unary_stream
            call = make(f"/chitu_diffusion.v1.GenerationService/{method}")(path)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if method == "SubmitTask" else call.read())
            error = errors.from_rpc_error(caught.value)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [v.field for v in error.violations] == [field]


async def test_cancelling_a_running_task_stops_the_steps(start_system):
    system = await start_system(script=Script(step_s=0.02))
    task = await system.client.submit("x", seed=1, num_inference_steps=500)
    await until(lambda: system.script.log.count("step 1") >= 3)
    await system.client.cancel(task.id)
    events = [e async for e in system.client.watch(task.id)]
    assert kinds(events)[-1] == "cancelled"
    assert events[-1].cancelled.reason == "client"
    steps = system.script.log.count("step 1")
    await asyncio.sleep(0.2)
    assert system.script.log.count("step 1") <= steps + 2
    assert (await system.client.generate("next", num_inference_steps=1)).data


@pytest.mark.parametrize("stage", ["encode", "denoise", "decode"])
async def test_a_task_is_cancelled_in_every_stage(start_system, socket_dir, stage):
    system = await start_system(script=Script(encode_s=0.3, step_s=0.1, decode_s=0.3))
    task = await system.client.submit("x", seed=1, num_inference_steps=3)
    await until(lambda: any(line.startswith(f"{stage}+") for line in system.script.log))
    await system.client.cancel(task.id)
    events = [e async for e in system.client.watch(task.id)]
    assert kinds(events)[-1] == "cancelled"
    await asyncio.sleep(0.5)
    assert not any(line.startswith(f"{stage}-") for line in system.script.log)
    assert not (socket_dir / "results").exists() or not list((socket_dir / "results").iterdir())


async def test_a_deadline_that_passes_cancels_the_task(start_system):
    system = await start_system(script=Script(step_s=0.05))
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        params = pb.GenerationParams(seed=1, num_inference_steps=100)
        call = stub.Generate(pb.GenerateRequest(params=params), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in call]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    task = next(iter([t async for t in system.client.tasks()]))
    assert [e async for e in system.client.watch(task.id)][-1].HasField("cancelled")
    steps = system.script.log.count("step 1")
    await asyncio.sleep(0.3)
    assert system.script.log.count("step 1") <= steps + 2 < 50


async def test_a_queued_task_that_is_cancelled_never_starts(start_system):
    system = await start_system(script=Script(encode_s=0.2))
    first = await system.client.submit("first", num_inference_steps=1)
    second = await system.client.submit("second", num_inference_steps=1)
    assert (await system.client.cancel(second.id)).state == pb.TASK_STATE_CANCELLED
    [e async for e in system.client.watch(first.id)]
    assert "text second" not in system.script.log


async def test_a_caller_that_leaves_cancels_unless_detached(start_system):
    system = await start_system(script=Script(step_s=0.02))
    for detach, state in ((False, pb.TASK_STATE_CANCELLED), (True, pb.TASK_STATE_DONE)):
        waiting = asyncio.create_task(
            system.client.generate("x", seed=9, num_inference_steps=20, detach=detach)
        )
        before = system.script.log.count("step 9")
        await until(lambda before=before: system.script.log.count("step 9") >= before + 2)
        waiting.cancel()
        task = next(iter([t async for t in system.client.tasks()]))
        last = [e async for e in system.client.watch(task.id)][-1]
        assert (await system.client.task(task.id)).state == state
        assert last.WhichOneof("event") == ("done" if detach else "cancelled")


async def test_a_final_state_never_changes(start_system):
    system = await start_system(script=Script(step_s=0.001))
    for round_ in range(30):
        task = await system.client.submit("x", seed=round_, num_inference_steps=3)
        await asyncio.sleep(0.001 * (round_ % 15))
        await system.client.cancel(task.id)
        await system.client.cancel(task.id)
        events = [e async for e in system.client.watch(task.id)]
        ends = [k for k in kinds(events) if k in ("done", "failed", "cancelled")]
        assert len(ends) == 1
        final = await system.client.task(task.id)
        assert (final.state == pb.TASK_STATE_DONE) == final.HasField("result") == (ends == ["done"])
        assert (await system.client.cancel(task.id)).state == final.state


async def test_a_request_id_gives_one_task(start_system):
    system = await start_system()
    first = await system.client.submit("x", request_id="r1")
    again = await system.client.submit("x", request_id="r1")
    assert again.id == first.id
    assert len([t async for t in system.client.tasks()]) == 1
    with pytest.raises(errors.AlreadyExistsError, match="other parameters"):
        await system.client.submit("y", request_id="r1")
    with pytest.raises(errors.InvalidRequestError, match="1 to 128"):
        await system.client.submit("y", request_id="r" * 129)


async def test_a_full_queue_refuses_and_says_when_to_come_back(start_system):
    system = await start_system("orchestrator.max_queued_tasks=2", script=Script(encode_s=5))
    for _ in range(3):
        await system.client.submit("x")
    with pytest.raises(errors.QueueFullError) as caught:
        await system.client.submit("x")
    assert caught.value.retryable


async def test_waiting_tasks_are_told_their_place(start_system):
    system = await start_system(script=Script(encode_s=0.05))
    tasks = [await system.client.submit("x", num_inference_steps=1) for _ in range(4)]
    positions = []
    async for event in system.client.watch(tasks[3].id):
        if event.HasField("queued"):
            positions.append(event.queued.position)
    assert positions[0] > positions[-1] == 0
    assert positions == sorted(positions, reverse=True)


async def test_a_watcher_can_come_back_for_what_it_missed(start_system):
    system = await start_system()
    result = await system.client.generate("x", num_inference_steps=3)
    everything = [e async for e in system.client.watch(result.task_id)]
    for seen in range(len(everything) + 1):
        after = everything[seen - 1].sequence if seen else 0
        assert [e async for e in system.client.watch(result.task_id, after)] == everything[seen:]


async def test_watchers_are_limited_and_calls_still_answer(start_system):
    system = await start_system("orchestrator.max_watchers=5", script=Script(step_s=10))
    task = await system.client.submit("x")
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.WatchTask(pb.WatchTaskRequest(task_id=task.id)) for _ in range(5)]
        for call in calls:
            await call.read()
        with pytest.raises(errors.QueueFullError):
            [e async for e in system.client.watch(task.id)]
        began = time.monotonic()
        await system.client.task(task.id)
        await system.client.backend()
        assert time.monotonic() - began < 1
        for call in calls:
            call.cancel()


async def test_pages_list_every_task_once(start_system):
    system = await start_system()
    made = [(await system.client.submit("x", num_inference_steps=1)).id for _ in range(7)]
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        listed, token = [], ""
        while True:
            page = await stub.ListTasks(pb.ListTasksRequest(page_size=3, page_token=token))
            assert len(page.tasks) <= 3
            listed += [t.id for t in page.tasks]
            token = page.next_page_token
            if not token:
                break
        assert listed == made[::-1]
        for bad in (pb.ListTasksRequest(page_size=-1), pb.ListTasksRequest(page_token="?")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ListTasks(bad)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_download_resumes_at_any_offset(start_system):
    system = await start_system()
    result = await system.client.generate("x")
    size = len(result.data)
    for offset in (0, 1, size - 1, size):
        chunks = [c async for c in system.client.download(result.task_id, offset)]
        assert b"".join(chunks) == result.data[offset:]
    for offset in (-1, size + 1):
        with pytest.raises(errors.OffsetError):
            [c async for c in system.client.download(result.task_id, offset)]


async def test_a_deleted_task_is_gone_with_its_file(start_system, socket_dir):
    system = await start_system(script=Script(step_s=0.02))
    task = await system.client.submit("x", num_inference_steps=10)
    with pytest.raises(errors.PreconditionError, match="has not ended"):
        await system.client.delete(task.id)
    with pytest.raises(errors.PreconditionError, match="has no result"):
        [c async for c in system.client.download(task.id)]
    [e async for e in system.client.watch(task.id)]
    assert len(list((socket_dir / "results").iterdir())) == 1
    await system.client.delete(task.id)
    assert list((socket_dir / "results").iterdir()) == []
    for call in (system.client.task, system.client.delete, system.client.cancel):
        with pytest.raises(errors.NotFoundError):
            await call(task.id)


async def test_only_so_many_ended_tasks_are_kept(start_system, socket_dir):
    system = await start_system("orchestrator.max_finished_tasks=2")
    results = [await system.client.generate("x") for _ in range(4)]
    kept = [t.id async for t in system.client.tasks()]
    assert kept == [results[3].task_id, results[2].task_id]
    assert len(list((socket_dir / "results").iterdir())) == 2


async def test_the_backend_describes_itself(start_system):
    system = await start_system()
    backend = await system.client.backend()
    assert backend.state == backend_pb2.BACKEND_STATE_RUNNING
    assert [c.name for c in backend.components] == ["text_encoder", "transformer", "vae"]
    (model,) = await system.client.models()
    assert (model.name, model.default, model.two_experts) == ("tiny-wan", True, False)
    assert model.defaults.num_frames == 9
    assert not model.defaults.HasField("seed")
    await system.servers["vae"].stop(0)
    failed = [c for c in (await system.client.backend()).components if c.detail]
    assert [c.name for c in failed] == ["vae"]


async def test_a_terminated_backend_takes_no_task(start_system):
    system = await start_system(script=Script(step_s=0.02))
    task = await system.client.submit("x", num_inference_steps=10)
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = backend_pb2_grpc.BackendServiceStub(channel)
        for _ in range(2):
            response = await stub.TerminateBackend(backend_pb2.TerminateBackendRequest())
            assert response.state == backend_pb2.BACKEND_STATE_TERMINATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StartBackend(backend_pb2.StartBackendRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (await system.client.task(task.id)).state == pb.TASK_STATE_DONE
    with pytest.raises(errors.UnavailableError):
        await system.client.generate("x")


async def test_components_move_and_unknown_ones_are_not_found(start_system):
    system = await start_system()
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = backend_pb2_grpc.BackendServiceStub(channel)
        for target, device in (("cpu", "cpu"), ("device", "cuda:0")):
            request = backend_pb2.OffloadComponentRequest(name="vae", target=target)
            assert (await stub.OffloadComponent(request)).component.device == device
            where = {c.name: c.device for c in (await system.client.backend()).components}
            assert where == {"text_encoder": "cuda:0", "transformer": "cuda:0", "vae": device}
        with pytest.raises(grpc.aio.AioRpcError, match="text_encoder, transformer, vae") as caught:
            await stub.OffloadComponent(backend_pb2.OffloadComponentRequest(name="dit"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_backend_reports_the_pool(start_system):
    script = Script()
    script.pool.flexcache.params.strategy = "teacache"
    system = await start_system(script=script)
    backend = await system.client.backend()
    assert (backend.cfg_size, backend.cp_size, backend.attn_type) == (2, 6, "sdpa")
    assert backend.flexcache.params.strategy == "teacache"
    await system.servers["dit"].stop(0)
    backend = await system.client.backend()
    assert (backend.cfg_size, backend.cp_size, backend.attn_type) == (0, 0, "")
    assert not backend.HasField("flexcache")


async def test_memory_is_counted_once_for_each_process(start_system):
    def entry(process, pid, **counts):
        return component_pb2.ProcessMemory(process=process, host="a", pid=pid, **counts)

    system = await start_system(
        script=Script(
            memory={
                "text_encoder": [entry("encoder", 1, rss_bytes=5)],
                "transformer": [entry(f"dit rank {n}", 2 + n, reserved_bytes=9) for n in (0, 1)],
                "vae": [entry("vae", 2, rss_bytes=7)],
            }
        )
    )
    memory = {m.process: m for m in (await system.client.backend()).memory}
    assert list(memory) == ["orchestrator", "encoder", "dit rank 0, vae", "dit rank 1"]
    assert memory["dit rank 0, vae"].reserved_bytes == 9
    assert memory["orchestrator"].pid == os.getpid()
    assert memory["orchestrator"].rss_bytes > 0


async def test_a_host_that_stays_away_is_named(start_system):
    with pytest.raises(errors.DeadlineError, match=r"vae at unix:/nowhere.*connect_timeout_s=0\.3"):
        await start_system(
            "services.vae.address='unix:/nowhere'", "orchestrator.connect_timeout_s=0.3"
        )


@pytest.mark.parametrize("url", ["nosuch://bucket/x", "github://x"])
async def test_results_that_can_go_nowhere_stop_the_start(start_system, url):
    with pytest.raises(errors.ConfigError, match=f"orchestrator.results_url='{url}': ."):
        await start_system(f"orchestrator.results_url='{url}'")
