"""The whole server against `transformers serve`: the same checkpoint, the same requests, the same machine, in turn.

    python -m venv PEER && PEER/bin/pip install -r requirements.txt fastapi uvicorn accelerate
    python bench/serve.py --peer PEER/bin/transformers [--seconds 4] [--rounds 3] [--model FOLDER]

The peer answers `/v1/systemone` from the library's decision pipeline. Without --model both serve a checkpoint made for
the purpose: Qwen3.5's architecture, 8 layers 512 wide, random weights, label readout. Each line is a closed loop of so
many clients; within a round the two servers take turns, and figures are medians of the rounds. `first` states are never
seen twice, `again` is one state with questions that are new every time. First of all both answer the same requests, and
the largest difference of their probabilities is printed: it is the same model.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import ROOT, SHAPES, make_checkpoint

CLIENTS, QUESTIONS, STATE_TOKENS = (1, 4, 16), (1, 6), (50, 500)
WORDS = (
    "the",
    "parcel",
    "was",
    "late",
    "and",
    "box",
    "open",
    "a",
    "refund",
    "is",
    "what",
    "we",
    "want",
    "please",
    "soon",
)
NUM_COMPARED = 12
PATIENCE_S = 180
SHAPE = {
    **SHAPES["0.8B"],
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {**SHAPES["0.8B"]["rope_parameters"], "mrope_section": [3, 3, 2]},
}


@dataclass(frozen=True)
class Peer:
    name: str
    port: int
    model: str


@contextmanager
def running(command: list[str], is_up: Callable[[], bool]) -> Iterator[None]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "1000", "HF_HUB_DISABLE_TELEMETRY": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + PATIENCE_S
        while not is_up():
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"this did not come up: {' '.join(command)}")
            time.sleep(0.3)
        yield
    finally:
        process.terminate()
        process.wait(30)


def answers_get(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Requests:
    """Bodies of requests; the state has so many tokens, whatever the tokenizer makes of words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def make(self, model: str, state_tokens: int, num_questions: int, is_first: bool) -> bytes:
        with self._lock:
            number = next(self._numbers)
        state = self._state(number if is_first else -1, state_tokens)
        kinds: list[dict[str, Any]] = [
            {"type": "noul", "instructions": f"Is case {number} urgent?"},
            {
                "type": "choice",
                "instructions": f"Who takes case {number}?",
                "criteria": {"billing": None, "other": None},
            },
            {"type": "score", "instructions": f"How angry is {number}?", "criteria": ["calm", "cross", "furious"]},
        ]
        questions = {
            f"q{n}": {**kinds[n % 3], "instructions": f"{n}. {kinds[n % 3]['instructions']}"}
            for n in range(num_questions)
        }
        return json.dumps({"model": model, "state": state, "questions": questions}).encode()

    def _state(self, seed: int, num_tokens: int) -> str:
        words = f"case {seed}: " + " ".join(random.Random(seed).choices(WORDS, k=num_tokens))
        ids = self._tokenizer(words, add_special_tokens=False)["input_ids"][:num_tokens]
        text: str = self._tokenizer.decode(ids)
        return text


def ask(connection: http.client.HTTPConnection, body: bytes) -> dict[str, Any]:
    connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise SystemExit(f"status {response.status}: {content[:300]!r}")
    document: dict[str, Any] = json.loads(content)
    return document


def run_clients(peer: Peer, num_clients: int, seconds: float, make: Callable[[], bytes]) -> tuple[float, float]:
    """(requests a second, median seconds of a request) of a closed loop."""
    latencies: list[float] = []
    stop_at = time.monotonic() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=PATIENCE_S)
        while True:
            body, started = make(), time.monotonic()
            ask(connection, body)
            latencies.append(time.monotonic() - started)
            if time.monotonic() > stop_at:
                break
        connection.close()

    started = time.monotonic()
    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(latencies) / (time.monotonic() - started), statistics.median(latencies)


def compare(ours: Peer, theirs: Peer, requests: Requests) -> float:
    """The largest difference of a probability, over requests of all sizes."""
    connections = [http.client.HTTPConnection("127.0.0.1", peer.port, timeout=PATIENCE_S) for peer in (ours, theirs)]
    largest = 0.0
    for number in range(NUM_COMPARED):
        body = requests.make(ours.model, STATE_TOKENS[number % 2], QUESTIONS[number // 2 % 2], is_first=number % 3 > 0)
        mine, other = (
            ask(connection, body.replace(json.dumps(ours.model).encode(), json.dumps(peer.model).encode()))["answers"]
            for connection, peer in zip(connections, (ours, theirs), strict=True)
        )
        for name in mine:
            pairs = zip(probabilities(mine[name]), probabilities(other[name]), strict=True)
            largest = max([largest, *(abs(a - b) for a, b in pairs)])
    return largest


def probabilities(answer: dict[str, Any]) -> list[float]:
    """Those of all options, by name; of a noul the one it has."""
    if answer["type"] == "noul":
        return [answer["noul"]]
    return [answer["probabilities"][name] for name in sorted(answer["probabilities"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="the `transformers` program of the peer's environment")
    parser.add_argument("--model", type=Path, help="checkpoint with label readout (default: one made for this)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each closed loop (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.model or make_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())), SHAPE)
        from transformers import AutoTokenizer

        requests = Requests(AutoTokenizer.from_pretrained(folder))
        ours = Peer("onepass", free_port(), folder.name)
        theirs = Peer("transformers serve", free_port(), str(folder))
        command = [sys.executable, "server.py", "--port", str(ours.port), "--model", str(folder), "--dtype", "float32"]
        stack.enter_context(running(command, lambda: answers_get(ours.port, "/health")))
        command = [
            str(args.peer),
            "serve",
            str(folder),
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--port",
            str(theirs.port),
        ]
        stack.enter_context(running([*command, "--host", "127.0.0.1"], lambda: answers_get(theirs.port, "/health")))
        print(f"largest difference of a probability: {compare(ours, theirs, requests):.1e}", flush=True)
        measure(ours, theirs, requests, args)


def measure(ours: Peer, theirs: Peer, requests: Requests, args: argparse.Namespace) -> None:
    print("| state | tokens | questions | clients | ours req/s | theirs req/s | times | ours p50 ms | theirs p50 ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for is_first, state_tokens, questions, clients in itertools.product(
        (True, False), STATE_TOKENS, QUESTIONS, args.clients
    ):
        results: dict[str, list[tuple[float, float]]] = {ours.name: [], theirs.name: []}
        for _ in range(args.rounds):
            for peer in (ours, theirs):

                def make(model: str = peer.model) -> bytes:
                    return requests.make(model, state_tokens, questions, is_first)  # noqa: B023 - used in this round

                results[peer.name].append(run_clients(peer, clients, args.seconds, make))
        mine, other = (
            [statistics.median(values) for values in zip(*results[peer.name], strict=True)] for peer in (ours, theirs)
        )
        cells = ["first" if is_first else "again", state_tokens, questions, clients]
        cells += [f"{mine[0]:.1f}", f"{other[0]:.1f}", f"{mine[0] / other[0]:.1f}"]
        cells += [f"{1000 * mine[1]:.0f}", f"{1000 * other[1]:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
