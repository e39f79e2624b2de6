"""Send completion requests to an OpenAI endpoint and compare what two servers answer."""

import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT = 120.0
QUEUE_SECONDS = 0.5
"""How long a server may take to queue a request that it has accepted."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion request: one sequence per prompt and `n`, which needs a temperature above 0 from n = 2 on."""

    prompts: tuple[str, ...]
    max_tokens: int = 12
    n: int = 1
    temperature: float = 0.0
    seed: int = 1
    logprobs: int = 5

    def body(self) -> dict[str, Any]:
        return {
            "model": "model",
            "prompt": list(self.prompts),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One answered sequence."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token in `tokens`."""
    candidates: tuple[tuple[tuple[str, float], ...], ...]
    """Per position, the likeliest tokens with their log-probabilities."""


Answer = tuple[Choice, ...]
"""One choice per prompt and `n`, in the order of the prompts."""


class RequestFailed(RuntimeError):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status


def check(response: httpx.Response) -> None:
    """Raise RequestFailed unless the response is a success."""
    if response.is_error:
        response.read()
        raise RequestFailed(response.status_code, response.text)


def choice_of(parts: Sequence[dict[str, Any]]) -> Choice:
    """Join the parts of one choice: one part in a plain response, one per event in a stream."""
    logprobs = [part["logprobs"] for part in parts if part.get("logprobs")]
    return Choice(
        text="".join(part["text"] for part in parts),
        tokens=tuple(token for part in parts for token in part["token_ids"] or ()),
        logprobs=tuple(value for piece in logprobs for value in piece["token_logprobs"]),
        candidates=tuple(tuple(top.items()) for piece in logprobs for top in piece["top_logprobs"]),
    )


def complete(url: str, request: Request) -> Answer:
    """Send `request` and wait for the whole answer. Raises RequestFailed, or httpx.TransportError without a server."""
    response = httpx.post(f"{url}/v1/completions", json=request.body(), timeout=TIMEOUT)
    check(response)
    return tuple(choice_of([choice]) for choice in response.json()["choices"])


def open_stream(url: str, request: Request) -> AbstractContextManager[httpx.Response]:
    body = request.body() | {"stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT)


def read_stream(response: httpx.Response) -> tuple[Answer, int]:
    """The joined answer and the number of events that carried a choice. Raises RequestFailed."""
    check(response)
    parts: dict[int, list[dict[str, Any]]] = {}
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(event["error"]["code"], event["error"]["message"])
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    answer = tuple(choice_of(parts[index]) for index in sorted(parts))
    return answer, sum(len(events) for events in parts.values())


def stream(url: str, request: Request) -> tuple[Answer, int]:
    """Send `request` as a stream; return the joined answer and the number of events that carried a choice."""
    with open_stream(url, request) as response:
        return read_stream(response)


def complete_together(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Have the server work on all requests at once, beginning in one step; answers in the order of `requests`.

    What a bf16 model computes on a CPU depends on which sequences share a step, so two servers are comparable only
    when both batch alike. The scheduler is therefore held while the requests arrive one by one: a stream is open once
    the server has accepted the request. This needs a server with VLLM_SERVER_DEV_MODE=1.
    """
    check(httpx.post(f"{url}/pause", params={"mode": "keep"}, timeout=TIMEOUT))
    with ExitStack() as stack:
        try:
            responses = [stack.enter_context(open_stream(url, request)) for request in requests]
            time.sleep(QUEUE_SECONDS)
        finally:
            check(httpx.post(f"{url}/resume", timeout=TIMEOUT))
        return [read_stream(response)[0] for response in responses]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two answers to one request are apart."""

    equal_tokens: bool
    logprob: float
    """Largest difference of any returned log-probability; infinite where not the same tokens were returned."""

    @property
    def is_none(self) -> bool:
        return self.equal_tokens and self.logprob == 0.0


def difference(one: Answer, other: Answer) -> Difference:
    """Compare tokens, their log-probabilities, and those of the likeliest candidates."""
    equal_tokens = [choice.tokens for choice in one] == [choice.tokens for choice in other]
    ours, theirs = logprobs_of(one), logprobs_of(other)
    if ours.keys() != theirs.keys():
        return Difference(equal_tokens, float("inf"))
    return Difference(equal_tokens, max((abs(ours[key] - theirs[key]) for key in ours), default=0.0))


def logprobs_of(answer: Answer) -> dict[tuple[int, int, str], float]:
    """Every log-probability in an answer, by choice, position and token."""
    found: dict[tuple[int, int, str], float] = {}
    for number, choice in enumerate(answer):
        for position, (token, value) in enumerate(zip(choice.tokens, choice.logprobs, strict=True)):
            found[number, position, f"token {token}"] = value
            found |= {(number, position, text): other for text, other in choice.candidates[position]}
    return found
