"""`penstock serve`: the broker, until it is told to stop.

Exit codes besides the usual ones: 2 for a wrong setting, 3 for a data folder that another broker
has open. Standard output gets one line, when every listener accepts; everything else is a log line
on standard error.
"""

import argparse
import errno
import gc
import os
import sys

from penstock.common.given import SettingsError
from penstock.common.journal import log, start_logging
from penstock.common.secret_file import exposed
from penstock.log.errors import LogFailed, LogInUse
from penstock.server import settings_cluster, settings_http
from penstock.server.settings import CONFIG_VARIABLE, Settings
from penstock.server.settings_read import add_arguments, load

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run the broker"

EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_IN_USE = 3


def run(args: argparse.Namespace) -> int:
    # The server brings the event loop and the protocols; help and wrong settings do not need them.
    gc.disable()
    from penstock.server.server import serve

    gc.freeze()  # Modules stay: the collection before the ready line, 10 ms with them, leaves them out.
    gc.enable()
    try:
        settings = load(args, os.environ)
        start_logging(settings.log_level, settings.log_format)
        warnings = (*settings_http.warnings(settings), *settings_cluster.warnings(settings))
        for line in (*warnings, *_exposed(args, settings)):
            log.warning("%s", line)
        if isinstance(settings.engine, str):
            return serve(settings, lambda: load(args, os.environ))
        from penstock.cluster.front import front_end

        return serve(settings, lambda: load(args, os.environ), front_end)
    except SettingsError as error:
        return _say(error, EXIT_SETTINGS)
    except LogInUse as error:
        return _say(error, EXIT_IN_USE)
    except (OSError, LogFailed) as error:
        cause = error.__cause__ if isinstance(error, LogFailed) else error
        if isinstance(cause, OSError) and cause.filename is not None:
            return _say(_what_to_do(cause), EXIT_FAILED)
        if isinstance(error, LogFailed):
            raise
        return _say(error.strerror, EXIT_FAILED)


def _exposed(args: argparse.Namespace, settings: Settings) -> list[str]:
    """A warning for each file with a secret in it that other users can read."""
    http, cluster = settings.http, settings.cluster
    file = args.config or os.environ.get(CONFIG_VARIABLE)
    elsewhere = args.engine or os.environ.get("PENSTOCK_ENGINE")  # what is said there is in no file
    has_password = not elsewhere and any("@" in url for url in settings.engine)
    paths = [file if has_password or (http is not None and http.tokens) else None]
    paths += [it.tls_key for it in settings.listeners] + [cluster.tls_key, cluster.credentials]
    paths += [http.tls_key] if http is not None else []
    return [line for path in dict.fromkeys(paths) if path and (line := exposed(path))]


def _what_to_do(error: OSError) -> str:
    """Of the data folder, or of a file in it: what else is opened by name has words of its own."""
    if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        what = "is no folder" if isinstance(error, FileExistsError) else error.strerror
        return f"{error.filename}: {what}; give the broker a folder of its own with --data"
    if error.errno == errno.ELOOP:
        return f"{error.filename}: {error.strerror}"
    return f"{error.filename}: {error.strerror}; name a folder with --data that this user may write to"


def _say(what: object, code: int) -> int:
    print(f"penstock serve: {what}", file=sys.stderr)
    return code
