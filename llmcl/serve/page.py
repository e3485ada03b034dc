"""The page at `/`: one file, whose policy allows only the page's own script and style."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from llmcl.serve.service import Service


async def page(request: Request, service: Service) -> Response:
    """Serves a chat page for browsers."""
    text, policy = _page()
    return HTMLResponse(
        text,
        headers={"content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"},
    )


@cache
def _page() -> tuple[str, str]:
    """Returns the page and a content security policy with the hashes of script and style."""
    text = files("llmcl.serve").joinpath("page.html").read_text(encoding="utf-8")

    def hash_of(tag: str) -> str:
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return "'sha256-" + b64encode(sha256(inner.encode()).digest()).decode("ascii") + "'"

    policy = {
        "default-src": "'none'",
        "script-src": hash_of("script"),
        "style-src": hash_of("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, "; ".join(f"{name} {value}" for name, value in policy.items())
