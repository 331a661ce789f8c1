"""The learner and its real process: what it is told, what it leaves on the disk, and what is left when it dies."""

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, StepRefused, StepStopped, WeightForm
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.types import ScoreRequest, TrainingSequence
from support.rank_processes import FastLauncher
from support.tiny_models import save_tiny_model
from support.trainers import InProcessLearner, batch, options

CPU = torch.device("cpu")

# Starting a process takes seconds, so the tests share one and leave it usable.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def in_process(tiny_model: Path) -> InProcessLearner:
    """The same in this process, to compare with."""
    return InProcessLearner(load_decoder(tiny_model, torch.float32, CPU), options())


@pytest.fixture(scope="module")
def sequences(in_process: InProcessLearner) -> list[TrainingSequence]:
    return batch(in_process, count=6)


@pytest.fixture(scope="module")
def large(in_process: InProcessLearner) -> list[TrainingSequence]:
    """A batch that takes seconds."""
    return batch(in_process, count=100) * 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_model: Path) -> AsyncIterator[LocalLearner]:
    learner = LocalLearner(options(model=tiny_model), launcher=FastLauncher())
    await learner.start()
    yield learner
    await learner.close()


@pytest_asyncio.fixture(loop_scope="module")
async def learner(running: LocalLearner) -> LocalLearner:
    await running.reset()
    return running


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


async def written(learner: LocalLearner, folder: Path) -> bytes:
    folder.mkdir()
    await learner.write_policy(folder)
    return weights(folder)


async def under_way(learner: LocalLearner, sequences: list[TrainingSequence]) -> "asyncio.Task[Any]":
    """A step that the process has begun."""
    assert learner.process.pid is not None
    stat = Path(f"/proc/{learner.process.pid}/stat")

    def used() -> int:
        fields = stat.read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = used()
    task = asyncio.create_task(learner.step(sequences))
    async with asyncio.timeout(300):
        while used() < before + 20:
            await asyncio.sleep(0.01)
    assert not task.done()
    return task


