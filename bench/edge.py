"""What the HTTP edge costs: the real server over an engine that answers at once, beside a bare http.server.

    python bench/edge.py [--seconds 1.0] [--rounds 5]

Servers and client are processes of their own; the client speaks raw bytes. The servers take turns within each round,
so that a busy machine slows them alike; printed are medians over the rounds. `cpu us` is a server's processor time for
one request, which a busy machine changes least. Three servers:

bare     http.server that reads the body and answers a constant
edge     everything but the prompt: framing, validation, queue, worker thread, answer, log line
prompts  edge with the starter's templates and tokenizer
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from onepass.config import Config
    from onepass.loading import Loaded
    from onepass.status import EngineStatus

CONNECTIONS = (1, 16, 64)
STATE = (
    "Order 1182 arrived two days late, the box was open and one of the three cups was broken. I want my money back. "
    * 3
)
REQUEST = {
    "state": {"subject": "Broken delivery", "body": STATE},
    "questions": {
        "urgent": {"type": "noul", "instructions": "Is this urgent?"},
        "department": {"type": "choice", "criteria": {"billing": "Money", "delivery": "Parcels", "other": None}},
        "severity": {"type": "score", "criteria": ["None", "Minor", "Blocked", "Losing money"]},
    },
}
BODY = json.dumps(REQUEST, separators=(",", ":")).encode()
MESSAGE = (
    b"POST /v1/systemone HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n"
    b"User-Agent: bench\r\nAuthorization: Bearer dummy\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


class BareHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    answer = b'{"answers":"' + b"a" * 600 + b'"}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None: ...


class BareServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FakeEngine:
    """Scores the options by their number."""

    def forward(self, rows: list[Any]) -> list[list[list[float]]]:
        return [[[float(place) for place in range(count)] for count in option_counts(row)] for row in rows]

    def describe(self) -> EngineStatus:
        from onepass.status import EngineStatus

        return EngineStatus(
            backend="fake",
            device="none",
            dtype="none",
            kernels="none",
            threads=1,
            tuning={},
            launch_tokens=0,
            shares_state=False,
            batch_invariant=False,
            state_cache_bytes=0,
            state_cache_hits=0,
            state_cache_misses=0,
            tokens_computed=0,
            tokens_reused=0,
            tokens_padded=0,
            graphs=None,
        )

    def keep_beginning(self, ids: bytes) -> bool:
        return False

    def reset_counts(self) -> None:
        pass

    def idle(self) -> bool:
        return False


def option_counts(row: Any) -> list[int]:
    return [len(read.label_ids) or len(read.positions) - 1 for read in row.reads]


class RememberingPrompter:
    """Renders the first request of each shape and gives its rows to all that follow."""

    def __init__(self, prompter: Any) -> None:
        self._prompter = prompter
        self._rows: dict[object, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prompter, name)

    def render(self, request: Any, pictures: Any = ()) -> list[Any]:
        shape = (request.encoding, tuple((question.type, len(question.options)) for question in request.questions))
        if shape not in self._rows:
            self._rows[shape] = self._prompter.render(request, pictures)
        return self._rows[shape]


def load_prompter(config: Config) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from onepass.checkpoint import open_checkpoint
    from onepass.prompt.prompter import Prompter
    from onepass.prompt.template import DecisionFormat

    checkpoint = open_checkpoint(config)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True)
    return checkpoint, Prompter(tokenizer, DecisionFormat.load(checkpoint.folder), max_tokens=4096)


def load_fake(config: Config, *, with_prompts: bool) -> Loaded:
    from onepass.loading import Loaded

    checkpoint, prompter = load_prompter(config)
    return Loaded(checkpoint, prompter if with_prompts else cast(Any, RememberingPrompter(prompter)), FakeEngine())


def serve(kind: str) -> None:
    """Print the port and serve for ever."""
    server: ThreadingHTTPServer
    if kind == "bare":
        server = BareServer(("127.0.0.1", 0), BareHandler)
    else:
        from onepass import logs
        from onepass.config import Config
        from onepass.decider import Decider
        from onepass.edge.handler import HttpServer
        from onepass.edge.routes import ROUTES

        config = Config(port=0)
        decider = Decider(config, load=lambda config: load_fake(config, with_prompts=kind == "prompts"))
        server = HttpServer(config, decider, ROUTES)
        logs.set_up_logging(is_verbose=False)
        decider.start()
        decider.wait_ready()
    print(server.server_address[1], flush=True)
    server.serve_forever()


def drive(port: int, num_connections: int, seconds: float) -> dict[str, float]:
    """Closed loop on keep-alive connections, one thread."""
    poller = select.epoll()
    sockets, started, received = {}, {}, {}
    for _ in range(num_connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = connection.fileno()
        sockets[number], received[number] = connection, b""
        poller.register(number, select.EPOLLIN)
    clock = time.perf_counter
    begun = clock()
    warm, end = begun + seconds * 0.2, begun + seconds * 1.2
    for number, connection in sockets.items():
        started[number] = clock()
        connection.sendall(MESSAGE)
    waits: list[float] = []
    count = 0  # warm-up included
    while (now := clock()) < end:
        for number, _ in poller.poll():
            data = received[number] + sockets[number].recv(65536)
            head_end = data.find(b"\r\n\r\n") + 4
            place = data.find(b"ontent-Length: ") + 15
            if head_end < 4 or len(data) < head_end + int(data[place : data.find(b"\r", place)]):
                received[number] = data
                continue
            assert data.startswith(b"HTTP/1.1 200"), data[:500]
            received[number] = b""
            count += 1
            done = clock()
            if now > warm:
                waits.append(done - started[number])
            started[number] = done
            sockets[number].sendall(MESSAGE)
    for connection in sockets.values():
        connection.close()
    waits.sort()
    return {
        "count": count,
        "per_s": len(waits) / seconds,
        "p50_ms": waits[len(waits) // 2] * 1e3,
        "p99_ms": waits[len(waits) * 99 // 100] * 1e3,
    }


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environ = {**os.environ, "ONEPASS_API_KEY": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(kinds: list[str], rounds: int, seconds: float) -> dict[tuple[str, int], dict[str, float]]:
    servers = {kind: start("--serve", kind) for kind in kinds}
    results: dict[tuple[str, int], list[dict[str, float]]] = {}
    try:
        ports = {kind: int(read_line(process)) for kind, process in servers.items()}
        for _ in range(rounds):
            for num_connections in CONNECTIONS:
                for kind in kinds:
                    before_s = cpu_s(servers[kind].pid)
                    client = start("--drive", str(ports[kind]), str(num_connections), str(seconds))
                    run = json.loads(read_line(client))
                    client.wait()
                    run["cpu_us"] = (cpu_s(servers[kind].pid) - before_s) / run.pop("count") * 1e6
                    results.setdefault((kind, num_connections), []).append(run)
    finally:
        for process in servers.values():
            process.kill()
            process.communicate()
    return {
        key: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for key, runs in results.items()
    }


def time_us(function: Callable[[], object], rounds: int) -> float:
    """Median duration of a call over `rounds` of 200 calls."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(200):
            function()
        times.append((time.perf_counter() - begun) / 200)
    return statistics.median(times) * 1e6


