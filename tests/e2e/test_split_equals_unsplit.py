"""Two `vllm serve` processes, one per role, answer as the unsplit server does, to the last bit: eager and compiled.

Each test sends the same requests in the same order to both deployments: results on a CPU depend on which sequences
share a step, and on what the prefix cache already holds, so only equal histories are comparable.

Compiled servers run in float32 here. Inductor keeps values between fused operations in float32, so that in bf16 an
unsplit server rounds less often than a split one, which has a boundary there: see `test_default_mode`.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from demo.checkpoint import prompt_of
from demo.client import Answer, Request, RequestFailed, complete, complete_together, difference, stream
from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]

KV_BLOCK = 128
"""Tokens per block of the KV cache on the CPU."""


def assert_same(unsplit: Sequence[Answer], split: Sequence[Answer]) -> None:
    for one, other in zip(unsplit, split, strict=True):
        assert difference(one, other).is_none, (difference(one, other), one, other)


def test_single_requests(deployment: Deployment) -> None:
    requests = [Request((prompt_of(length, start=length),)) for length in (1, 4, 9, 30)]
    unsplit = [complete(deployment.unsplit.url, request) for request in requests]
    split = [complete(deployment.attention.url, request) for request in requests]
    assert all(len(choice.tokens) == 12 for answer in split for choice in answer)
    assert_same(unsplit, split)


def test_prompt_longer_than_a_block(deployment: Deployment) -> None:
    """Twice, because the second time the prefix cache answers for the full block."""
    request = Request((prompt_of(KV_BLOCK + 40, start=40),))
    unsplit = [complete(deployment.unsplit.url, request) for _ in range(2)]
    split = [complete(deployment.attention.url, request) for _ in range(2)]
    assert_same(unsplit, split)


def test_generation_crosses_a_block(deployment: Deployment) -> None:
    request = Request((prompt_of(KV_BLOCK - 6, start=50),), max_tokens=20)
    assert_same([complete(deployment.unsplit.url, request)], [complete(deployment.attention.url, request)])


def test_concurrent_requests(deployment: Deployment) -> None:
    """More requests than fit into one batch, of different lengths, one of them with several prompts."""
    lengths = {2: 12, 5: 7, 8: 16, 140: 10}
    requests = [Request((prompt_of(count, start=60 + count),), max_tokens=lengths[count]) for count in lengths]
    requests.append(Request(tuple(prompt_of(4, start=80 + i) for i in range(3))))
    unsplit = complete_together(deployment.unsplit.url, requests)
    split = complete_together(deployment.attention.url, requests)
    assert_same(unsplit, split)


def test_streaming(deployment: Deployment) -> None:
    request = Request((prompt_of(7, start=90),))
    unsplit, _ = stream(deployment.unsplit.url, request)
    split, events = stream(deployment.attention.url, request)
    # Not one event per token: vLLM joins the tokens that its HTTP process has not yet sent.
    assert 1 < events <= request.max_tokens + 1
    assert_same([unsplit], [split])
    assert_same([complete(deployment.unsplit.url, request)], [split])


def test_two_samples(deployment: Deployment) -> None:
    """`n=2` is two sequences that share the prompt; the seed makes sampling repeatable."""
    request = Request((prompt_of(6, start=95),), n=2, temperature=0.7, seed=7)
    unsplit = complete_together(deployment.unsplit.url, [request])
    split = complete_together(deployment.attention.url, [request])
    first, second = split[0]
    assert first.tokens != second.tokens
    assert_same(unsplit, split)


def test_logprobs_requested(deployment: Deployment) -> None:
    request = Request((prompt_of(5, start=97),), logprobs=3)
    (choice,) = complete(deployment.attention.url, request)
    assert len(choice.logprobs) == len(choice.candidates) == len(choice.tokens) == 12
    assert all(len(candidates) >= 3 for candidates in choice.candidates)
    assert all(logprob < 0.0 for logprob in choice.logprobs)
    assert_same([complete(deployment.unsplit.url, request)], [(choice,)])


def test_ffn_depends_on_what_it_is_sent(deployment: Deployment) -> None:
    """Guards the comparison itself: different prompts are told apart, so equality is not vacuous."""
    one, other = (complete(deployment.attention.url, Request((prompt_of(4, start=i),))) for i in (110, 111))
    assert not difference(one, other).equal_tokens


def test_each_role_holds_its_part(deployment: Deployment, checkpoint_parameters: int) -> None:
    attention, ffn = deployment.attention.owned_parameters(), deployment.ffn.owned_parameters()
    assert 0 < attention < checkpoint_parameters
    assert 0 < ffn < checkpoint_parameters
    assert attention + ffn == checkpoint_parameters


def test_request_to_the_ffn_is_refused(deployment: Deployment) -> None:
    """With a text that says where to go, and without harm to the loop that serves Attention."""
    request = Request((prompt_of(4, start=120),))
    with pytest.raises(RequestFailed, match="this is the FFN role") as refused:
        complete(deployment.ffn.url, request)
    assert refused.value.status == 400
    later = replace(request, max_tokens=5)
    assert_same([complete(deployment.unsplit.url, later)], [complete(deployment.attention.url, later)])
    assert deployment.ffn.is_ready()
