"""The real server under load: closed loops, a Poisson clock, twice its capacity, and a giant beside small requests.

    python bench/load.py [--seconds 20] [--seconds-over 600] [--model FOLDER] [--only open giant]

The server is a process of its own, the client another, with a connection for each request that is under way. Requests
are of mixed sizes (of ten: seven with one question about 20 words, two with three about 60, one with six about 200),
each about a state of its own. `closed` keeps so many requests under way; the most it answers a second is the capacity.
`open` lets requests come at random, at a rate that does not wait for answers: half of the capacity, and twice.
`giant` lets small requests come at a tenth of the capacity, alone, and then beside one client that asks 512 new
questions about a state over and over: the same state, and a new one each time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from traffic import ROOT, Connections, Target, make_body, make_message, started

SIZES = [(20, 1)] * 7 + [(60, 3)] * 2 + [(200, 6)]  # words of the state, questions
SMALL, GIANT = (20, 1), (300, 512)
CLOSED = (1, 4, 16)
SEEDS = itertools.count(1)  # no two loops ask the same: what was answered is kept


@dataclass
class Seen:
    answered: list[float] = field(default_factory=list)  # seconds of each
    rejected: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)  # by their kind: a status, or what became of the connection
    num_threads: int = 0
    memory_kb: list[int] = field(default_factory=list)  # at a constant pace


def percentile(values: list[float], share: float) -> str:
    """In milliseconds."""
    return f"{sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3:.0f}" if values else ""


def show(name: str, offered: float, seen: Seen, seconds: float) -> None:
    cells = [name, f"{offered:.1f}" if offered else "", f"{len(seen.answered) / seconds:.1f}"]
    cells += [percentile(seen.answered, share) for share in (0.5, 0.95, 0.99)]
    cells += [
        str(len(seen.rejected)),
        percentile(seen.rejected, 0.99),
        ", ".join(f"{n} {kind}" for kind, n in seen.errors.items()),
    ]
    quarters = [seen.memory_kb[len(seen.memory_kb) * part // 4] >> 10 for part in range(4)]
    cells += [", ".join(map(str, [*quarters, seen.memory_kb[-1] >> 10])), str(seen.num_threads)]
    print(f"| {' | '.join(cells)} |", flush=True)


async def ask(connections: Connections, seen: Seen, body: bytes) -> None:
    started_at = time.monotonic()
    try:
        status, _ = await connections.ask(make_message(body))
    except (OSError, asyncio.IncompleteReadError) as err:
        seen.errors[type(err).__name__] += 1
        return
    seconds = time.monotonic() - started_at
    if status == 200:
        seen.answered.append(seconds)
    elif status == 503:
        seen.rejected.append(seconds)
    else:
        seen.errors[str(status)] += 1


async def watch(target: Target, seen: Seen) -> None:
    while True:
        seen.memory_kb.append(target.status("VmRSS"))
        seen.num_threads = max(seen.num_threads, target.status("Threads"))
        await asyncio.sleep(0.25)


async def during(target: Target, run: Callable[[Connections, Seen], Awaitable[None]]) -> Seen:
    seen, connections = Seen(), Connections(target.port)
    watching = asyncio.create_task(watch(target, seen))
    await run(connections, seen)
    watching.cancel()
    connections.close()
    return seen


async def closed_loop(target: Target, num_clients: int, seconds: float) -> Seen:
    async def run(connections: Connections, seen: Seen) -> None:
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            rng = random.Random(f"{number} of {num_clients}")
            while time.monotonic() < until:
                await ask(connections, seen, make_body(rng, *rng.choice(SIZES)))

        await asyncio.gather(*(client(number) for number in range(num_clients)))

    return await during(target, run)


async def open_loop(
    target: Target, rate: float, seconds: float, sizes: list[tuple[int, int]], giant: Callable[[], bytes] | None = None
) -> Seen:
    async def run(connections: Connections, seen: Seen) -> None:
        rng, tasks = random.Random(next(SEEDS)), set()
        asking = asyncio.create_task(ask_giants(connections, giant)) if giant else None
        due = time.monotonic()
        until = due + seconds
        while due < until:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.add(asyncio.create_task(ask(connections, seen, make_body(rng, *rng.choice(sizes)))))
        await asyncio.gather(*tasks)
        if asking:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    return await during(target, run)


async def ask_giants(connections: Connections, giant: Callable[[], bytes]) -> None:
    while True:
        status, content = await connections.ask(make_message(giant()))
        if status != 200:
            raise SystemExit(f"the giant was answered {status}: {content[:200]!r}")


async def closed(target: Target, seconds: float) -> float:
    """The capacity: requests a second."""
    best = 0.0
    for num_clients in CLOSED:
        started_at = time.monotonic()
        seen = await closed_loop(target, num_clients, seconds)
        elapsed = time.monotonic() - started_at
        best = max(best, len(seen.answered) / elapsed)
        show(f"closed, {num_clients} clients", 0.0, seen, elapsed)
    return best


async def overload(target: Target, capacity: float, seconds: float, seconds_over: float) -> None:
    for times, duration in ((0.5, seconds), (2.0, seconds_over)):
        started_at = time.monotonic()
        seen = await open_loop(target, times * capacity, duration, SIZES)
        show(f"open, {times} of capacity", times * capacity, seen, time.monotonic() - started_at)


async def beside_giants(target: Target, capacity: float, seconds: float) -> None:
    rate = capacity / 10
    rng = random.Random(3)
    cases: list[tuple[str, Callable[[], bytes] | None]] = [
        ("small, alone", None),
        ("small, beside a giant about one state", lambda: make_body(rng, *GIANT, has_new_state=False)),
        ("small, beside a giant about new states", lambda: make_body(rng, *GIANT)),
    ]
    for name, giant in cases:
        started_at = time.monotonic()
        seen = await open_loop(target, rate, seconds, [SMALL], giant)
        show(name, rate, seen, time.monotonic() - started_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each line (default: 20)")
    parser.add_argument("--seconds-over", type=float, help="of the line above capacity (default: as the others)")
    parser.add_argument("--capacity", type=float, help="requests a second (default: what the closed loops find)")
    parser.add_argument("--only", nargs="+", choices=["open", "giant"], default=["open", "giant"])
    parser.add_argument("--flags", nargs="*", default=[], help="of the server, without their dashes: max-batch-ms=0")
    args = parser.parse_args()
    flags = ["--model", args.model, *(f"--{flag}" for flag in args.flags)]
    with tempfile.TemporaryDirectory() as folder, started(*flags, log=Path(folder) / "log") as target:
        asyncio.run(run_all(target, args))


async def run_all(target: Target, args: argparse.Namespace) -> None:
    heads = ("load", "offered/s", "answered/s", "p50 ms", "p95", "p99", "rejected", "p99 of those", "errors")
    print(f"| {' | '.join((*heads, 'MB resident', 'threads'))} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    capacity = args.capacity or await closed(target, args.seconds)
    if "open" in args.only:
        await overload(target, capacity, args.seconds, args.seconds_over or args.seconds)
    if "giant" in args.only:
        await beside_giants(target, capacity, args.seconds)


if __name__ == "__main__":
    main()
