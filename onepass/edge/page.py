"""This module serves the playground. Three files are joined to one page at the first request.

The page's headers allow only its own code, and calls to this server only.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "playground"


@lru_cache(maxsize=1)
def load() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers.

    The headers allow the page's own script and style, by their hashes, and calls to this server, and nothing else.
    """
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    hashes = {}
    for tag, name in (("style", "style.css"), ("script", "script.js")):
        content = (FOLDER / name).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
        page = page.replace(f"<{tag}></{tag}>", f"<{tag}>{content}</{tag}>")
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )
    return page.encode(), {
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
