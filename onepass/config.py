"""The settings: one frozen `Config`, from whose fields the flags, the environment and the help are made."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from onepass import find_shipped
from onepass.errors import StartupError

STARTER_MODEL = find_shipped("model")
ENVIRONMENT_PREFIX = "ONEPASS_"
API_KEY_VARIABLE = "ONEPASS_API_KEY"
ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s,]+")
# NAME=value of what Kubernetes sets in every pod for a service whose name is onepass or begins with onepass-
SERVICE_LINK = re.compile(
    r"ONEPASS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    r"|ONEPASS_(\w+_)?PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)
MIN_IDLE_TIMEOUT_S = 65  # the official SDK reuses a connection for up to 30 s, load balancers for 60 s


def _setting(default: Any, help: str, **limits: Any) -> Any:
    """A field that is also a flag; `limits` may hold `choices`, `minimum`, `maximum` and `metavar`."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set. Raises `StartupError` when made with values that cannot work."""

    model: str = _setting(str(STARTER_MODEL), "checkpoint folder, or a repository on the Hugging Face Hub")
    revision: str = _setting("", "branch, tag or commit of a Hub repository", metavar="REV")
    require_manifest: bool = _setting(False, "refuse a checkpoint that has no SHA256SUMS or weights.sha256")
    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8017, "port to listen on; 0 picks a free one", minimum=0, maximum=65535)
    uds: str = _setting("", "listen on this Unix socket instead of host and port", metavar="PATH")
    uds_mode: str = _setting("600", "who may connect to it: permissions of the socket, in octal", metavar="MODE")
    tls_cert: str = _setting("", "serve HTTPS: certificate and its chain, PEM", metavar="FILE")
    tls_key: str = _setting("", "the certificate's key, PEM; default: it is in --tls-cert", metavar="FILE")
    backend: str = _setting("auto", "whose forward pass runs", choices=("auto", "fast", "transformers"))
    device: str = _setting("auto", "where it runs", choices=("auto", "cpu", "cuda"))
    dtype: str = _setting("auto", "number format of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    encoding: str = _setting(
        "auto", "questions in one prompt or one prompt each", choices=("auto", "joint", "per_question")
    )
    served_name: str = _setting("", "model name in answers; default: the folder's or repository's")
    strict_model: bool = _setting(False, "refuse a request that names another model")
    api_key_file: str = _setting("", "file of accepted API keys, one a line", metavar="FILE")
    allowed_origins: str = _setting("", "origins that browsers may call from, comma-separated, or *", metavar="LIST")
    batch_window_ms: float = _setting(0.0, "wait this long for more work before a batch", minimum=0, maximum=1000)
    max_batch_ms: float = _setting(
        20.0,
        "what a request with more than 16 rows may take of the model at a time; 0: any time",
        minimum=0,
        maximum=60000,
    )
    max_batch_rows: int = _setting(32, "prompt rows in one batch", minimum=1, maximum=4096)
    max_batch_tokens: int = _setting(4096, "tokens in one batch, padding counted", minimum=64, maximum=1 << 22)
    max_queued_rows: int = _setting(2048, "prompt rows that may wait; above it 503", minimum=512, maximum=1 << 20)
    max_key_rows: int = _setting(
        1024, "prompt rows of one API key that may wait, where there are several keys", minimum=512, maximum=1 << 20
    )
    batch_invariant: bool = _setting(False, "bit-identical answers whatever shares the batch: each row runs alone")
    share_state: bool = _setting(True, "compute what questions have in common once, not for each of them")
    state_cache_mb: int = _setting(
        256, "memory for states that come again; 0: nothing is kept, answers neither", minimum=0, maximum=1 << 20
    )
    graph_memory_mb: int = _setting(8192, "CUDA: memory for captured graphs; 0: none", minimum=0, maximum=1 << 20)
    fast_start: bool = _setting(False, "CUDA: serve once the common graphs are captured, the rest while idle")
    max_prompt_tokens: int = _setting(0, "longest prompt row; 0: what the model reads", minimum=0, maximum=1 << 22)
    images: bool = _setting(True, "load the checkpoint's vision tower and take pictures")
    max_pixels: int = _setting(
        448 * 448, "pixels that a picture is shrunk to at the most", minimum=1024, maximum=1 << 24
    )
    image_cache_mb: int = _setting(
        256, "memory for what the vision tower made of pictures that come again; 0: none", minimum=0, maximum=1 << 20
    )
    max_connections: int = _setting(1024, "open connections; above it 503", minimum=1, maximum=65536)
    max_wait_s: float = _setting(
        5.0,
        "a request that would wait for longer, by the measured rate, gets 503 at once; 0: none does",
        minimum=0,
        maximum=3600,
    )
    timeout_s: float = _setting(30.0, "longest wait in the queue", minimum=0.1, maximum=3600)
    read_timeout_s: float = _setting(20.0, "longest time for a request to arrive", minimum=0.1, maximum=3600)
    idle_timeout_s: float = _setting(75.0, "keep an unused connection", minimum=MIN_IDLE_TIMEOUT_S, maximum=86400)
    drain_s: float = _setting(20.0, "time to finish queued work after SIGTERM", minimum=0, maximum=3600)
    log_json: bool = _setting(False, "log lines as JSON objects")
    verbose: bool = _setting(False, "log every batch and startup step")
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # no flag: other users can read a command line

    def __post_init__(self) -> None:
        for item in _flags():
            _check(item, getattr(self, item.name))
        if self.revision and Path(self.model).is_dir():
            raise StartupError(f"--revision needs a Hub repository, but --model {self.model} is a folder")
        if self.device == "cpu" and self.dtype == "float16":
            raise StartupError("--dtype float16 needs --device cuda; on a CPU use float32 or bfloat16")
        for origin in filter(None, (part.strip() for part in self.allowed_origins.split(","))):
            if not ORIGIN.fullmatch(origin):
                raise StartupError(f"--allowed-origins: {origin!r} is no origin such as https://example.com, nor *")
        if not self.host:
            raise StartupError("--host must be an address; 0.0.0.0 listens on all")
        if not re.fullmatch("[0-7]{3}", self.uds_mode):
            raise StartupError(f"--uds-mode must be three octal digits, such as 660, not {self.uds_mode!r}")
        if self.tls_key and not self.tls_cert:
            raise StartupError("--tls-key needs --tls-cert")
        if self.batch_invariant and self.fast_start:
            raise StartupError("--fast-start changes how a row is computed while serving; not with --batch-invariant")

    @property
    def is_starter(self) -> bool:
        """Whether the checkpoint is the one shipped here, whose manifest is the top-level SHA256SUMS."""
        return Path(self.model).resolve() == STARTER_MODEL