async def test_a_step_in_the_process_is_the_step_that_it_would_be_here(
    learner: LocalLearner, in_process: InProcessLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    fresh = await written(learner, tmp_path / "fresh")
    result = await learner.step(sequences)
    await in_process.transaction.reset()
    expected = await in_process.transaction.step(sequences)
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    assert result.kl_old == pytest.approx(expected.kl_old, rel=1e-2)
    assert (result.tokens, result.response_tokens) == (expected.tokens, expected.response_tokens)
    assert await written(learner, tmp_path / "stepped") != fresh
    await learner.undo()
    assert await written(learner, tmp_path / "undone") == fresh
    assert learner.process.weight_bytes > 0


async def test_lines_on_one_process_learn_as_if_each_were_alone(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    alone: dict[str, bytes] = {}
    batches = {"anna": sequences[:3], "ben": sequences[3:]}
    for name, batch_of_one in batches.items():
        await learner.reset()
        for _ in range(3):
            await learner.step(batch_of_one)
        alone[name] = await written(learner, tmp_path / name)
    assert alone["anna"] != alone["ben"]
    lines = {name: learner.for_line(name) for name in batches}
    for line in lines.values():
        await line.reset()
    for _ in range(2):
        for name, line in lines.items():
            await line.step(batches[name])
    # A line that makes room goes on from what it saved. A step that is taken back is not in it.
    (tmp_path / "saved").mkdir()
    await lines["anna"].save(tmp_path / "saved")
    await learner.drop_line("anna")
    with pytest.raises(EngineUnavailable, match="loads the line again"):
        await lines["anna"].step(batches["anna"])
    await lines["ben"].step(batches["anna"])
    await lines["ben"].undo()
    await lines["anna"].load(tmp_path / "saved")
    for name, line in lines.items():
        await line.step(batches[name])
        (tmp_path / f"line-{name}").mkdir()
        await line.write_policy(tmp_path / f"line-{name}")
        assert weights(tmp_path / f"line-{name}") == alone[name]
        await learner.drop_line(name)


async def test_what_it_writes_is_loaded_by_peft(
    learner: LocalLearner, tiny_model: Path, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    for _ in range(3):
        await learner.step(sequences)
    await written(learner, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([list(range(20))])
    plain = base(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    assert (adapted - plain).abs().max() > 1e-3


async def test_it_goes_on_exactly_from_what_it_saved(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    await learner.step(sequences)
    (tmp_path / "saved").mkdir()
    await learner.save(tmp_path / "saved")
    await learner.step(sequences)
    whole = await written(learner, tmp_path / "whole")
    await learner.reset()
    await learner.load(tmp_path / "saved")
    await learner.step(sequences)
    assert await written(learner, tmp_path / "resumed") == whole


async def test_what_is_refused_is_a_sentence_and_the_process_stays(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    pid = learner.process.pid
    with pytest.raises(StepRefused, match="no step"):
        await learner.undo()
    with pytest.raises(StepRefused, match="nowhere"):
        await learner.load(tmp_path / "nowhere")
    # What is in the way of writing: a folder that is a file.
    (tmp_path / "file").write_text("")
    with pytest.raises(StepRefused):
        await learner.write_policy(tmp_path / "file" / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors", "learner.optimizer", "learner.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(StepRefused):
        await learner.load(tmp_path)
    assert learner.process.pid == pid
    await learner.step(sequences)


@pytest.mark.more
@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) == 19, reason="nothing stands behind the last")
async def test_it_stands_behind_the_sampler(learner: LocalLearner, tiny_model: Path) -> None:
    sampler = LocalSampler(
        WorkerOptions(tiny_model, "cpu", "float32", 4, None, 0.05, 2, 4), max_queue=4, launcher=FastLauncher()
    )
    await sampler.start()
    try:
        assert learner.process.pid is not None
        assert sampler.worker_pid is not None
        ours, theirs = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (learner.process.pid, sampler.worker_pid))
        assert ours > theirs
    finally:
        await sampler.close()


async def test_killed_during_a_step_it_is_started_again_by_the_next_call(
    learner: LocalLearner, sequences: list[TrainingSequence], large: list[TrainingSequence], tmp_path: Path
) -> None:
    await learner.step(sequences)
    (tmp_path / "saved").mkdir()
    await learner.save(tmp_path / "saved")
    before = weights(tmp_path / "saved")
    task = await under_way(learner, large)
    pid = learner.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"ended while it was working.*SIGKILL"):
        await task
    await learner.load(tmp_path / "saved")
    assert learner.process.pid != pid
    assert await written(learner, tmp_path / "again") == before
    await learner.step(sequences)


@pytest.mark.more
async def test_killed_while_it_has_nothing_to_do_the_next_call_says_so(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    """It must not be asked of a fresh process as if nothing had happened: that has nothing in its memory."""
    await learner.step(sequences)
    pid = learner.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        await learner.save(tmp_path)
    assert not (tmp_path / "adapter_model.safetensors").exists()
    await learner.reset()


@pytest.mark.more
async def test_a_call_that_is_given_up_does_not_answer_the_next_one(
    learner: LocalLearner, sequences: list[TrainingSequence], large: list[TrainingSequence], tmp_path: Path
) -> None:
    task = await under_way(learner, large)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await learner.reset()
    result = await learner.step(sequences)
    assert result.response_tokens == sum(len(s.spans[0].advantages) for s in sequences)
    with pytest.raises(StepRefused):
        await learner.load(tmp_path)


@pytest.mark.more
async def test_calls_at_the_same_time_are_answered_each_with_its_own(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    answers = await asyncio.gather(
        learner.step(sequences[:2]),
        learner.write_policy(tmp_path / "adapter"),
        learner.step(sequences[2:]),
        learner.load(tmp_path / "nowhere"),
        return_exceptions=True,
    )
    first, policy, second, refused = answers
    assert policy == PolicyRef(WeightForm.PEFT, tmp_path / "adapter")
    assert isinstance(refused, StepRefused)
    assert (
        [answer.response_tokens for answer in (first, second)]
        == [  # type: ignore[union-attr]
            sum(len(s.spans[0].advantages) for s in part) for part in (sequences[:2], sequences[2:])
        ]
    )


@pytest.mark.more
async def test_a_model_that_cannot_be_loaded_is_a_sentence_and_can_be_mended(
    tiny_model: Path, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    learner = LocalLearner(options(model=tmp_path / "model"), launcher=FastLauncher())
    try:
        with pytest.raises(EngineUnavailable, match="could not load the model"):
            await learner.start()
        shutil.copytree(tiny_model, tmp_path / "model")
        async with asyncio.timeout(300):
            await learner.start()
            await learner.step(sequences)
    finally:
        await learner.close()


@pytest.mark.more
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "learner.optimizer"])
async def test_a_file_that_cannot_be_written_refuses_the_save_and_costs_neither_the_process_nor_the_step(
    learner: LocalLearner, sequences: list[TrainingSequence], tmp_path: Path, file: str
) -> None:
    """A limit on the size of files fails as a full disk does."""
    await learner.step(sequences)
    await learner.save(tmp_path)
    process = learner.process.pid
    assert process is not None
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, ((tmp_path / file).stat().st_size - 1, before[1]))
    with pytest.raises(StepRefused, match=f"{file}.*File too large"):
        await learner.save(tmp_path)
    resource.prlimit(process, resource.RLIMIT_FSIZE, before)
    assert learner.process.pid == process
    await learner.save(tmp_path)
    assert learner.steps == 1


@pytest.mark.more
async def test_all_weights_of_a_tied_model_stay_tied(sequences: list[TrainingSequence], tmp_path: Path) -> None:
    """With the base weights in the sampler's memory, as in a server: head and embedding are one weight to the end."""
    model = save_tiny_model(tmp_path / "model", tied=True)
    sampler = LocalSampler(
        WorkerOptions(model, "cpu", "float32", 4, None, 0.05, 2, 0), max_queue=8, launcher=FastLauncher()
    )
    learner = LocalLearner(
        options(model=model, rank=0, learning_rate=1e-2, max_kl=100), sampler.shared_weights, FastLauncher()
    )
    try:
        await sampler.start()
        assert (sampler.shared_weights() is not None) == hasattr(os, "memfd_create")
        for _ in range(4):
            await learner.step(sequences)
        checkpoint = tmp_path / "checkpoint"
        checkpoint.mkdir()
        await learner.save(checkpoint)
        await sampler.publish(1, PolicyRef(WeightForm.MODEL, checkpoint))
        learned, base = await learner.process.score(sequences), await learner.process.score(sequences, base=True)
        served = [await sampler.score(ScoreRequest(s.ids, len(s.ids) - s.spans[0].start, version=1)) for s in sequences]
    finally:
        await learner.close()
        await sampler.close()
    stored = load_file(checkpoint / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert not torch.equal(stored["model.embed_tokens.weight"], load_decoder(model, torch.float32, CPU).embed)
    assert learner.process.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    reopened = InProcessLearner(load_decoder(checkpoint, torch.float32, CPU), options()).trainer.score(sequences)
    transformer = AutoModelForCausalLM.from_pretrained(checkpoint)
    for number, sequence in enumerate(sequences):
        start = sequence.spans[0].start
        logprobs = transformer(torch.tensor([sequence.ids])).logits[0, start - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(sequence.ids[start:])[:, None])[:, 0].tolist()
        assert max(abs(a - b) for a, b in zip(base[number][0], expected, strict=True)) > 0.01
        for found in (learned[number][0], served[number].logprobs, reopened[number][0]):
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.more
async def test_a_step_that_is_stopped_ends_early_and_leaves_everything_as_it_was(
    learner: LocalLearner, sequences: list[TrainingSequence], large: list[TrainingSequence], tmp_path: Path
) -> None:
    await learner.step(sequences)
    learner.stop_step()  # there is no step to stop
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
    await learner.save(before)
    process = learner.process.pid
    stepping = asyncio.create_task(learner.step(large))
    await asyncio.sleep(0.3)
    assert not stepping.done()
    learner.stop_step()
    with pytest.raises(StepStopped):
        await stepping
    await learner.save(after)
    assert learner.process.pid == process
    for path in before.iterdir():
        assert path.read_bytes() == (after / path.name).read_bytes(), path.name
    assert (await learner.step(sequences)).tokens > 0
