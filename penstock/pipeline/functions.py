"""Functions: the code that a step in Python names, `module:function`.

    def tidy(frame): …                  the result of the step before, to a frame
    def joined(spark, views): …         the session, and every view by its name, to a frame

A module may stand beside the pipeline's file. What it defines is then sent along with the work, so that
executors on other machines need not have it.

How it fails: `WrongValue`, which says what is missing. `NeedsSpark`, where a module makes something of
Spark's when it is imported (`@udf("string")` does), and Spark is not there yet.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError

from penstock.common.given import hint_for
from penstock.common.kinds import WrongValue
from penstock.pipeline.model import Function


class NeedsSpark(Exception):
    """A module that can be imported where Spark runs, and only there."""


def make_importable(folder: str) -> None:
    """Modules in a folder can be imported, from now on: a module may import others when it is called."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def module_of(function: Function) -> ModuleType:
    return sys.modules[function.__module__]


def is_beside(function: Function, file: str) -> bool:
    """Whether a function's module stands in the folder of a file, or below."""
    path = getattr(module_of(function), "__file__", None)
    folder = os.path.dirname(os.path.abspath(file))
    return path is not None and os.path.abspath(path).startswith(folder + os.sep)


def load_function(path: str, file: str) -> tuple[Function, bool]:
    """The function that a path in a file names, and whether it takes the session and all views."""
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise WrongValue("use a module and a function in it, as in module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a module raises, it is a mistake to tell
        if isinstance(error, PySparkRuntimeError) and SparkContext._active_spark_context is None:
            raise NeedsSpark from None
        raise WrongValue(f"module {module_name!r} cannot be imported: {_told(error)}") from None
    beside = os.path.join(os.path.dirname(os.path.abspath(file)), *module_name.split("."))
    loaded = getattr(module, "__file__", None) or "Python's own"
    ours = [path for path in (f"{beside}.py", f"{beside}/__init__.py") if os.path.exists(path)]
    if ours and not (os.path.exists(loaded) and any(os.path.samefile(path, loaded) for path in ours)):
        raise WrongValue(
            f"module {module_name!r} is {loaded} here, and not the one beside this file: Python loads a name "
            "once; take another name"
        )
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise WrongValue(f"module {module_name!r} has no {name!r}; {_hint(module, part)}")
        found = getattr(found, part)
    if not callable(found):
        raise WrongValue(f"{name!r} of module {module_name!r} is {type(found).__name__}; name a function")
    return found, _takes_views(found, name)


def _takes_views(function: Callable[..., Any], name: str) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    required = [it for it in parameters if it.kind in positional and it.default is it.empty]
    if len(required) not in (1, 2):
        raise WrongValue(
            f"{name!r} takes {len(required)} arguments; define {name}(frame), or {name}(spark, views)"
        )
    return len(required) == 2


def _hint(module: ModuleType, name: str) -> str:
    own = [
        it
        for it, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not it.startswith("_")
    ]
    return hint_for(name, {it: it for it in own}, own) if own else "define a function there"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
