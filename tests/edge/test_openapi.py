"""The document says what the server does: real answers and real errors are held to it, and its examples run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from onepass.edge import openapi
from onepass.edge.routes import ALIASES, ROUTES
from onepass.errors import ApiError
from onepass.wire.schema import parse_request
from tests.support.http_client import get, post, serve
from tests.support.live import Server

DOCUMENT = openapi.document(ALIASES)
EXAMPLES = DOCUMENT["paths"]["/v1/systemone"]["post"]["requestBody"]["content"]["application/json"]["examples"]


def resolve(item: dict[str, Any]) -> dict[str, Any]:
    """What a reference stands for."""
    while "$ref" in item:
        found: Any = DOCUMENT
        for step in item["$ref"].removeprefix("#/").split("/"):
            found = found[step]
        item = found
    return item


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


BODY = validator({"$ref": "#/components/schemas/Body"})


def check(path: str, method: str, status: int, headers: dict[str, str], body: bytes) -> None:
    """Fails on a status, a header or a body that the document does not have."""
    response = resolve(DOCUMENT["paths"][path][method.lower()]["responses"][str(status)])
    assert {name.lower() for name in response["headers"]} <= headers.keys(), (path, status)
    content_type = headers["content-type"].partition(";")[0]
    schema = response["content"][content_type]["schema"]
    validator(schema).validate(json.loads(body) if content_type == "application/json" else body.decode())


def test_it_is_openapi_3_1() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1")


def test_it_has_the_routes_that_there_are() -> None:
    assert {path: {route.method.lower()} for path, route in ROUTES.items()} == {
        path: set(item) for path, item in DOCUMENT["paths"].items()
    }
    assert {"/systemone", "/models", "/healthz", "/readyz"} <= DOCUMENT["paths"].keys()
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values():
            assert bool(operation["security"]) == ROUTES[path].needs_key == ("401" in operation["responses"])


def test_an_alias_is_documented_as_what_it_stands_for() -> None:
    ids = [operation.get("operationId") for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert ids.count("decide") == 1
    for alias, path in ALIASES:
        for method, operation in DOCUMENT["paths"][alias].items():
            meant = DOCUMENT["paths"][path][method]
            assert operation["summary"] == f"{meant['summary']}; another name of {path}"
            for key in operation.keys() | meant.keys() - {"summary", "operationId"}:
                assert key == "summary" or operation[key] == meant[key]


def test_it_has_every_error() -> None:
    documented = {int(name.removeprefix("Error")) for name in DOCUMENT["components"]["responses"]}
    assert documented == set(openapi.error_kinds()) == set(openapi.TEXTS)
    assert {kind for kinds in openapi.error_kinds().values() for kind in kinds} >= set(ApiError.__subclasses__())


def test_the_server_gives_it(live: Server) -> None:
    status, headers, body = live.request("GET", "/openapi.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == DOCUMENT


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_its_answer_is_as_documented(live: Server, name: str) -> None:
    example = EXAMPLES[name]["value"]
    BODY.validate(example)
    status, headers, body = live.request("POST", "/v1/systemone", json.dumps(example).encode())
    assert status == 200
    check("/v1/systemone", "POST", status, headers, body)
    check("/systemone", "POST", *live.request("POST", "/systemone", json.dumps(example).encode()))
    answers = json.loads(body)["answers"]
    assert {id_: answer["type"] for id_, answer in answers.items()} == {
        id_: question["type"] for id_, question in example["questions"].items()
    }


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.method == "GET"])
def test_the_other_answers_are_as_documented(live: Server, path: str) -> None:
    check(path, "GET", *live.request("GET", path))


BIG = json.dumps({"state": "x " * 40_000, "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
ERRORS = {  # name: (status, body, headers)
    "too long": (400, BIG, {}),
    "pictures": (400, b'{"state":"x","questions":{"q":{"type":"noul","instructions":"?"}},"images":{"a":"AA=="}}', {}),
    "no key": (401, b"{}", {}),
    "unknown coding": (415, b"{}", {"Content_Encoding": "br"}),
    "no JSON": (422, b"{", {}),
    "nothing": (422, b"{}", {}),
    "wrong everywhere": (422, b'{"state":1,"questions":{"a":{"type":"x"},"b":{"type":"score","criteria":{}}}}', {}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_as_documented(live: Server, locked: Server, name: str) -> None:
    expected, content, headers = ERRORS[name]
    server = locked if expected == 401 else live
    status, found, body = server.request("POST", "/v1/systemone", content, **headers)
    assert status == expected, body
    check("/v1/systemone", "POST", status, found, body)


def test_the_edge_errors_are_as_documented() -> None:
    """Those that need raw bytes or a server in a certain state."""
    requests = {
        411: b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\n\r\n",
        413: b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n",
        408: b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
        431: b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 70_000 + b"\r\n\r\n",
        500: post(b'"boom"'),
    }
    with serve(read_timeout_s=0.3) as running:
        for status, request in requests.items():
            response = running.ask(request)
            assert response.status == status
            check("/v1/systemone", "POST", status, response.headers, response.body)
        for status, request in {404: get("/nope"), 405: get("/health", method="PUT")}.items():
            response = running.ask(request)
            schema = DOCUMENT["components"]["responses"][f"Error{status}"]
            validator(schema["content"]["application/json"]["schema"]).validate(json.loads(response.body))
    with serve(is_loaded=False) as running:
        for method, path in (("POST", "/v1/systemone"), ("GET", "/health"), ("GET", "/v1/models")):
            response = running.ask(post(b"{}") if method == "POST" else get(path))
            check(path, method, 503, response.headers, response.body)


# What the schema allows is what the validation allows, but for what a schema cannot say

TEXTS = st.sampled_from(["", "a", {}, {"a": None}, [], [1], None, 3, True])
NAMES = st.sampled_from(["true", "yes", "no", "a", ""])
CRITERIA = st.one_of(
    TEXTS,
    st.dictionaries(NAMES, TEXTS, max_size=3),
    st.lists(TEXTS, max_size=3),
    st.sampled_from([["x"] * 10, ["x"] * 11, dict.fromkeys(map(str, range(256))), dict.fromkeys(map(str, range(255)))]),
)


def questions() -> Iterator[st.SearchStrategy[object]]:
    for kind in ("noul", "choice", "score", "other"):
        yield st.fixed_dictionaries({"type": st.just(kind)}, optional={"instructions": TEXTS, "criteria": CRITERIA})
    yield TEXTS


SOME_QUESTIONS = st.dictionaries(NAMES, st.one_of(*questions()), min_size=1, max_size=2)
REST = {
    "model": TEXTS,
    "encoding": st.sampled_from(["joint", "per_question", "x", None]),
    "images": TEXTS,
    "assets": TEXTS,
    "unknown": TEXTS,
}
BODIES = st.one_of(
    st.fixed_dictionaries({"state": st.just("x"), "questions": SOME_QUESTIONS}),
    st.fixed_dictionaries(
        {"state": TEXTS, "questions": st.just({"q": {"type": "noul", "instructions": "?"}})}, optional=REST
    ),
    st.fixed_dictionaries({}, optional={"state": TEXTS, "questions": st.one_of(TEXTS, SOME_QUESTIONS), **REST}),
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(BODIES)
def test_the_schema_and_the_validation_agree(body: dict[str, Any]) -> None:
    try:
        parse_request(json.dumps(body).encode())
        is_valid = True
    except ApiError:
        is_valid = False
    event(f"valid: {is_valid}")
    assert BODY.is_valid(body) == is_valid, body


def test_schemathesis_finds_nothing(locked: Server, tmp_path: Path) -> None:
    """Some 200 requests made up from the document, right ones and wrong ones, the same at each run, in 20 s at most.

    More of them, against a running server: `schemathesis run http://127.0.0.1:8017/openapi.json --max-examples 1000`
    """
    (tmp_path / "schemathesis.toml").write_text(
        # What the schema allows may still be too long, or a picture that is none
        '[checks]\npositive_data_acceptance.expected-statuses = ["2xx", "400"]\n'
    )
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{locked.url}/openapi.json", "--seed", "1"]
    command += ["--max-examples", "10", "--max-time", "20", "--phases", "coverage,fuzzing"]
    command += ["--header", "Authorization: Bearer sesame"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert re.search(r"\b\d\d+ generated", run.stdout), run.stdout[-500:]
