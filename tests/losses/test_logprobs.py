"""Log-probs in chunks equal those from all scores at once, in value and in gradient."""

import pytest
import torch

from openclaw_rl.losses.logprobs import chunked_logprobs

ROWS, WIDTH, VOCABULARY = 37, 16, 501


def problem(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return scale * torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randint(0, VOCABULARY, (ROWS,))


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000, None])
@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("several", [0, 1, 5])
def test_values_and_gradients_are_those_of_log_softmax_in_float64(
    chunk: int | None, scale: float, several: int
) -> None:
    hidden, head, targets = problem(scale)
    wanted = targets[:, None]
    if several:
        targets = wanted = torch.randint(0, VOCABULARY, (ROWS, several))
    upstream = torch.randn(targets.shape)
    wide = hidden.double().requires_grad_()
    expected = (wide @ head.double().t()).log_softmax(-1).gather(1, wanted).reshape(targets.shape)
    expected.backward(upstream.double())
    hidden.requires_grad_()
    found = chunked_logprobs(hidden, head, targets, chunk)
    found.backward(upstream)
    assert hidden.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wide.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 8, None])
@pytest.mark.parametrize("several", [0, 5])
def test_a_head_that_is_trained_has_its_gradient_too(chunk: int | None, several: int) -> None:
    hidden, head, targets = problem()
    wanted = targets[:, None]
    if several:
        targets = wanted = torch.randint(0, VOCABULARY, (ROWS, several))
    upstream = torch.randn(targets.shape)
    wide, wide_head = hidden.double().requires_grad_(), head.double().requires_grad_()
    expected = (wide @ wide_head.t()).log_softmax(-1).gather(1, wanted).reshape(targets.shape)
    expected.backward(upstream.double())
    found = chunked_logprobs(hidden.requires_grad_(), head.requires_grad_(), targets, chunk)
    found.backward(upstream)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for own, other in ((hidden, wide), (head, wide_head)):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_scores_beyond_floats_range_of_exp_are_fine() -> None:
    hidden, head, targets = problem(1e4)
    found = chunked_logprobs(hidden.requires_grad_(), head, targets, 8)
    found.sum().backward()
    assert found.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_half_precision_hidden_states_give_float32_logprobs() -> None:
    hidden, head, targets = problem()
    narrow = hidden.bfloat16().requires_grad_()
    found = chunked_logprobs(narrow, head.bfloat16(), targets, 8)
    found.sum().backward()
    exact = (narrow.detach().double() @ head.bfloat16().double().t()).log_softmax(-1)
    assert found.dtype == torch.float32
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=2e-2, atol=5e-2)


def test_never_more_than_a_chunk_of_scores_at_once() -> None:
    hidden, head, targets = problem()
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (result,) if isinstance(t, torch.Tensor) and t.shape != head.shape)
            return result

    with Watch():
        chunked_logprobs(hidden.requires_grad_(), head, targets, 4).sum().backward()
    assert 4 * VOCABULARY in sizes
    assert max(size for size in sizes if size != head.numel()) == 4 * VOCABULARY


def test_no_rows_are_no_logprobs() -> None:
    hidden, head, targets = problem()
    found = chunked_logprobs(hidden[:0].requires_grad_(), head, targets[:0])
    found.sum().backward()
    assert found.shape == (0,)
