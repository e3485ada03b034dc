"""Images as inputs: pixels on the host, vision towers on the device. Optional: the core does not import it."""

from importlib.util import find_spec

from llmcl.errors import UsageError

if find_spec("PIL") is None:
    raise UsageError("images need Pillow, which is not installed: pip install 'llmcl[images]'")
