"""Where the server listens besides plain TCP: a Unix socket and TLS, both as curl and raw sockets see them."""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from onepass.config import Config
from onepass.edge.listener import make_tls_context, remove_stale_socket
from onepass.errors import StartupError
from tests.support.http_client import PATIENCE_S, Client, Running, get, post, serve
from tests.support.program import run


def curl(*arguments: str) -> tuple[int, str, str]:
    """(exit code, body, status)"""
    command = ["curl", "--silent", "--max-time", "10", "--write-out", "\n%{http_code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    body, _, status = done.stdout.rpartition("\n")
    return done.returncode, body, status


# Unix socket


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "onepass.sock")


def test_curl_asks_over_a_unix_socket(path: str) -> None:
    with serve(uds=path) as running:
        assert running.http.url == f"http+unix:{path}"
        assert curl("--unix-socket", path, "http://localhost/v1/systemone", "-d", "[1]") == (0, "[1]", "200")
        assert curl("--unix-socket", path, "http://localhost/livez")[2] == "200"
        with running.connect() as client:
            assert client.send(post(b"{}")).read().status == 200
            assert client.is_kept()
    assert not os.path.exists(path)


def test_a_client_on_a_unix_socket_that_leaves_is_noticed(path: str) -> None:
    with serve(uds=path) as running:
        running.decider.gate.clear()
        client = running.connect().send(post(b"{}"))
        assert sorted(running.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
        client.socket.close()
        running.wait_for_no_connection()


@pytest.mark.parametrize(("mode", "bits"), [("600", 0o600), ("660", 0o660)])
def test_the_socket_has_its_permissions_from_the_start(path: str, mode: str, bits: int) -> None:
    with serve(uds=path, uds_mode=mode):
        assert stat.S_IMODE(os.stat(path).st_mode) == bits


def test_a_socket_that_a_killed_server_left_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with serve(uds=path) as running:
        assert running.ask(get("/livez")).status == 200


def refusal(path: str) -> str:
    with pytest.raises(StartupError) as caught:
        remove_stale_socket(path)
    return str(caught.value)


def test_what_is_not_a_stale_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("precious")
    assert refusal(path) == f"--uds {path} is there already and is not a socket"
    assert Path(path).read_text() == "precious"
    os.unlink(path)
    with serve(uds=path) as running:
        assert refusal(path) == f"cannot listen on {path}: another process does"
        assert running.ask(get("/livez")).status == 200


def test_a_socket_that_another_server_put_there_is_not_removed(path: str) -> None:
    with serve(uds=path):
        os.unlink(path)
        other = socket.socket(socket.AF_UNIX)
        other.bind(path)
    assert os.path.exists(path)
    other.close()


@pytest.mark.parametrize("name", ["no/such/folder.sock", "x" * 120])
def test_a_path_that_cannot_be_is_one_clear_line(tmp_path: Path, name: str) -> None:
    with run("--uds", str(tmp_path / name), ready=False) as program:
        code, log = program.end()
        assert (code, log.count("\n")) == (1, 1)
        assert log.startswith(f"onepass: cannot listen on {tmp_path / name}: ")


def test_the_socket_goes_when_the_program_ends(path: str) -> None:
    with run("--uds", path, ready=False) as program:
        assert f"http+unix:{path}" in program.log_line("serving fake at")
        with Client(path) as client:
            assert client.send(get("/health")).read().status == 200
        program.process.terminate()
        assert program.end()[0] == 0
    assert not os.path.exists(path)


# TLS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    mine, other = authority.issue_cert("localhost", "127.0.0.1"), authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    mine.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    mine.private_key_pem.write_to_path(str(folder / "key.pem"))
    mine.private_key_and_cert_chain_pem.write_to_path(str(folder / "both.pem"))
    other.private_key_pem.write_to_path(str(folder / "other.pem"))
    (folder / "text.pem").write_text("hello")
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def secure(files: dict[str, str]) -> Iterator[Running]:
    with serve(tls_cert=files["cert"], tls_key=files["key"], read_timeout_s=1.0) as running:
        yield running


def test_curl_asks_over_tls(secure: Running, files: dict[str, str]) -> None:
    url = secure.http.url
    assert url.startswith("https://127.0.0.1:")
    assert curl("--cacert", files["ca"], f"{url}/v1/systemone", "-d", "[1]") == (0, "[1]", "200")
    assert curl("--cacert", files["ca"], "--tls-max", "1.2", f"{url}/livez")[2] == "200"
    assert curl("--cacert", files["ca"], "--tls-max", "1.1", f"{url}/livez")[0] == 35  # no common version
    assert curl(f"{url}/livez")[0] == 60  # a certificate that nobody vouches for


def test_a_certificate_and_its_key_may_be_one_file(files: dict[str, str]) -> None:
    with serve(tls_cert=files["both"]) as running:
        assert curl("--cacert", files["ca"], f"{running.http.url}/livez")[2] == "200"


def test_a_connection_in_tls_is_kept_and_ends_properly(secure: Running, trusting: ssl.SSLContext) -> None:
    with secure.connect(trusting) as client:
        big = b'"' + b"a" * 3_000_000 + b'"'
        assert client.send(post(big)).read().body == big
        assert client.is_kept()
        response = client.send(post(b"{}", headers="Transfer-Encoding: chunked\r\n")).read()
        assert (response.status, response.headers["connection"]) == (400, "close")
        assert client.is_closed()  # told by close_notify: an end without it raises here


def test_an_early_refusal_reaches_a_client_that_still_sends_in_tls(secure: Running, trusting: ssl.SSLContext) -> None:
    with secure.connect(trusting) as client:
        client.send(post(b"a" * 500_000, path="/nope"))
        assert client.read().status == 404


def test_a_request_in_tls_that_stalls_is_told_so(secure: Running, trusting: ssl.SSLContext) -> None:
    with secure.connect(trusting) as client:
        assert client.send(post(b"{}")[:-1]).read().status == 408
        assert client.is_closed()


def test_a_client_that_reads_nothing_in_tls_does_not_hold_its_thread(secure: Running, trusting: ssl.SSLContext) -> None:
    with secure.connect(trusting) as client:
        client.send(post(b'"' + b"a" * 16_000_000 + b'"'))
        secure.wait_for_no_connection()


def test_a_client_in_tls_that_leaves_is_noticed(secure: Running, trusting: ssl.SSLContext) -> None:
    secure.decider.gate.clear()
    client = secure.connect(trusting).send(post(b"{}"))
    assert sorted(secure.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
    client.socket.close()
    secure.wait_for_no_connection()


def test_stalled_handshakes_block_nobody_and_end(secure: Running, files: dict[str, str]) -> None:
    silent = [Client(secure.address) for _ in range(30)]
    dripping = Client(secure.address).send(b"\x16\x03\x01")
    assert curl("--cacert", files["ca"], f"{secure.http.url}/livez")[2] == "200"
    until = time.monotonic() + PATIENCE_S
    while not select.select([dripping.socket], [], [], 0.05)[0]:
        assert time.monotonic() < until
        dripping.send(b"\x02")
    for client in (*silent, dripping):
        assert client.is_closed()
        client.socket.close()
    secure.wait_for_no_connection()


def test_a_handshake_that_stalls_makes_room_for_another(files: dict[str, str], trusting: ssl.SSLContext) -> None:
    with serve(tls_cert=files["both"], max_connections=1) as running, Client(running.address) as silent:
        running.wait_for_idle(1)
        with running.connect(trusting) as client:
            assert client.send(get("/livez")).read().status == 200
        assert silent.is_closed()


def test_a_connection_too_many_in_tls_is_closed_and_logged_as_unanswered(
    files: dict[str, str], trusting: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with serve(tls_cert=files["both"], max_connections=1) as running, running.connect(trusting) as held:
        held.send(post(b"{}")[:-1])
        running.wait_for_requests(1)
        with Client(running.address) as refused:
            assert refused.is_closed()
        assert held.send(b"}").read().status == 200
        assert running.http.num_refused == 1
    (fields,) = (record.fields for record in caplog.records if getattr(record, "fields", {}).get("reason"))
    assert (fields["status"], fields["error"], fields["reason"]) == (0, "overloaded_error", "connections")


def test_plain_http_to_a_tls_port_is_closed_without_a_traceback(
    secure: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(secure.address) as client:
        client.send(get("/livez"))
        received = client.socket.recv(4096)
        assert b"HTTP" not in received
    secure.wait_for_no_connection()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("none", "key", "--tls-cert none cannot be read: No such file"),
        ("cert", "none", "--tls-key none cannot be read: No such file"),
        ("cert", "other", "not a certificate and its own key"),
        ("text", "key", "not a certificate and its own key"),
        ("cert", "text", "not a certificate and its own key"),
        ("cert", "", "not a certificate and its own key"),
    ],
)
def test_a_wrong_file_is_named(files: dict[str, str], cert: str, key: str, said: str) -> None:
    names = {**files, "none": "none", "": ""}
    with pytest.raises(StartupError) as caught:
        make_tls_context(Config(tls_cert=names[cert], tls_key=names[key]))
    assert said in str(caught.value)
    assert f"--tls-cert {names[cert]}" in str(caught.value) or f"--tls-key {names[key]}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_encrypted_key_is_refused_and_no_password_asked_for(files: dict[str, str], tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(files["key"]).read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"sesame"),
    )
    (tmp_path / "encrypted.pem").write_bytes(encrypted)
    with pytest.raises(StartupError, match="not encrypted"):
        make_tls_context(Config(tls_cert=files["cert"], tls_key=str(tmp_path / "encrypted.pem")))


# Warnings


@pytest.mark.parametrize(
    ("flags", "keys", "said"),
    [
        (["--host", "0.0.0.0"], "", "WARNING server: ANYONE WHO REACHES http://0.0.0.0:"),
        (["--host", "0.0.0.0"], "sesame", "WARNING server: keys and states cross the network in the clear"),
        ([], "", None),
    ],
)
def test_an_open_door_is_warned_of(tmp_path: Path, flags: list[str], keys: str, said: str | None) -> None:
    if keys:
        (tmp_path / "keys").write_text(keys)
        flags = [*flags, "--api-key-file", str(tmp_path / "keys")]
    with run(*flags, "--log-json", ready=False) as program:
        seen = json.loads(program.log_line('"message": "listening at'))
        assert seen["level"] == "INFO"
        line = json.loads(next(iter(program.process.stderr or ())))
        program.process.terminate()
        program.end()
    shown = f"{line['level']} {line['logger']}: {line['message']}"
    assert shown.startswith(said) if said else line["level"] == "INFO"
