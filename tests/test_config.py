"""Flags, environment, defaults, and the one line for what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from onepass.config import Config, load_config
from onepass.errors import StartupError


def test_a_flag_beats_the_environment_which_beats_the_default() -> None:
    assert load_config([], {}).port == 8017
    assert load_config([], {"ONEPASS_PORT": "9000"}).port == 9000
    assert load_config(["--port", "9001"], {"ONEPASS_PORT": "9000"}).port == 9001


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("no", False), ("", False)])
def test_a_switch_reads_the_usual_words(text: str, value: bool) -> None:
    assert load_config([], {"ONEPASS_STRICT_MODEL": text}).strict_model is value


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            ["--allowed-origins", "https://a.example, foo"],
            {},
            "--allowed-origins: 'foo' is no origin such as https://example.com, nor *",
        ),
        (["--port", "x"], {}, "--port must be a whole number, not 'x'"),
        (["--port", "65536"], {}, "--port must be from 0 to 65535, not 65536"),
        ([], {"ONEPASS_PORT": "x"}, "ONEPASS_PORT must be a whole number, not 'x'"),
        (["--batch-window-ms", "1001"], {}, "--batch-window-ms must be from 0 to 1000, not 1001.0"),
        (["--batch-window-ms", "nan"], {}, "--batch-window-ms must be from 0 to 1000, not nan"),
        (["--backend", "slow"], {}, "--backend must be one of auto, fast, transformers, not 'slow'"),
        (["--max-queued-rows", "1"], {}, "--max-queued-rows must be from 512 to 1048576, not 1"),
        (
            ["--device", "cpu", "--dtype", "float16"],
            {},
            "--dtype float16 needs --device cuda; on a CPU use float32 or bfloat16",
        ),
        (["--colour"], {}, "unrecognized arguments: --colour (see --help)"),
        (["--api-key-file", "/nowhere"], {}, "--api-key-file /nowhere cannot be read: No such file or directory"),
        ([], {"ONEPASS_STRICT_MODEL": "maybe"}, "ONEPASS_STRICT_MODEL must be 1 or 0, not 'maybe'"),
        ([], {"ONEPASS_API_KEY": " "}, "ONEPASS_API_KEY is set but empty; unset it to serve without a key"),
        (["--host", ""], {}, "--host must be an address; 0.0.0.0 listens on all"),
        ([], {"ONEPASS_API_KEY": "a b"}, "ONEPASS_API_KEY: an API key must be printable ASCII without blanks"),
        (
            [],
            {"ONEPASS_APIKEY": "sesame"},
            "the environment variable ONEPASS_APIKEY is no setting; did you mean ONEPASS_API_KEY?",
        ),
        (
            [],
            {"ONEPASS_NO_IMAGES": "1"},
            "the environment variable ONEPASS_NO_IMAGES is no setting; did you mean ONEPASS_IMAGES?",
        ),
        ([], {"onepass_host": "::"}, "the environment variable onepass_host is no setting; did you mean ONEPASS_HOST?"),
        ([], {"ONEPASS_QQ": "1"}, "the environment variable ONEPASS_QQ is no setting; see --help"),
        ([], {"ONEPASS_HOST_PORT": "9000"}, "the environment variable ONEPASS_HOST_PORT is no setting; did you mean ONEPASS_PORT?"),
        ([], {"ONEPASS_PORT": "http://x"}, "ONEPASS_PORT must be a whole number, not 'http://x'"),
        (["--uds", "s", "--port", "1"], {}, "--uds and --port exclude each other; give one of them"),
        (["--uds", "s", "--host", "::1"], {}, "--uds and --host exclude each other; give one of them"),
        (["--port", "1"], {"ONEPASS_UDS": "s"}, "ONEPASS_UDS and --port exclude each other; give one of them"),
        (
            [],
            {"ONEPASS_UDS": "s", "ONEPASS_HOST": "::"},
            "ONEPASS_UDS and ONEPASS_HOST exclude each other; give one of them",
        ),
        (["--uds-mode", "660"], {}, "--uds-mode needs --uds"),
        (["--uds-mode", "660", "--uds", ""], {}, "--uds-mode needs --uds"),
        (["--tls-key", "k"], {}, "--tls-key needs --tls-cert"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_that_says_what_is_allowed(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(StartupError) as caught:
        load_config(argv, environ)
    assert str(caught.value) == message


def test_keys_come_from_the_environment_and_a_file_and_are_never_printed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n third \n")
    config = load_config(["--api-key-file", str(file)], {"ONEPASS_API_KEY": "first"})
    assert config.api_keys == ("first", "second", "third")
    assert "first" not in repr(config)
    file.write_text("\n")
    with pytest.raises(StartupError, match="holds no key"):
        load_config(["--api-key-file", str(file)], {})


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--revision needs a Hub repository"):
        Config(model=str(tmp_path), revision="main")


LINKS = {  # what Kubernetes sets for a service named onepass and one named onepass-gpu
    "ONEPASS_SERVICE_HOST": "10.0.0.1",
    "ONEPASS_SERVICE_PORT": "80",
    "ONEPASS_SERVICE_PORT_HTTP": "80",
    "ONEPASS_PORT": "tcp://10.0.0.1:80",
    "ONEPASS_PORT_80_TCP": "tcp://10.0.0.1:80",
    "ONEPASS_PORT_80_TCP_PROTO": "tcp",
    "ONEPASS_PORT_80_TCP_PORT": "80",
    "ONEPASS_PORT_80_TCP_ADDR": "10.0.0.1",
    "ONEPASS_GPU_SERVICE_HOST": "10.0.0.2",
    "ONEPASS_GPU_SERVICE_PORT": "80",
    "ONEPASS_GPU_PORT": "udp://[fd00::2]:80",
    "ONEPASS_GPU_PORT_80_UDP_ADDR": "fd00::2",
}


def test_links_of_kubernetes_are_no_settings() -> None:
    assert load_config([], LINKS) == Config()
    assert load_config([], LINKS | {"ONEPASS_PORT": "9000"}).port == 9000  # the pod's own variable goes first
    assert load_config([], {"PATH": "/", "ONEPASSWORD": "x"}) == Config()


def test_a_unix_socket_as_a_flag_beats_an_address_in_the_environment() -> None:
    image = {"ONEPASS_HOST": "0.0.0.0", "ONEPASS_PORT": "8017"}
    assert load_config(["--uds", "s"], image).uds == "s"
    assert load_config(["--uds", ""], image | {"ONEPASS_UDS": "s"}).host == "0.0.0.0"
    assert load_config([], {"ONEPASS_UDS": "s", "ONEPASS_UDS_MODE": "660"}).uds_mode == "660"
