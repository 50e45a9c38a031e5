"""Graph: the views of a pipeline, each made of those before it: sources, tables, then steps in order.

The same graph is made of streams, to see what Spark makes of it; of the rows of one batch (`flows.py`); and
of the rows of a test. `input` is, for each step, the result of the one before, or what it names with `from`.

Which query computes a view is decided by its **root**, the last place behind which every row stands for
itself, so that a batch can be taken through as it is. A source is a root. So is a step that keeps state (an
aggregate, a join of streams, whatever is not known to keep none), and one that puts several roots together.
A view that reads no source has none.

Rules that always hold:
  * A view holds what its expectations let through; `raw` has it before that.
  * Views live in the session that is given; whoever has several graphs has several sessions.

How it fails: `StepFailed` names the section and its number. What Spark says about SQL is left to
`failures.py`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from penstock.common.kinds import WrongValue
from penstock.errors import PenstockError
from penstock.pipeline.failures import cause_of
from penstock.pipeline.functions import is_beside, load_function, module_of
from penstock.pipeline.model import (
    DEAD,
    FAIL,
    INPUT,
    KEEP,
    Expectation,
    Function,
    Pipeline,
    StaticTable,
    Step,
    step_name,
)

_KEEPS_NO_STATE: Final = (
    "Project Filter SubqueryAlias View Union Generate Join EventTimeWatermark WithCTE CTERelationDef "
    "CTERelationRef CollectMetrics ResolvedHint UnresolvedHint MapInPandas MapInArrow PythonMapInArrow "
    "Repartition RepartitionByExpression"
)
"""What Spark's plans are made of that takes every row for itself. A join does where one side is a table."""


class StepFailed(PenstockError):
    """A part of the graph that cannot be made. Says which, and why."""

    def __init__(self, file: str, section: str, number: int, name: str | None, why: str) -> None:
        super().__init__(f"{file}: [[{section}]] {number + 1}{f' ({name})' if name else ''}: {why}")
        self.section = section
        self.number = number  # from 0
        self.why = why


