"""Steps: what is done with rows between source and sink, in SQL or in Python, one after the other.

Every source and every named step is a view of the pipeline's session; `input` is the result of the step
before, and of the source where there is only one.

How it fails: `StepFailed` names the step. What Spark says about SQL is left to `failures.py`.
"""

from typing import Any

from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.common.kinds import WrongValue
from penstock.errors import PenstockError
from penstock.pipeline.failures import cause_of
from penstock.pipeline.functions import is_beside, load_function, module_of
from penstock.pipeline.model import INPUT, Function, Pipeline, Step


class StepFailed(PenstockError):
    """A step that cannot be done. Says which, and why."""

    def __init__(self, where: str, number: int, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.number = number  # from 1
        self.why = why


class Views:
    """The views of one pipeline, in a session of its own."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session
        self.frames: dict[str, DataFrame] = {}

    def put(self, frame: DataFrame, *names: str | None) -> None:
        for name in names:
            if name is not None:
                self.frames[name] = frame
                frame.createOrReplaceTempView(name)


def run_steps(views: Views, pipeline: Pipeline) -> DataFrame:
    """What goes to the sink."""
    for number, step in enumerate(pipeline.steps, 1):
        frame = _run_step(views, step, number, pipeline.file)
        views.put(frame, step.name, INPUT)
    return views.frames[INPUT]


def _send_along(function: Function) -> None:
    """Executors cannot import what stands beside the file: it goes with the work, as it is."""
    by_value: Any = cloudpickle.register_pickle_by_value  # without types
    by_value(module_of(function))


def _run_step(views: Views, step: Step, number: int, file: str) -> DataFrame:
    where = f"{file}: [[step]] {number}" + (f" ({step.name})" if step.name else "")
    try:
        if step.sql is not None:
            return views.session.sql(step.sql)
        function, takes_views = step.function, step.takes_views
        if function is None:
            assert step.function_path is not None, "a step is SQL or Python"
            function, takes_views = load_function(step.function_path)
        if is_beside(function, file):
            _send_along(function)
        if takes_views:
            frame = function(views.session, dict(views.frames))
        else:
            frame = function(views.frames[INPUT])
    except PySparkException as error:
        raise StepFailed(where, number, cause_of(error)) from error
    except WrongValue as error:
        raise StepFailed(where, number, f"{step.function_path}: {error}") from error
    except Exception as error:
        # Code of the user's: whatever it raises, its name and text are what helps.
        raise StepFailed(where, number, f"{step.function_path}: {type(error).__name__}: {error}") from error
    if not isinstance(frame, DataFrame):
        returned = type(frame).__name__
        raise StepFailed(where, number, f"{step.function_path} returned {returned}; return a DataFrame")
    return frame
