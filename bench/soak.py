"""Hours of mixed traffic in which nothing may leak and every count must agree.

    python bench/soak.py [--minutes 30] [--seed 0] [--clients 12] [--model FOLDER]

Clients send, by a fixed seed: valid requests of several sizes (plain, compressed, chunked, two on one connection at
once), invalid ones (JSON, schema, paths, methods, framing, heads), some without a key, and requests that they abandon:
in the middle of the body, or before the answer. Each minute a line shows what the process holds. At the end, when all
is quiet, these must be so, or the exit code is 1:

- threads, open files and connections are as many as before the traffic, and no row is queued;
- memory has not grown, from a third of the time to the end, by more than 5% (the cache of states is small here, so
  that it is full by then);
- for every status, as many responses came to the clients as the server logged for them, and `/metrics` counts exactly
  what was logged, abandoned requests included; none is a 500, and no traceback is in the log.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from traffic import ROOT, Connections, Target, make_body, make_message, read_response, started

KEY = "soak-key"
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n"
ABANDONED = AUTHORIZED + "X-Request-Id: abandoned\r\n"
MAX_GROWTH = 1.05
QUIET_S = 30.0


class Soak:
    """Traffic of several clients; `statuses` counts the responses that came."""

    def __init__(self, target: Target) -> None:
        self.connections = Connections(target.port)
        self.statuses: Counter[int] = Counter()
        self.num_abandoned = self.num_errors = 0

    async def client(self, rng: random.Random, until: float) -> None:
        actions: list[tuple[int, Callable[[random.Random], Awaitable[None]]]] = [
            (8, self.valid),
            (2, self.compressed),
            (2, self.chunked),
            (2, self.pipelined),
            (4, self.invalid),
            (2, self.broken),
            (2, self.abandoned_body),
            (3, self.abandoned_answer),
            (1, self.abandoned_connection),
        ]
        weights, runs = [weight for weight, _ in actions], [run for _, run in actions]
        while time.monotonic() < until:
            try:
                await rng.choices(runs, weights)[0](rng)
            except (OSError, asyncio.IncompleteReadError):
                self.num_errors += 1

    async def send(self, message: bytes) -> None:
        status, _ = await self.connections.ask(message)
        self.statuses[status] += 1

    def body(self, rng: random.Random) -> bytes:
        return make_body(rng, rng.choice([3, 20, 120]), rng.choice([1, 1, 2, 5]))

    async def valid(self, rng: random.Random) -> None:
        await self.send(make_message(self.body(rng), fields=AUTHORIZED))

    async def compressed(self, rng: random.Random) -> None:
        packed = gzip.compress(self.body(rng))
        await self.send(make_message(packed, fields=AUTHORIZED + "Content-Encoding: gzip\r\n"))

    async def chunked(self, rng: random.Random) -> None:
        body = self.body(rng)
        cut = rng.randrange(1, len(body))
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]))
        head = f"POST /v1/systemone HTTP/1.1\r\nHost: x\r\n{AUTHORIZED}Transfer-Encoding: chunked\r\n\r\n"
        await self.send(head.encode() + chunks + b"0\r\n\r\n")

    async def pipelined(self, rng: random.Random) -> None:
        reader, writer = await self.connections.open()
        writer.write(make_message(self.body(rng), fields=AUTHORIZED) + make_message(b"{}", fields=AUTHORIZED))
        for _ in range(2):
            self.statuses[(await read_response(reader))[0]] += 1
        writer.close()

    async def invalid(self, rng: random.Random) -> None:
        body = self.body(rng)
        message = rng.choice(
            [
                make_message(body[: rng.randrange(len(body))], fields=AUTHORIZED),
                make_message(body.replace(b"noul", b"null"), fields=AUTHORIZED),
                make_message(b'{"state": 1, "questions": {}}', fields=AUTHORIZED),
                make_message(body, fields="Authorization: Bearer wrong\r\n"),
                make_message(body, fields=AUTHORIZED + "Content-Encoding: br\r\n"),
                make_message(body, path="/nope", fields=AUTHORIZED),
                make_message(body, path="/v1/models", fields=AUTHORIZED),
                f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{AUTHORIZED}\r\n".encode(),
            ]
        )
        await self.send(message)

    async def broken(self, rng: random.Random) -> None:
        """On a connection of its own, which the server closes."""
        message = rng.choice(
            [
                b"GET / HTTP/3.0\r\n\r\n",
                b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n",
                b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
                make_message(b"", fields="Transfer-Encoding: chunked\r\n"),
            ]
        )
        reader, writer = await self.connections.open()
        writer.write(message)
        self.statuses[(await read_response(reader))[0]] += 1
        writer.close()

    async def abandoned_body(self, rng: random.Random) -> None:
        message = make_message(self.body(rng), fields=ABANDONED)
        await self.abandon(message[: -rng.randrange(1, 60)], rng)

    async def abandoned_answer(self, rng: random.Random) -> None:
        await self.abandon(make_message(self.body(rng), fields=ABANDONED), rng)

    async def abandoned_connection(self, rng: random.Random) -> None:
        await self.abandon(b"", rng)

    async def abandon(self, sent: bytes, rng: random.Random) -> None:
        _, writer = await self.connections.open()
        writer.write(sent)
        await writer.drain()
        await asyncio.sleep(rng.choice([0.0, 0.001, 0.01, 0.05]))
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        self.num_abandoned += 1


def hold(target: Target) -> dict[str, int]:
    return {"rss_kb": target.status("VmRSS"), "threads": target.status("Threads"), "files": target.num_files()}


async def facts(target: Target, path: str) -> str:
    connections = Connections(target.port)
    _, content = await connections.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return content.decode()


async def watch(target: Target, soak: Soak, minutes: float, lines: list[dict[str, int]]) -> None:
    print("| minute | responses | abandoned | errors | RSS MB | threads | files |\n|---|---|---|---|---|---|---|")
    for minute in range(1, int(minutes) + 1):
        await asyncio.sleep(60)
        line = hold(target)
        lines.append(line)
        done = f"{soak.statuses.total()} | {soak.num_abandoned} | {soak.num_errors}"
        print(f"| {minute} | {done} | {line['rss_kb'] >> 10} | {line['threads']} | {line['files']} |", flush=True)


async def run(target: Target, args: argparse.Namespace) -> tuple[Soak, list[str], str]:
    """The traffic, what is wrong afterwards, and the metrics."""
    before, soak = hold(target), Soak(target)
    lines: list[dict[str, int]] = []
    until = time.monotonic() + args.minutes * 60
    watching = asyncio.create_task(watch(target, soak, args.minutes, lines))
    await asyncio.gather(*(soak.client(random.Random(args.seed * 1000 + n), until) for n in range(args.clients)))
    soak.connections.close()
    watching.cancel()
    quiet_by = time.monotonic() + QUIET_S
    while (after := hold(target))["threads"] > before["threads"] or after["files"] > before["files"]:
        if time.monotonic() > quiet_by:
            break
        await asyncio.sleep(0.5)
    wrong = [
        f"{name}: {before[name]} before, {after[name]} after"
        for name in ("threads", "files")
        if after[name] > before[name]
    ]
    if lines and lines[-1]["rss_kb"] > MAX_GROWTH * lines[len(lines) // 3]["rss_kb"]:
        wrong.append(f"memory grew: {[line['rss_kb'] >> 10 for line in lines]} MB")
    health = json.loads(await facts(target, "/health"))
    if health["queued_rows"] or health["status"] != "ready":
        wrong.append(f"health: {health['status']}, {health['queued_rows']} rows queued")
    print(f"before {before}, after {after}")
    return soak, wrong, await facts(target, "/metrics")


def check_counts(soak: Soak, log: str, metrics: str) -> list[str]:
    logged: Counter[int] = Counter()
    for_clients: Counter[int] = Counter()
    for line in re.findall(r"^.* server: request: .*$", log, re.MULTILINE):
        status = int(line.split(" status=")[1].split()[0])
        logged[status] += 1
        if "client_id=abandoned" not in line:
            for_clients[status] += 1
    counted: Counter[int] = Counter()
    for labels, value in re.findall(r"^onepass_requests_total\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        if 'route="/health"' not in labels and 'route="/metrics"' not in labels:  # those that watch it
            counted[int(labels.split('status="')[1].split('"')[0])] += int(float(value))
    print(f"at the clients {dict(sorted(soak.statuses.items()))}")
    print(f"in /metrics    {dict(sorted(counted.items()))}, abandoned ones among them")
    wrong = []
    if for_clients != soak.statuses:
        wrong.append(f"the log has {dict(sorted(for_clients.items()))} for the clients")
    if counted != logged:
        wrong.append(f"the log has {dict(sorted(logged.items()))} in all")
    if 500 in logged or "Traceback" in log:
        wrong.append("something failed: see the log")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model"))
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys", Path(folder) / "log"
        keys.write_text(KEY)
        flags = ["--model", args.model, "--api-key-file", str(keys), "--state-cache-mb", "16"]
        with started(*flags, log=log) as target:
            soak, wrong, metrics = asyncio.run(run(target, args))
        wrong += check_counts(soak, log.read_text(), metrics)
    print("\n".join(wrong) if wrong else "nothing leaked, every count agrees")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
