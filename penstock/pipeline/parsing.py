"""Parsing: payloads to columns, and what is said about records that do not fit. All of it is done by Spark.

A record fits when it is all that its message holds, and every column of the schema can be made of it. Spark's
own parsers are more generous: they read `{"id":1}{"id":2}` as its first half, an empty message as a row of
nulls, and bytes that are no UTF-8 as other characters. Here these do not fit, for something would be lost.
A field that is missing is null, unless the schema says `not null`.

Rules that always hold:
  * Every message is a row of the good ones or of the bad ones, never of both.
  * The columns of a message (queue, offset, timestamp, …) stay beside those of its record, but for `value`;
    where both have a name, the record's counts.
  * Each message is parsed once: what comes out of the parser goes through a generator, which Spark's
    optimizer does not take apart. Otherwise a filter on the outcome would parse a second time.
  * Copies of bad records, which are in the log as dead letters of a pipeline, are no input of any pipeline.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from penstock.pipeline.ddl import quoted
from penstock.pipeline.model import FAIL, Parse
from penstock.spark.options import BAD_RECORD

COPIES: Final = "pipeline"
"""The protocol of what pipelines send to dead letters."""

COPY_BYTES_MAX: Final = 1 << 20
"""Of a larger bad record the dead letter has the beginning; the whole is where its offset says."""

SHOWN_MAX: Final = 100
"""Characters of a wrong field that an error shows."""

_ROW: Final = "__penstock_row"
_CORRUPT: Final = "__penstock_corrupt"
_KIND: Final = "__penstock_kind"
_ERROR: Final = "__penstock_error"


def without_copies(frame: DataFrame) -> DataFrame:
    """What was sent to the queue."""
    return frame.where(sql.col("protocol") != COPIES)


def good_records(frame: DataFrame, parse: Parse) -> DataFrame:
    """The records that fit, as columns; where one that does not shall end the query, it does."""
    parsed = _parsed(frame, parse)
    fits = _fits(parse)
    if parse.on_bad_record == FAIL:
        problem = sql.concat(
            sql.lit("queue '"),
            sql.col("queue"),
            sql.lit("', offset "),
            sql.col("offset"),
            sql.lit(": this record does not fit: "),
            _shown(_text(parse)),
        )
        parsed = parsed.where(sql.when(fits, True).otherwise(sql.raise_error(problem).cast("boolean")))
    else:
        parsed = parsed.where(fits)
    record = _record(parse)
    names = [name for name in parsed.select(record.alias("r")).select("r.*").columns if name != _CORRUPT]
    hidden = {"value", *(name.lower() for name in names)}
    return parsed.select(
        *(record.getField(name).alias(name) for name in names),
        *(name for name in frame.columns if name not in hidden),
    )


def bad_records(frame: DataFrame, parse: Parse, pipeline: str) -> DataFrame:
    """The others, as dead letters: a queue, and JSON that says what is wrong with which record."""
    whole = sql.octet_length("value") <= COPY_BYTES_MAX
    copy = sql.when(whole, sql.col("value")).otherwise(sql.substring("value", 1, COPY_BYTES_MAX))
    is_text = sql.is_valid_utf8(copy.cast("string"))
    report = sql.struct(
        sql.col(_ERROR).alias("error"),
        sql.lit(pipeline).alias("pipeline"),
        sql.col("offset"),
        sql.col("id"),
        sql.col("timestamp"),
        sql.when(is_text, copy.cast("string")).alias("value"),
        sql.when(~is_text, sql.base64(copy)).alias("value_base64"),
        sql.when(~whole, sql.octet_length("value")).alias("value_bytes"),
    )
    as_json = sql.to_json(report, {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timeZone": "UTC"})
    bad = _explained(_parsed(frame, parse).where(~_fits(parse)), parse)
    return bad.select("queue", as_json.alias("value"))


def dead_letter_options() -> dict[str, str]:
    """What makes a sink of messages one of dead letters."""
    return {"dead": BAD_RECORD}


# --- the parsers -------------------------------------------------------------------------------------------


def _parsed(frame: DataFrame, parse: Parse) -> DataFrame:
    """Every message with what the parser made of it, in the column `_ROW`."""
    text = _text(parse)
    parser = {"json": _from_json, "csv": _from_csv, "text": _from_text}[parse.format]
    row = sql.struct(parser(text, parse).alias("parsed"), sql.is_valid_utf8(text).alias("utf8"))
    return frame.withColumn(_ROW, sql.explode(sql.array(row)))


def _text(parse: Parse) -> Column:
    text = sql.col("value").cast("string")
    # The end of a line is no part of a record.
    return sql.rtrim(text, sql.lit("\r\n")) if parse.format == "csv" else text


def _options(parse: Parse) -> dict[str, str]:
    return {**parse.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}


def _from_json(text: Column, parse: Parse) -> Column:
    """The record inside an array of our own: what stands behind it then makes the whole no JSON, or the array
    longer. Only a text that ends our array and begins another one passes, and no mistake makes such a text.

    `end` is there only if the whole was not ended early.
    """
    schema = f"records array<struct<{parse.schema}>>, end int, {_CORRUPT} string"
    return sql.from_json(
        sql.concat(sql.lit('{"records":['), text, sql.lit('],"end":1}')), schema, _options(parse)
    )


def _from_csv(text: Column, parse: Parse) -> Column:
    return sql.from_csv(text, f"{parse.schema}, {_CORRUPT} string", _options(parse))


def _from_text(text: Column, parse: Parse) -> Column:
    return sql.struct(text.alias("value"))


def _record(parse: Parse) -> Column:
    """The record of a row."""
    parsed = sql.col(_ROW).getField("parsed")
    return sql.get(parsed.getField("records"), sql.lit(0)) if parse.format == "json" else parsed


def _is_whole(parse: Parse) -> Column:
    """Whether the parser could use all of it."""
    parsed = sql.col(_ROW).getField("parsed")
    if parse.format == "json":
        alone = sql.size(parsed.getField("records")) == 1
        ended = parsed.getField("end").isNotNull()
        return _record(parse).isNotNull() & alone & ended & parsed.getField(_CORRUPT).isNull()
    if parse.format == "csv":
        return (sql.length(_text(parse)) > 0) & parsed.getField(_CORRUPT).isNull()
    return sql.lit(True)


def _fits(parse: Parse) -> Column:
    """Whether a row is a good record; never null."""
    fits = _is_whole(parse) & sql.col(_ROW).getField("utf8")
    if parse.schema:
        # As Spark reads it: some schemas are left to it, and its parsers put nulls where something should be.
        fits &= _is_filled(_record(parse), StructType.fromDDL(parse.schema))
    return sql.coalesce(fits, sql.lit(False))


def _is_filled(column: Column, kind: DataType) -> Column:
    """Whether there is everything in it that its type says is not null; it may be null itself."""
    filled = sql.lit(True)
    if '"nullable":false' not in kind.json():
        return filled
    if isinstance(kind, StructType):
        for field in kind:
            member = column.getField(field.name)
            filled &= _is_filled(member, field.dataType)
            if not field.nullable:
                filled &= member.isNotNull()
    elif isinstance(kind, ArrayType):
        items = kind.elementType
        filled = sql.forall(column, lambda it: _is_filled(it, items))
    elif isinstance(kind, MapType):
        values = kind.valueType
        filled = sql.forall(sql.map_values(column), lambda it: _is_filled(it, values))
    return column.isNull() | filled


# --- what is wrong -----------------------------------------------------------------------------------------


def _explained(bad: DataFrame, parse: Parse) -> DataFrame:
    """Bad records with what is wrong with each, in words. That costs much more than parsing them."""
    text = _text(parse)
    if parse.format == "json":
        bad = bad.withColumn(_KIND, sql.schema_of_variant(sql.try_parse_json(text)))
    explain = {"json": _json_errors, "csv": _csv_errors, "text": _no_errors}[parse.format]
    bad = bad.withColumn(_ERROR, sql.concat_ws("; ", *explain(text, parse)))
    found = (
        sql.when(sql.length(text) == 0, "the message is empty")
        .when(~sql.col(_ROW).getField("utf8"), "it is not UTF-8")
        .when(sql.length(_ERROR) > 0, sql.col(_ERROR))
    )
    if parse.format == "json":
        found = found.when(~_is_whole(parse), "something stands behind the object")
    return bad.withColumn(_ERROR, found.otherwise("it does not fit the schema"))


def _no_errors(text: Column, parse: Parse) -> list[Column]:
    return []


def _json_errors(text: Column, parse: Parse) -> list[Column]:
    is_object = sql.coalesce(sql.col(_KIND).startswith("OBJECT"), sql.lit(False))
    found = [
        sql.when(sql.col(_KIND).isNull(), "it is not JSON").when(
            ~is_object, sql.concat(sql.lit("it is JSON, but no object: "), _shown(text))
        )
    ]
    for field in parse.fields or ():
        name = quoted(field.name)
        alone = sql.from_json(text, f"{name} {field.type}, {_CORRUPT} string", _options(parse))
        value = sql.from_json(text, f"{name} string").getField(field.name)
        found.append(
            sql.when(
                is_object & alone.getField(_CORRUPT).isNotNull(),
                sql.concat(sql.lit(f"{field.name} is no {field.type}: "), _shown(value)),
            )
        )
        if field.required:
            found.append(sql.when(is_object & value.isNull(), f"{field.name} is missing"))
    return found


def _csv_errors(text: Column, parse: Parse) -> list[Column]:
    fields = parse.fields or ()
    if not fields:
        return []
    names = ", ".join(f"c{number} string" for number in range(len(fields)))
    plain = sql.from_csv(text, f"{names}, {_CORRUPT} string", _options(parse))
    columns = plain.getField(_CORRUPT).isNull()
    found = [sql.when(~columns, f"it does not have {len(fields)} fields")]
    for number, field in enumerate(fields):
        value = plain.getField(f"c{number}")
        wrong = columns & value.isNotNull() & _record(parse).getField(field.name).isNull()
        found.append(
            sql.when(wrong, sql.concat(sql.lit(f"{field.name} is no {field.type}: "), _shown(value)))
        )
        if field.required:
            found.append(sql.when(columns & value.isNull(), f"{field.name} is missing"))
    return found


def _shown(value: Column) -> Column:
    return sql.coalesce(sql.left(value, sql.lit(SHOWN_MAX)), sql.lit("null"))
