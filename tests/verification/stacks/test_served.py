"""Endpoints of this machine that return log probabilities: a tiny model behind one, right and with planted faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from stacks.dense import VOCABULARY, Dense
from stacks.layered import found

import saccade
from saccade.verification.stacks import _served


class Server:
    """Answers with the log probabilities of a model whose logits are as far apart as those of a trained one."""

    def __init__(self, seed: int = 0):
        self.model = Dense(seed=seed).double()
        with torch.no_grad():
            self.model.head.weight *= 9

    def scores(self, prompt: list[int]) -> list[float | None]:
        if max(prompt) >= VOCABULARY:
            raise ValueError("token out of range")
        with torch.no_grad():
            out = self.logits(prompt)[:-1].log_softmax(-1)
        return [None, *(round(float(row[token]), 4) for row, token in zip(out, prompt[1:], strict=True))]

    def logits(self, prompt: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([prompt]))[0]


class Leaks(Server):
    def __init__(self):
        super().__init__()
        self.model.pairs = lambda length, mask: torch.ones(length, length, dtype=torch.bool).tril(2 * (length > 8))


class Drifts(Server):
    """The answer moves from one request to the next."""

    calls = 0

    def logits(self, prompt):
        self.calls += 1
        return super().logits(prompt) * (1 + self.calls % 5 / 4)


class PrefixCache(Server):
    """Takes the states of an earlier prompt, the first token that differs included."""

    def __init__(self):
        super().__init__()
        self.seen: list[list[int]] = []

    def logits(self, prompt):
        def shared(other: list[int]) -> int:
            same = [ours == theirs for ours, theirs in zip(prompt, other, strict=False)]
            return same.index(False) if False in same else 0

        longest = max(self.seen, key=shared, default=[])
        taken = shared(longest) + 1
        self.seen.append(prompt)
        return super().logits(longest[:taken] + prompt[taken:] if taken > 1 else prompt)


class Neighbours(Server):
    """Requests that are computed at the same time reach each other."""

    def __init__(self):
        super().__init__()
        self.running: list[int] = []

    def logits(self, prompt):
        self.running.append(prompt[0])
        time.sleep(0.01)
        others = [token for token in self.running if token != prompt[0]]
        out = super().logits(prompt)
        time.sleep(0.004)
        self.running.remove(prompt[0])
        return out.roll(1, -1) if others else out


class FailsInBatches(Neighbours):
    def logits(self, prompt):
        before = self.model(torch.tensor([prompt]))[0]
        if not torch.equal(super().logits(prompt), before):
            raise ValueError("out of slots")
        return before


@contextmanager
def served(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                answer = {"choices": [{"logprobs": {"token_logprobs": server.scores(asked["prompt"])}}]}
            except ValueError as error:
                self.send_error(400, str(error))
                return
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            pass  # a client that no longer waits

    with Quiet(("127.0.0.1", 0), Handler) as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
        finally:
            endpoint.shutdown()
            thread.join()


def verified(server: Server, **given):
    with served(server) as url:
        return saccade.verify_stack(url, **given)


def test_a_right_server_beside_its_model():
    """Fails where the rounding of numbers in JSON, or of another dtype, is a finding."""
    server = Server()
    report = verified(server, second=server.model)
    assert report.ok and not report.findings, report
    measured = {outcome.name for outcome in report.outcomes if outcome.status == "passed"}
    assert measured >= {"determinism", "causality", "batch", "cache", "agreement"}
    with served(server) as url:
        report = saccade.verify_stack(server.model, second=url)
    assert report.ok, report


@pytest.mark.parametrize(
    ("kind", "probe"),
    [(Leaks, "causality"), (Drifts, "determinism"), (PrefixCache, "cache"), (Neighbours, "batch")],
)
def test_faults_of_servers(kind, probe):
    report = verified(kind())
    assert found(report, probe), report


def test_another_model_than_the_original():
    [finding] = found(verified(Server(seed=1), second=Server().model), "agreement")
    assert "gives other outputs than" in finding.message


def test_errors_in_one_path_are_a_finding_with_what_was_answered():
    [finding] = found(verified(FailsInBatches()), "batch")
    assert "400 out of slots" in finding.message


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.1:8000",
        "http://127.0.0.1.example.org",
        "http://127.0.0.1@example.org",
        "file:///etc",
        "https://example.org",
    ],
)
def test_addresses_of_other_machines_are_refused(url):
    with pytest.raises(ValueError, match="expected http:// and an address of this machine"):
        saccade.verify_stack(url)


class Slow(Server):
    def scores(self, prompt):
        time.sleep(0.4)
        return super().scores(prompt)


class Refuses(Server):
    def scores(self, prompt):
        raise ValueError("echo is not supported")


class NoScores(Server):
    def scores(self, prompt):
        return None


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Slow(), "did not answer within 0.1 s"),
        (Refuses(), "answered 400 echo is not supported"),
        (NoScores(), "expected choices[0].logprobs.token_logprobs with 2 numbers"),
    ],
)
def test_a_server_without_answers_is_one_message_and_no_fault(monkeypatch, server, words):
    """Fails where each probe waits for a server that is too slow, or repeats its error as a finding."""
    if isinstance(server, Slow):  # others may take their time on a busy machine
        monkeypatch.setattr(_served, "_SECONDS", 0.1)
    report = verified(server)
    assert not report.findings and len(report.outcomes) == 1
    assert words in report.outcomes[0].reason
