"""Tables: a table of Spark's catalog that reads queues, or writes to one.

Spark keeps the options of `CREATE TABLE … USING penstock OPTIONS (…)`, but hands them to no source in Python
when the table is used: that gets the columns alone. So the options go with the columns. Where `CREATE TABLE`
names none, Spark asks for them, and the first of the answer has the options in its metadata, which the
catalog keeps.

Rules that always hold:
  * No secret goes there: whoever may read the table sees its metadata, and Parquet files that are made of it
    have it in them. A token comes from `PENSTOCK_TOKEN`.
  * Metadata goes along into frames that are made of a table. So what says where to read from is never taken
    for where to write to. What says where to write to goes nowhere: such a table cannot be read.
  * Nothing is written where a table does not say. Spark drops the metadata of what is inserted where names
    and types are the table's own already. So texts are `varchar` in such a table, which no query has.

How it fails: `WrongOption`, which says how such a table is made.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from pyspark.sql.types import (
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from penstock.common.secret_file import TOKEN_VARIABLE
from penstock.spark.options import (
    BATCH,
    READING,
    SPARK_S_OWN,
    STREAM,
    WRITING,
    WrongOption,
    read_options,
    view_of,
    write_options,
)
from penstock.spark.source import schema_of
from penstock.spark.writing_columns import columns_for

READ: Final = "penstock.read"
WRITE: Final = "penstock.write"
"""In metadata: the options of a table, as JSON."""

_PROVIDER: Final = "provider"
_OPTION: Final = "option."
"""A property of every table that Spark asks for the columns of, and what stands before its options."""

_READING: Final = {option.name.lower() for option in READING}
_ONLY_WRITING: Final = {option.name.lower() for option in WRITING} - _READING
_TYPES: Final[Mapping[str, DataType]] = {"offset": LongType(), "ttl": IntegerType(), "retries": IntegerType()}
_TO_BE_NAMED: Final = ("delay", "headers")
"""Columns that only a view has, which names its columns: rows are inserted by their places, and have to have
as many columns as a table."""

_TEXT: Final = VarcharType((1 << 31) - 1)

_HOW: Final = (
    "a table of Spark's catalog has its options where CREATE TABLE … USING penstock OPTIONS (…) names no "
    "columns"
)


def is_table(options: Mapping[str, str]) -> bool:
    """Whether these are the properties of a table that is made."""
    return _PROVIDER in options


def is_written(options: Mapping[str, str]) -> bool:
    """Whether these say where to write to, and not what to read."""
    return any(name.lower() in _ONLY_WRITING for name in options)


def table_schema(properties: Mapping[str, str]) -> StructType:
    """The columns of a table that is made, with its options."""
    options = {
        name.lower().removeprefix(_OPTION): text
        for name, text in properties.items()
        if name.lower().startswith(_OPTION)
    }
    engine = options.get("engine", "")
    if "token" in options or ("@" in engine and not engine.startswith("file:")):
        raise WrongOption(
            "a table's options stay in Spark's catalog, where others see them: leave the secret out, and set "
            f"{TOKEN_VARIABLE} where the driver runs; for the option engine there is credentials"
        )
    if is_written(options):
        schema, key = written_schema(options, _TEXT), WRITE
    elif options.keys() & {"subscribe", "subscribepattern"} or not options.keys() <= _READING:
        _check_read(options)
        schema, key = schema_of(*view_of(options)), READ
    else:
        raise WrongOption(
            "say what to read, with subscribe or subscribePattern, or where to write to, with queue"
        )
    schema.fields[0].metadata = {key: json.dumps(options, sort_keys=True)}
    return schema


def _check_read(options: Mapping[str, str]) -> None:
    """Whether a table is good for batches, for streams, or for both."""
    try:
        read_options(options, BATCH)
    except WrongOption:
        with suppress(WrongOption):
            read_options(options, STREAM)
            return
        raise


def written_schema(options: Mapping[str, str], text: DataType = StringType()) -> StructType:  # noqa: B008
    """What a table or a view has that is written to: what a row may say, and the options do not."""
    said = write_options(options, BATCH)
    left_out = _TO_BE_NAMED if said.queue is None else (*_TO_BE_NAMED, "queue")
    names = [name for name in columns_for(said, payloads=False) if name not in left_out]
    return StructType([StructField(name, _TYPES.get(name, text)) for name in names])


def options_to_read(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """What is said about what to read; what a query says goes before what its table says."""
    if _kept(schema, WRITE):
        raise WrongOption(
            "this table is there for INSERT INTO; to read queues, make one with the option subscribe"
        )
    kept = _kept(schema, READ)
    if not options and not kept:
        raise WrongOption(f"say what to read, with one of the options subscribe and subscribePattern; {_HOW}")
    return {**kept, **options}


def options_to_write(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """What is said about where to write to; what somebody says beside a table must be the same, or new."""
    kept = _kept(schema, WRITE)
    if not kept and not any(name.lower() not in SPARK_S_OWN for name in options):
        if _kept(schema, READ):
            raise WrongOption(
                "this table is there to be read; to write to a queue, make one with the option queue"
            )
        raise WrongOption(f"say where to write to, with the options url and queue; {_HOW}")
    for name, text in options.items():
        if kept.get(name.lower(), text) != text:
            raise WrongOption(
                f"option {name!r} is {text!r}, and the table says {kept[name.lower()]!r}; leave the option "
                "out, or write without the table"
            )
    return {**kept, **options}


def _kept(schema: StructType, key: str) -> dict[str, str]:
    """The options of the table that these columns are of; none where it has none."""
    for field in schema.fields:
        if field.metadata and key in field.metadata:
            options: dict[str, str] = json.loads(field.metadata[key])
            return options
    return {}