def print_handler_work(rounds: int) -> None:
    """What a handler thread does for one request besides HTTP, one thread alone."""
    from onepass.config import Config
    from onepass.edge import framing
    from onepass.wire.schema import parse_request

    prompter = load_prompter(Config())[1]
    request = parse_request(BODY, "application/json")
    rows = prompter.render(request)
    num_tokens = sum(row.num_tokens for row in rows)
    head = MESSAGE[: MESSAGE.index(b"\r\n\r\n") + 4]
    print(f"\none request of {len(BODY)} bytes, {len(rows)} rows, {num_tokens} tokens, on a handler thread:")
    print(f"  parse the head            {time_us(lambda: framing.parse_head(head), rounds):8.1f} us")
    print(f"  validate                  {time_us(lambda: parse_request(BODY, 'application/json'), rounds):8.1f} us")
    print(f"  render and tokenise       {time_us(lambda: prompter.render(request), rounds):8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the HTTP edge costs, beside a bare http.server.")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement (default: 1.0)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each server (default: 5)")
    parser.add_argument("--serve", choices=("bare", "edge", "prompts"), help=argparse.SUPPRESS)
    parser.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
    elif arguments.drive:
        port, num_connections, seconds = arguments.drive
        print(json.dumps(drive(int(port), int(num_connections), float(seconds))), flush=True)
    else:
        results = compare(["bare", "edge", "prompts"], arguments.rounds, arguments.seconds)
        print("connections   server requests/s  of bare   p50 ms   p99 ms   cpu us")
        for (kind, count), run in sorted(results.items(), key=lambda item: (item[0][1], item[0][0])):
            share = run["per_s"] / results["bare", count]["per_s"]
            rates = f"{run['per_s']:10.0f} {share:8.2f} {run['p50_ms']:8.3f} {run['p99_ms']:8.3f} {run['cpu_us']:8.0f}"
            print(f"{count:11} {kind:>8} {rates}")
        added_ms = results["edge", 1]["p50_ms"] - results["bare", 1]["p50_ms"]
        print(f"\nadded at the median, one connection: {added_ms:.3f} ms")
        print_handler_work(arguments.rounds)


if __name__ == "__main__":
    main()
