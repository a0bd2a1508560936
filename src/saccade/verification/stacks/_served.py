"""A model behind an HTTP endpoint of this machine, called for the log probabilities of a prompt's tokens.

Shape legend: R rows, L length.
"""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from ..findings._finding import TargetError, Unmeasured
from ._documents import Documents, exchanged, padded
from ._stack import Decoder, Promises, Stack

_SECONDS = 30.0  # for one answer
_IDS = (499, 31)  # vocabularies that are tried
_LENGTHS = (170, 66, 34)  # prompts that are tried


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirection is an error: it could lead to another machine."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Served:
    """A function of token ids (R, L) that returns log probabilities (R, L, 1): of each token after those before it, 0
    for the first. Rows are requested at the same time; with `attention_mask` only their real tokens."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme != "http" or not _is_loopback(parts.hostname):
            raise ValueError(f"model: expected http:// and an address of this machine, such as 127.0.0.1, got {url}")
        path = parts.path.rstrip("/")
        end = "" if path.endswith("completions") else "/completions" if path.endswith("/v1") else "/v1/completions"
        self.url, self.seconds = f"http://{parts.netloc}{path}{end}", _SECONDS
        self.lost = ""  # why it is not asked again
        # no proxies: they are other machines
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())
        self.model = self._name()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        rows = input_ids.tolist()
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [
            [token for token, kept in zip(*row, strict=True) if kept] for row in zip(rows, real.tolist(), strict=True)
        ]
        with ThreadPoolExecutor(len(prompts)) as pool:
            scores = list(pool.map(self.scores, prompts))
        out = torch.zeros(*input_ids.shape, 1)
        for row, own in enumerate(scores):
            out[row, real[row].bool(), 0] = torch.tensor(own)
        return out

    def scores(self, prompt: list[int]) -> list[float]:
        """The log probability of each token of a prompt.

        Raises:
            Unmeasured: the server cannot be reached, or did not answer in time, now or before.
            RuntimeError: it answered an error, or without the log probabilities.
        """
        asked = {"prompt": prompt, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1, **self.model}
        answer = self._answer(self.url, json.dumps(asked).encode())
        try:
            values = answer["choices"][0]["logprobs"]["token_logprobs"][: len(prompt)]
            if len(values) == len(prompt):
                return [0.0, *map(float, values[1:])]
        except (KeyError, IndexError, TypeError, ValueError):
            values = None
        came = "none" if values is None else f"{len(values)}"
        raise RuntimeError(
            f"{self.url}: expected choices[0].logprobs.token_logprobs with {len(prompt)} numbers for a prompt of "
            f"{len(prompt)} token ids (echo=true, logprobs=1), got {came}"
        )

    def _answer(self, url: str, body: bytes | None = None) -> Any:
        if self.lost:
            raise Unmeasured(self.lost)
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with self.opener.open(request, timeout=self.seconds) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(300).decode(errors="replace").split())
            words = "" if said.startswith("<") else f": {said}"  # a page says no more
            raise RuntimeError(f"{url} answered {error.code} {error.reason}{words}") from None
        except ValueError:
            raise RuntimeError(f"{url}: expected JSON, got something else") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, (TimeoutError, ConnectionRefusedError)):
                raise RuntimeError(f"{url} broke off: {reason}") from None
            late = (
                f"did not answer within {self.seconds:g} s" if isinstance(reason, TimeoutError) else f"is off: {reason}"
            )
            self.lost = f"{url} {late}"
            raise Unmeasured(self.lost) from None

    def _name(self) -> dict[str, str]:
        """The argument `model` of requests: the first that the server lists, none where it lists none."""
        try:
            return {"model": self._answer(self.url.removesuffix("/completions") + "/models")["data"][0]["id"]}
        except (RuntimeError, KeyError, IndexError, TypeError):
            return {}


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def served_stack(url: str, causal: bool | None, vocabulary: Tensor | None) -> Stack:
    """The endpoint as a stack. `vocabulary`: the ids to draw from, None where nothing says them.

    Raises:
        ValueError: the address is not on this machine.
        Unmeasured: the server does not answer with log probabilities.
    """
    served = Served(url)
    if vocabulary is None:
        vocabulary = torch.arange(4, next((size for size in _IDS if _answers(served, [5, size - 1])), _IDS[-1]))
    token = int(vocabulary[0])
    try:
        served.scores([token, int(vocabulary[-1])])
    except RuntimeError as error:
        raise Unmeasured(str(error)) from None
    longest = next((length for length in _LENGTHS if _answers(served, [token] * length)), _LENGTHS[-1])
    ids = vocabulary

    def batch(documents: Documents) -> dict[str, Tensor]:
        ids, mask = padded(documents)
        return {"input_ids": ids, "attention_mask": mask}

    def decode(tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        if len(tokens) > 2:  # a prompt that begins alike, and parts before the last token
            served.scores(exchanged(tokens, ids, len(tokens) - 2, len(tokens) - 1))
        return torch.tensor(served.scores(tokens)[-1:]), True

    said = "outputs are log probabilities of the prompt's tokens, asked for by echo=true"
    return Stack(
        url,
        served,
        None,
        vocabulary,
        batch,
        decoders=(Decoder("its prefix cache", decode),),
        promises=Promises(True if causal is None else causal),
        longest=longest,
        assumed=(said, *(() if causal is not None else ("it is causal (otherwise causal=)",))),
        is_served=True,
    )


def _answers(served: Served, prompt: list[int]) -> bool:
    try:
        return len(served.scores(prompt)) > 0
    except (RuntimeError, TargetError):
        return False


def scores_of(stack: Stack, out: Tensor, document: list[int]) -> Tensor:
    """The log probability of each token of a document (L, 1), from the outputs of any model (L, width)."""
    if stack.is_served:
        return out
    following = out[:-1].double().log_softmax(-1).gather(-1, torch.tensor(document[1:], device=out.device)[:, None])
    return torch.cat([following.new_zeros(1, 1), following])
