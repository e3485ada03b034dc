"""The page at `/` and its files in llmcl/serve/static. Its policy allows only scripts and styles from this server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from llmcl.errors import one_line
from llmcl.serve.errors import RequestError
from llmcl.serve.service import Service

PREFIX = "/page/"  # needs no key
TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request, service: Service) -> Response:
    """Serves a chat page for browsers, or a script or style sheet of the page."""
    name = request.path_params.get("name", "index.html")
    if name not in _texts():
        raise RequestError(404, f"Not Found: GET {PREFIX}{one_line(name)}", code="not_found")
    return Response(_texts()[name], media_type=TYPES[name.rpartition(".")[2]], headers=_HEADERS)


@cache
def _texts() -> dict[str, str]:
    """Returns the text of each file by name."""
    folder = files("llmcl.serve") / "static"
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
