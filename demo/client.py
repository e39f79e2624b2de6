"""Send completion requests to an OpenAI endpoint and compare what two servers answer."""

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT = 120.0
GATHER_SECONDS = 1.0
"""How long a paused server may take to queue what was sent to it."""


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


def stream(url: str, request: Request) -> tuple[Answer, int]:
    """Send `request` as a stream; return the joined answer and the number of events that carried a choice."""
    parts: dict[int, list[dict[str, Any]]] = {}
    with httpx.stream("POST", f"{url}/v1/completions", json=request.body() | {"stream": True}, timeout=TIMEOUT) as got:
        check(got)
        for line in got.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
    answer = tuple(choice_of(parts[index]) for index in sorted(parts))
    return answer, sum(len(events) for events in parts.values())


def complete_together(url: str, requests: Sequence[Request]) -> list[Answer]:
    """Send all requests at once, and have the server begin them in one step; answers in the order of `requests`.

    What a bf16 model computes on a CPU depends on which sequences share a step, so two servers are comparable only
    when both batch alike. The scheduler is therefore held while the requests arrive; this needs a server with
    VLLM_SERVER_DEV_MODE=1.
    """
    with ThreadPoolExecutor(len(requests)) as pool:
        check(httpx.post(f"{url}/pause", params={"mode": "keep"}, timeout=TIMEOUT))
        try:
            answers = []
            for request in requests:
                answers.append(pool.submit(complete, url, request))
                time.sleep(GATHER_SECONDS / len(requests))
        finally:
            check(httpx.post(f"{url}/resume", timeout=TIMEOUT))
        return [answer.result() for answer in answers]


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
