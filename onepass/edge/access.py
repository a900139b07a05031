"""This module decides who may call: by API key, by a browser's origin, and by the name under which a browser calls.

It knows request heads, and nothing of routes.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from onepass.config import Config
from onepass.edge.framing import Head
from onepass.errors import BadRequest, Unauthorized

CORS_ALLOWED = re.compile(r"authorization|content-type|content-encoding|x-typesafe-.*|typesafe-danger-zone-images")
CORS_EXPOSED = "x-typesafe-request-id, retry-after, retry-after-ms"
LOCAL_SUFFIXES = (".localhost", ".local")  # A public name server never answers for these names.


class Access:
    """These are the rules of access that follow from one server's settings. Any thread may use them."""

    def __init__(self, config: Config) -> None:
        self.keys = tuple(dict.fromkeys(key.encode() for key in config.api_keys))
        self.origins = frozenset(origin.strip() for origin in config.allowed_origins.split(",") if origin.strip())
        self._names = {config.host.lower(), *((urlsplit(origin).hostname or "") for origin in self.origins - {"*"})}

    def require_key(self, head: Head) -> int:
        """Return the caller as the number of its key. It is 0 if there is one key or none. Raises `Unauthorized`."""
        if not self.keys:  # Users of the SDK send a dummy key in this case.
            return 0
        number = find_key(head.headers.get("authorization", ""), self.keys)
        if number is None:
            raise Unauthorized("the API key is missing or wrong; send it as: Authorization: Bearer KEY")
        return number

    def require_known_name(self, head: Head, *, is_page: bool) -> None:
        """Refuse a browser that calls the server by a name that is not the server's. Raises `BadRequest`.

        Any other client may use any name: it sends no Origin, and it does not ask for the page.

        This prevents DNS rebinding. If the name evil.example suddenly resolves to this machine, a page from there has
        the same origin as this server, and it could read what only this machine may read. An address cannot be
        rebound. A name without a dot cannot be rebound either, since no public name server answers for it.
        """
        if not is_page and head.headers.get("origin") in (None, *self.origins):
            return
        host = head.headers.get("host", "").lower()
        name = re.sub(r":\d*$", "", host).strip("[]")
        if "." not in name or name.endswith(LOCAL_SUFFIXES) or _is_address(name):
            return
        if name not in self._names and "*" not in self.origins:
            raise BadRequest(
                "browsers are not served under the name in Host; to allow it, start with --allowed-origins http://NAME"
            )

    def cors_headers(self, head: Head | None) -> dict[str, str]:
        """Return the CORS headers of a response. `head` is None if the request has no readable head; if only one origin
        is allowed, that origin may then read the response."""
        if not self.origins:
            return {}
        origin = head.headers.get("origin", "") if head else min(self.origins) if len(self.origins) == 1 else ""
        if "*" in self.origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": CORS_EXPOSED}
        if origin not in self.origins:
            return {"Vary": "Origin"}
        exposed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": CORS_EXPOSED}
        return {**exposed, "Vary": "Origin"}

    def preflight_headers(self, head: Head, methods: Sequence[str]) -> dict[str, str]:
        origin = head.headers.get("origin")
        if origin is None or not ({"*", origin} & self.origins):
            return {}
        asked = [name.strip().lower() for name in head.headers.get("access-control-request-headers", "").split(",")]
        allowed = [name for name in asked if CORS_ALLOWED.fullmatch(name)] or ["authorization", "content-type"]
        return {
            "Access-Control-Allow-Methods": ", ".join(methods),
            "Access-Control-Allow-Headers": ", ".join(allowed),
            "Access-Control-Max-Age": "600",
        }


def find_key(header: str, keys: Sequence[bytes]) -> int | None:
    """Return the number of the key that `Authorization` carries, or None.

    Keys are compared as bytes, in a time that does not depend on which key matches.
    """
    scheme, _, token = header.partition(" ")
    given = token.strip(" ").encode("latin-1")
    matches = [hmac.compare_digest(given, key) for key in keys]
    return matches.index(True) if any(matches) and scheme.lower() == "bearer" else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