def _flags(names: Collection[str] | None = None) -> list[Field[Any]]:
    return [item for item in fields(Config) if "help" in item.metadata and (names is None or item.name in names)]


def flag_name(item: Field[Any]) -> str:
    return "--" + item.name.replace("_", "-")


def _check(item: Field[Any], value: Any) -> None:
    choices, low, high = (item.metadata.get(key) for key in ("choices", "minimum", "maximum"))
    if choices and value not in choices:
        raise StartupError(f"{flag_name(item)} must be one of {', '.join(choices)}, not {value!r}")
    if low is not None and not low <= value <= high:  # NaN fails too
        raise StartupError(f"{flag_name(item)} must be from {low} to {high}, not {value}")


def _convert(item: Field[Any], text: str, source: str) -> Any:
    """`text` as the field's type; `source` (a flag or a variable) is named when it does not fit."""
    kind: Any = type(item.default)
    try:
        if kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[
                text.lower()
            ]
        return kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "1 or 0", int: "a whole number", float: "a number"}[kind]
        raise StartupError(f"{source} must be {wanted}, not {text!r}") from None


class Parser(argparse.ArgumentParser):
    """A command line that does not fit is a `StartupError`, as is any other setting that cannot work."""

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message} (see --help)")


def add_flags(parser: argparse._ActionsContainer, names: Collection[str] | None = None) -> None:
    """A flag for every setting, or for those of `names`. What is not given is `MISSING`; `read_config` goes on."""
    for item in _flags(names):
        shown = (
            "" if item.default in ("", False) else f" (default: {'model/' if item.name == 'model' else item.default})"
        )
        text = item.metadata["help"].replace("%", "%%") + shown
        options: dict[str, Any] = {"dest": item.name, "default": MISSING, "help": text}
        if isinstance(item.default, bool):
            parser.add_argument(flag_name(item), action=argparse.BooleanOptionalAction, **options)
        else:
            choices = item.metadata.get("choices")
            metavar = item.metadata.get("metavar") or (
                "|".join(choices) if choices else type(item.default).__name__.upper()
            )
            parser.add_argument(flag_name(item), metavar=metavar, **options)


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those that are settings. Raises `StartupError` for one that is named as a setting and is none.

    It would else be passed over: mistyped, ONEPASS_API_KEY would leave the server open to all.
    """
    settings = {ENVIRONMENT_PREFIX + item.name.upper() for item in _flags()} | {API_KEY_VARIABLE}
    found: dict[str, str] = {}
    for name, value in environ.items():
        if not name.upper().startswith(ENVIRONMENT_PREFIX) or SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        if name not in settings:
            by_ending = {setting.removeprefix(ENVIRONMENT_PREFIX): setting for setting in sorted(settings)}
            nearest = difflib.get_close_matches(name[len(ENVIRONMENT_PREFIX) :].upper(), by_ending, n=1)
            advice = f"did you mean {by_ending[nearest[0]]}?" if nearest else "see --help"
            raise StartupError(f"the environment variable {name} is no setting; {advice}")
        found[name] = value
    return found


def _read_keys(path: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    found: list[tuple[str, str]] = []  # (where it stands, the key)
    if API_KEY_VARIABLE in environ:
        found.append((API_KEY_VARIABLE, environ[API_KEY_VARIABLE].strip()))
        if not found[0][1]:  # perhaps a secret that was not filled in: better no server than an open one
            raise StartupError(f"{API_KEY_VARIABLE} is set but empty; unset it to serve without a key")
    if path:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as err:
            reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
            raise StartupError(f"--api-key-file {path} cannot be read: {reason}") from None
        keys = [(f"{path}:{number}", line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
        if not keys:
            raise StartupError(f"--api-key-file {path} holds no key; put one a line")
        found += keys
    for where, key in found:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise StartupError(f"{where}: an API key must be printable ASCII without blanks")
    return tuple(key for _, key in found)


def _check_listening(uds: str, sources: Mapping[str, str]) -> None:
    """Raises `StartupError` where one of two ways to listen would be passed over.

    The flag --uds beats the variables of an address, as a flag beats its own: a container image sets those.
    """
    if not uds:
        if "uds_mode" in sources:
            raise StartupError(f"{sources['uds_mode']} needs --uds")
        return
    for name in ("host", "port"):
        if name in sources and (sources["uds"] != "--uds" or sources[name].startswith("--")):
            raise StartupError(f"{sources['uds']} and {sources[name]} exclude each other; give one of them")


def load_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """The server's settings from flags, then the environment, then the defaults. Raises `StartupError`, one line."""
    parser = Parser(
        prog="server.py",
        description="Serve System One decisions: POST /v1/systemone.",
        epilog=f"Each flag is also a variable, such as {ENVIRONMENT_PREFIX}PORT; the flag wins; no other may begin so. "
        f"A key comes only from {API_KEY_VARIABLE} or --api-key-file.",
        allow_abbrev=False,
    )
    add_flags(parser)
    return read_config(vars(parser.parse_args(argv)), environ)


def read_config(
    given: Mapping[str, Any], environ: Mapping[str, str] = os.environ, names: Collection[str] | None = None
) -> Config:
    """The settings from what a parser with `add_flags(parser, names)` found, then the environment, then the defaults.

    Raises `StartupError`, one line.
    """
    environ = own_variables(environ)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}  # the flag or the variable that a value comes from
    for item in _flags(names):
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        if given[item.name] is not MISSING:
            value, sources[item.name] = given[item.name], flag_name(item)
        elif variable in environ:
            value, sources[item.name] = environ[variable], variable
        else:
            continue
        values[item.name] = _convert(item, value, sources[item.name]) if isinstance(value, str) else value
    _check_listening(values.get("uds", ""), sources)
    keys = _read_keys(values.get("api_key_file", ""), environ) if names is None else ()
    return Config(**values, api_keys=keys)
