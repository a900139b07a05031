"""What `/metrics` says is what clients saw, with a bounded number of series; and the dashboard asks for what is there."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from onepass.edge import metrics
from onepass.status import ServerStatus, Status
from tests.support import ROOT
from tests.support.http_client import PATIENCE_S, Running, get, post, serve
from tests.support.live import Server
from tests.support.statuses import queue_status

DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text(encoding="utf-8"))
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]  # (name, labels) -> value


def parse(text: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all series that have these labels."""
    wanted = set(labels.items())
    return sum(number for (found, has), number in samples.items() if found == name and wanted <= has)


def scrape(running: Running) -> Samples:
    return parse(running.ask(get("/metrics")).body)


def test_counts_are_those_of_the_clients() -> None:
    """A mixed run: answered, refused in every way, expired and abandoned requests."""
    seen: Counter[int] = Counter()

    def ask(request: bytes) -> None:
        seen[running.ask(request).status] += 1

    with serve(api_keys=("key",), timeout_s=1.0) as running:
        key = "Authorization: Bearer key\r\n"
        for number in range(7):
            ask(post(b"%d" % number, headers=key))
        for request in (post(b"{", headers=key), post(b"{}"), get("/nope"), get("/health", method="BREW"), b"?\r\n"):
            ask(request)
        ask(get("/livez"))
        running.decider.gate.clear()
        with running.connect() as busy:
            busy.send(post(b"1", headers=key))
            running.wait_for_requests(1)
            ask(post(b'"too late"', headers=key))
            leaving = [running.connect().send(post(b"{}", headers=key)) for _ in range(3)]
            running.wait_for_requests(4)
            for client in leaving:
                client.socket.shutdown(socket.SHUT_WR)
                seen[client.read().status] += 1
                client.socket.close()
            running.decider.gate.set()
            seen[busy.read().status] += 1
        running.wait_for_no_connection()  # a write is counted after it
        samples = scrape(running)
    for status, count in seen.items():
        assert value(samples, "onepass_requests_total", status=str(status)) == count, status
    assert value(samples, "onepass_requests_total") == seen.total()
    assert value(samples, "onepass_requests_total", route="/v1/systemone", method="POST", status="200") == 8
    assert value(samples, "onepass_rows_total", outcome="answered") == 8
    assert value(samples, "onepass_rows_total", outcome="expired") == 1
    assert value(samples, "onepass_rows_total", outcome="cancelled") == 3
    assert value(samples, "onepass_input_tokens_total") == 7 * 12
    errors = {"deadline_exceeded": 1, "client_left": 3, "authentication_error": 1, "invalid_request": 1, "not_found": 1}
    for error, count in errors.items():
        assert value(samples, "onepass_request_errors_total", error=error) == count, error
    for stage in metrics.STAGES:
        count = {"read": 13, "parse": 12, "render": 12, "write": 12}.get(stage, 8)
        assert value(samples, "onepass_stage_seconds_count", stage=stage) == count, stage
    assert value(samples, "onepass_decision_seconds_count") == 12


def test_it_answers_at_once_while_the_model_loads_or_all_waits() -> None:
    with serve(is_loaded=False) as running:
        assert value(scrape(running), "onepass_ready") == 0
    with serve() as running, running.connect() as client:
        running.decider.gate.clear()
        client.send(post(b"1"))
        assert running.decider.told.get(timeout=PATIENCE_S)
        assert value(scrape(running), "onepass_ready") == 1


def test_what_clients_make_up_makes_no_new_series() -> None:
    with serve() as running, running.connect() as client:
        client.send(get("/nope", method="BREW")).read()
        num_series = len(parse(client.send(get("/metrics")).read().body))
        for number in range(50):
            client.send(get(f"/{number}", method=f"M{number}", headers=f"X-Request-Id: {number}\r\n")).read()
        samples = parse(client.send(get("/metrics")).read().body)
    assert value(samples, "onepass_requests_total", route="other", method="other", status="404") == 51
    assert len(samples) == num_series + 1  # the first scrape itself


def test_a_refused_connection_is_counted() -> None:
    with serve(max_connections=1) as running:
        with running.connect().send(post(b"{}")[:-1]) as held:
            running.wait_for_requests(1)
            with running.connect() as refused:
                assert refused.send(get("/livez")).read().status == 503
            held.send(b"}").read()
        running.wait_for_no_connection()
        assert value(scrape(running), "onepass_connections_refused_total") == 1


REQUEST = {
    "state": "The parcel is late. " * 150,
    "questions": {
        "a": {"type": "noul", "instructions": "Is it late?"},
        "b": {"type": "choice", "criteria": {"parcel": None, "letter": "On paper"}},
        "c": {"type": "score", "criteria": ["Calm", "Angry"]},
    },
    "encoding": "per_question",
}


