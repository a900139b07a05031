"""Flags, environment, defaults, and the one line for what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from config import Config, load_config
from errors import StartupError


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
    ],
)
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