class Graph:
    """The views of one pipeline."""

    def __init__(self, session: SparkSession, pipeline: Pipeline) -> None:
        self.session = session
        self._pipeline = pipeline
        self.raw: dict[str, DataFrame] = {}
        self.frames: dict[str, DataFrame] = {}
        self.roots: dict[str, str] = {}
        self.reads: dict[str, frozenset[str]] = {}  # the sources that a view is made of
        self._behind_input: str | None = None  # the view that `input` is

    def make(
        self,
        given: Mapping[str, DataFrame],
        only: Collection[str] | None = None,
        look: Callable[[Expectation, DataFrame], None] | None = None,
    ) -> "Graph":
        """All views, or only those. `given` are there already: the sources, the tables, and any others.

        `look` is shown the rows that an expectation is about, before those against it go.
        """
        pipeline = self._pipeline
        for table in pipeline.tables:
            self._put(table.name, given[table.name], look)
        for source in pipeline.sources:
            if source.name in given:
                self._put(source.name, given[source.name], look)
                self.roots[source.name], self.reads[source.name] = source.name, frozenset({source.name})
                if len(pipeline.sources) == 1:
                    self._name_input(source.name)
        for number, step in enumerate(pipeline.steps):
            name = step_name(pipeline.steps, number)
            if only is None or name in only:
                if step.of is not None and step.of in self.frames:
                    self._name_input(step.of)
                frame = given[name] if name in given else self._run(step, number)
                self._find_root(name, frame)
                self._put(name, frame, look)
                self._name_input(name)
        return self

    def _put(
        self, name: str, frame: DataFrame, look: Callable[[Expectation, DataFrame], None] | None
    ) -> None:
        self.raw[name] = frame
        for number, expectation in enumerate(self._pipeline.expectations):
            if expectation.of == name:
                try:
                    frame = self._expect(expectation, frame, look)
                except PySparkException as error:
                    file = self._pipeline.file
                    raise StepFailed(file, "expect", number, expectation.name, cause_of(error)) from error
        self.frames[name] = frame
        frame.createOrReplaceTempView(f"`{name}`")

    def _name_input(self, name: str) -> None:
        self._behind_input = name
        self.frames[name].createOrReplaceTempView(INPUT)

    # --- expectations ----------------------------------------------------------------------------

    def _expect(
        self,
        expectation: Expectation,
        frame: DataFrame,
        look: Callable[[Expectation, DataFrame], None] | None,
    ) -> DataFrame:
        against = is_against(expectation)
        holding = frame.where(~against)  # Here Spark judges the condition.
        if expectation.on_violation == DEAD and "queue" not in frame.columns:
            raise PySparkException(
                f"a dead letter needs the column queue, which {expectation.of} does not have; select it, or "
                "use on-violation = drop"
            )
        if look is not None:
            look(expectation, frame)
        if expectation.on_violation == KEEP:
            return frame
        if expectation.on_violation == FAIL:
            said = sql.concat(
                sql.lit(f"expectation {expectation.name}: a row is against it: "),
                sql.to_json(sql.struct(*(sql.col(f"`{it}`") for it in frame.columns))),
            )
            return frame.where(sql.when(~against, True).otherwise(sql.raise_error(said).cast("boolean")))
        return holding

    # --- steps -----------------------------------------------------------------------------------

    def _run(self, step: Step, number: int) -> DataFrame:
        file = self._pipeline.file

        def failed(why: str) -> StepFailed:
            return StepFailed(file, "step", number, step.name, why)

        try:
            if step.sql is not None:
                return self.session.sql(step.sql)
            function, takes_views = step.function, step.takes_views
            if function is None:
                assert step.function_path is not None, "a step is SQL or Python"
                function, takes_views = load_function(step.function_path, file)
            if is_beside(function, file):
                _send_along(function)
            # As views, so that it can be told later of what the result is made.
            views = {name: self.session.table(f"`{name}`") for name in self.frames}
            if self._behind_input is not None:
                views[INPUT] = self.session.table(INPUT)
            frame = function(self.session, views) if takes_views else function(views[INPUT])
        except PySparkException as error:
            raise failed(cause_of(error)) from error
        except WrongValue as error:
            raise failed(f"{step.function_path}: {error}") from error
        except Exception as error:
            # Code of the user's: whatever it raises, its name and text are what helps.
            raise failed(f"{step.function_path}: {type(error).__name__}: {error}") from error
        if not isinstance(frame, DataFrame):
            raise failed(f"{step.function_path} returned {type(frame).__name__}; return a DataFrame")
        return frame

    # --- roots -----------------------------------------------------------------------------------

    def _find_root(self, name: str, frame: DataFrame) -> None:
        views, keeps_state = self._made_of(frame)
        roots = {self.roots[view] for view in views}
        self.reads[name] = frozenset().union(*(self.reads[view] for view in views))
        if keeps_state or len(roots) > 1:
            self.roots[name] = name
        elif roots:
            (self.roots[name],) = roots

    def _made_of(self, frame: DataFrame) -> tuple[set[str], bool]:
        """The views with rows of queues that a frame is made of, and whether it keeps state itself."""
        views: set[str] = set()
        keeps_state = False
        known = {name.lower(): name for name in self.roots}
        plan: Any = frame._jdf.queryExecution().analyzed()  # Java has no types here
        nodes = [plan]
        while nodes:
            node = nodes.pop()
            if not node.isStreaming():
                continue
            kind = node.nodeName()
            if kind == "View":
                view = node.desc().identifier().table().lower()
                view = self._behind_input if view == INPUT else known.get(view)
                if view is not None:
                    views.add(view)
                    continue
            children = [node.children().apply(it) for it in range(node.children().size())]
            both = kind == "Join" and all(child.isStreaming() for child in children)
            keeps_state = keeps_state or both or kind not in _KEEPS_NO_STATE.split()
            nodes += children
        return views, keeps_state


def is_against(expectation: Expectation) -> Column:
    """Whether a row is against it; what is null does not hold."""
    return ~sql.coalesce(sql.expr(f"({expectation.sql})").cast("boolean"), sql.lit(False))


def _send_along(function: Function) -> None:
    """Executors cannot import what stands beside the file: it goes with the work, as it is."""
    by_value: Any = cloudpickle.register_pickle_by_value  # without types
    by_value(module_of(function))


# --- tables ------------------------------------------------------------------------------------------------


def read_tables(session: SparkSession, pipeline: Pipeline) -> dict[str, DataFrame]:
    """The tables to join, as they are now."""
    found: dict[str, DataFrame] = {}
    for number, table in enumerate(pipeline.tables):
        try:
            found[table.name] = read_table(session, table)
        except PySparkException as error:
            raise StepFailed(pipeline.file, "table", number, table.name, cause_of(error)) from error
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise StepFailed(pipeline.file, "table", number, table.name, why) from error
    return found


def read_table(session: SparkSession, table: StaticTable) -> DataFrame:
    if table.format == "delta":
        from deltalake import DeltaTable

        # Through the driver: Spark has no reader of its own for these, and tables to join are small.
        return session.createDataFrame(DeltaTable(table.path).to_pyarrow_table())
    reading = session.read.format(table.format).options(**table.options)
    return (reading.schema(table.schema) if table.schema is not None else reading).load(table.path)