def live_samples(live: Server) -> Samples:
    status, headers, body = live.request("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return parse(body)


def test_the_real_server_counts_rows_tokens_and_batches(live: Server) -> None:
    before = live_samples(live)
    states = [{**REQUEST, "state": f"{number}: {REQUEST['state']}"} for number in (1, 2, 1)]
    other = {**states[0], "questions": {"d": {"type": "noul", "instructions": "Is it a letter?"}}}
    answers = [live.post(request) for request in (*states, other)]
    refused = live.post({"state": "x"})
    after = live_samples(live)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert refused[0] == 422
    tokens = sum(document["usage"]["input_tokens"] for _, document in answers)
    assert grown("onepass_requests_total", status="200", route="/v1/systemone") == 4
    assert grown("onepass_requests_total", status="422") == 1
    assert grown("onepass_rows_total", outcome="answered") == 10
    assert grown("onepass_batch_rows_sum") == 7  # the third asks what the first did
    assert 3 <= grown("onepass_batch_rows_count") <= 7
    assert grown("onepass_input_tokens_total") == tokens
    kinds = {kind: grown("onepass_model_tokens_total", kind=kind) for kind in ("computed", "reused", "repeated")}
    assert sum(kinds.values()) == tokens
    assert kinds["repeated"] == answers[2][1]["usage"]["input_tokens"]
    assert grown("onepass_state_cache_hits_total") >= 1
    for stage in metrics.STAGES[:-1]:  # the last write may still be going on
        assert grown("onepass_stage_seconds_count", stage=stage) == (5 if stage == "read" else 4), stage
    facts = json.loads(live.request("GET", "/health")[2])
    shown = {label: facts[label] for label in ("model", "backend", "device", "dtype")}
    assert value(after, "onepass_model_info", **shown) == 1
    (digest,) = {dict(labels)["digest"] for name, labels in after if name == "onepass_model_info"}
    assert re.fullmatch("[0-9a-f]{64}", digest)


def test_buckets_of_batches_are_powers_of_two() -> None:
    queue = queue_status(batch_rows=[2, 1, 1], rows=7)  # 1, 1, 2 and 3 rows
    status = Status(error=None, model="fake", queue=queue)
    server = ServerStatus(decider=status, open_connections=0, refused_connections=0, threads_alive=1)
    samples = parse(metrics.Metrics(lambda: server).render())
    counts = {
        dict(labels)["le"]: number for (name, labels), number in samples.items() if name == "onepass_batch_rows_bucket"
    }
    assert counts == {"1.0": 2, "2.0": 3, "4.0": 4, "+Inf": 4}
    assert value(samples, "onepass_batch_rows_sum") == 7


# The dashboard

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
SERIES = re.compile(r"\b((?:onepass|process)_\w+)(\{[^}]*\})?")
GIVEN_BY_PROMETHEUS = {"job", "instance"}


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_asks_for_series_that_are_there(live: Server, query: str) -> None:
    live.post(REQUEST)
    live.post({})  # so that there are errors too
    samples = live_samples(live)
    found = SERIES.findall(query)
    assert found, query
    labels_of_all: set[str] = set()
    for name, selector in found:
        kinds = [dict(labels) for (found_name, labels) in samples if found_name == name]
        assert kinds, name
        labels_of_all |= kinds[0].keys()
        for label, operator, wanted in re.findall(r"(\w+)(=~|=)\"([^\"]*)\"", selector):
            if label in GIVEN_BY_PROMETHEUS:
                continue
            given = {kind[label] for kind in kinds}
            if label == "status":  # none of these has to have happened
                assert operator == "=~"
                continue
            wanted_values = wanted.split("|") if operator == "=~" else [wanted]
            assert set(wanted_values) <= given, (label, wanted)
    for group in re.findall(r"by \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels_of_all, query
    assert query.count("(") == query.count(")")


def test_the_dashboard_shows_every_metric_of_ours(live: Server) -> None:
    live.post(REQUEST)
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in live_samples(live) if name.startswith("onepass_")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for query in QUERIES for name, _ in SERIES.findall(query)}
    assert names <= shown


def test_the_documentation_explains_every_metric_and_no_other(live: Server) -> None:
    table = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").split("\n## Stages")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    explained = {
        name: set(re.findall(r"`(\w+)`", labels)) for names, labels in rows for name in re.findall(r"`(\w+)`", names)
    }
    live.post(REQUEST)
    live.post({})
    found: dict[str, set[str]] = {}
    for name, labels in live_samples(live):
        found.setdefault(re.sub(r"_(bucket|sum|count)$", "", name), set()).update(dict(labels).keys() - {"le"})
    assert explained == found


def test_the_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
