"""This is the server program. It owns the start order, the signals and the shutdown.

It knows nothing of requests: `onepass/edge/` decides what is answered, and how.
"""

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

logger = logging.getLogger("server")  # The name is fixed, since __name__ is "__main__" when this runs as a program.

# When the queue is done, handlers have this long to send their answers, and clients have this long to read them.
WRITE_GRACE_S = 2.0
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
    """Finish the queued requests, or report why the worker died. Return the exit code."""
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
    else:  # The traceback is already in the log.
        logger.error("the worker died of %s; the process ends", type(decider.failure).__name__)
    return EXIT_FAILURE


def main(argv: Sequence[str], make_decider: Callable[[Config], Decider] = Decider) -> int:
    """Run until a signal arrives or the worker ends.

    If the server cannot start, this returns the exit code. Otherwise this ends the process with the exit code.
    """
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
    os._exit(exit_code)  # A normal exit of the interpreter would abort while the worker is inside a C++ call.


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
