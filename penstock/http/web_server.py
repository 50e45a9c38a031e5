"""uvicorn without its command line, which `import uvicorn` would bring: click, watchfiles, multiprocessing,
65 modules and 2.5 MB for as long as the process lives. Who needs `uvicorn.main` later, as NiceGUI does, gets
the real one.
"""

import importlib
import sys
from types import ModuleType

_MAIN = "uvicorn.main"

if "uvicorn" not in sys.modules:
    # The package wants three names from there, and nobody here uses two of them.
    stand_in = ModuleType(_MAIN)
    stand_in.__dict__.update(Server=None, main=None, run=None)
    sys.modules[_MAIN] = stand_in
    try:
        package = importlib.import_module("uvicorn")
    finally:
        del sys.modules[_MAIN]
    package.__dict__["Server"] = importlib.import_module("uvicorn.server").Server

from uvicorn.config import Config as Config  # noqa: E402 - these, only behind that
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpToolsProtocol  # noqa: E402
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as RequestResponseCycle  # noqa: E402
from uvicorn.server import Server as Server  # noqa: E402
