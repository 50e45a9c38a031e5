"""PenstockDataSource: what Spark asks for when somebody says `format("penstock")`.

It knows the columns of each view and hands everything else to its readers and writers. Spark does no column
pruning for a Python source, so a schema that the user gives does it: only its columns are read and sent.

Rules that always hold:
  * Nothing is asked over the network here. Spark makes and pickles sources as it likes.
  * Importing this needs pyspark and nothing more; pyarrow comes in with the first row.
"""

import difflib
from collections.abc import Mapping
from typing import Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.errors import PenstockError
from penstock.log.tables import HEADERS, VIEWS, columns_of
from penstock.spark.options import (
    BATCH,
    STREAM,
    ReadOptions,
    WriteOptions,
    read_options,
    view_of,
    write_options,
)


class WrongSchema(PenstockError):
    """A schema that does not go with the view. Says which column, and what it could be."""


_TYPES: Final[Mapping[str, DataType]] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "map<string,string>": MapType(StringType(), StringType()),
}


def schema_of(view: str, headers: bool = False) -> StructType:
    """The whole schema of a view. As in any schema that is written down, every column may be null."""
    columns = (*VIEWS[view], HEADERS) if headers else VIEWS[view]
    return StructType([StructField(column.name, _TYPES[column.type]) for column in columns])


def check_schema(view: str, schema: StructType) -> StructType:
    """The schema, where all of its columns are the view's own; WrongSchema otherwise."""
    columns = {column.name: column for column in columns_of(view)}
    if not schema.fields:
        raise WrongSchema(f"the schema has no column; view {view!r} has {', '.join(columns)}")
    for number, field in enumerate(schema.fields):
        column = columns.get(field.name)
        if column is None:
            near = difflib.get_close_matches(field.name, columns, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(columns)}"
            raise WrongSchema(f"view {view!r} has no column {field.name!r}; {hint}")
        if field.dataType.simpleString() != column.type:
            raise WrongSchema(
                f"column {field.name!r} of view {view!r} is {column.type}, not "
                f"{field.dataType.simpleString()}; read it as that, and cast it afterwards"
            )
        if column.nullable and not field.nullable:
            raise WrongSchema(
                f"column {field.name!r} of view {view!r} can be null; the schema says it cannot"
            )
        if field.name in schema.fieldNames()[:number]:
            raise WrongSchema(f"the schema has column {field.name!r} twice")
    return schema


class PenstockDataSource(DataSource):
    """The source and the sink `penstock`."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        from penstock.spark.tables import is_table, is_written, table_schema, written_schema

        if is_table(self.options):
            return table_schema(self.options)
        if is_written(self.options):
            return written_schema(self.options)
        return schema_of(*view_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.reading import BatchReader, FilteringReader

        options = self._to_read(schema, BATCH)
        kind = FilteringReader if options.push_filters else BatchReader
        return kind(options, check_schema(options.view, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.streaming import StreamReader

        options = self._to_read(schema, STREAM)
        return StreamReader(options, check_schema(options.view, schema))

    def _to_read(self, schema: StructType, kind: str) -> ReadOptions:
        from penstock.spark.tables import options_to_read

        return read_options(options_to_read(self.options, schema), kind)

    def _to_write(self, schema: StructType, kind: str) -> WriteOptions:
        from penstock.spark.tables import options_to_write

        return write_options(options_to_write(self.options, schema), kind)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = self._to_write(schema, BATCH)
        if options.redrive and "value" not in schema.fieldNames():
            from penstock.spark.writing_redrive import RedriveWriter

            return RedriveWriter(options, schema, overwrite)
        from penstock.spark.writing import BatchWriter

        return BatchWriter(options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.writing import StreamWriter

        return StreamWriter(self._to_write(schema, STREAM), schema, overwrite)
