"""The program: start order, signals, shutdown. `onepass/edge/` says what is answered, and how."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from onepass.config import Config, load_config
from onepass.decider import Decider
from onepass.edge.handler import HttpServer
from onepass.edge.routes import ROUTES
from onepass.errors import StartupError
from onepass.logs import StopSignal, allow_many_files, set_up_logging

logger = logging.getLogger("server")  # not __name__: run as a program that would be "__main__"

WRITE_GRACE_S = 2.0  # after the queue is done, handlers get this long to send what they have, and clients to read it
EXIT_CONFIGURATION, EXIT_FAILURE = 2, 1


def announce(server: HttpServer) -> None:
    server.decider.ready.wait()
    facts = server.decider.status().document()
    said = " ".join(
        f"{key}={facts.get(key)}" for key in ("backend", "device", "dtype", "kernels", "encoding", "revision")
    )
    logger.info("serving %s at %s: %s", facts["model"], server.url, said)


def warn_if_open(config: Config, url: str) -> None:
    is_local = bool(config.uds) or config.host in ("127.0.0.1", "::1", "localhost")
    if is_local:
        return
    if not config.api_keys:
        logger.warning("ANYONE WHO REACHES %s MAY USE THIS SERVER: no API key is set (--api-key-file)", url)
    elif not config.tls_cert:
        logger.warning("keys and states cross the network in the clear: put TLS in front, or use --tls-cert")


def watch(decider: Decider, stop: StopSignal) -> None:
    decider.dead.wait()
    stop.give()


def shut_down(server: HttpServer) -> int:
    """Finish what is queued, or report why the worker died. Returns the exit code."""
    decider = server.decider
    server.is_stopping = True
    if not decider.dead.is_set():
        logger.info("shutting down: new work is refused, queued work has %.1f s", server.config.drain_s)
        is_drained = decider.drain(server.config.drain_s)
        logger.info("shutting down: %s", "all work is finished" if is_drained else "some work was not finished")
    server.stop_accepting()
    server.stop_receiving()
    server.connections.wait_none(WRITE_GRACE_S)
    if not decider.dead.is_set():
        return 0
    if isinstance(decider.failure, StartupError):
        sys.stderr.write(f"onepass: {decider.failure}\n")
    else:  # its traceback is in the log already
        logger.error("the worker died of %s; the process ends", type(decider.failure).__name__)
    return EXIT_FAILURE


def main(argv: Sequence[str], make_decider: Callable[[Config], Decider] = Decider) -> int:
    """Run until a signal or the worker's end. Returns the exit code; does not return while the worker is at work."""
    stop = StopSignal()
    exit_code = EXIT_CONFIGURATION
    try:
        config = load_config(argv)
        set_up_logging(is_verbose=config.verbose, as_json=config.log_json)
        allow_many_files()
        decider = make_decider(config)
        exit_code = EXIT_FAILURE
        server = HttpServer(config, decider, ROUTES)
    except StartupError as err:
        sys.stderr.write(f"onepass: {err}\n")
        return exit_code
    asked = f"backend={config.backend} device={config.device} dtype={config.dtype}"
    logger.info("listening at %s; loading %s: %s", server.url, config.served_name or config.model, asked)
    warn_if_open(config, server.url)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    threading.Thread(target=watch, args=(decider, stop), name="watch", daemon=True).start()
    threading.Thread(target=announce, args=(server,), name="announce", daemon=True).start()
    decider.start()
    stop.wait()
    exit_code = shut_down(server)
    server.remove_socket()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)  # a worker inside a C++ call would abort the interpreter's own way out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
