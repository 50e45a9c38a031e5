"""Parsing: payloads to columns, and what is said about records that do not fit. Spark does it; what is in
Avro or Protobuf, Python does (`coding.py`), on batches in Arrow.

    parsed         every message, with what the parser made of it
    good_records   those that fit, as columns
    bad_records    the others, as dead letters

Both halves are made of the one that is parsed, which is read once where it is kept (`flows.py`).

A record fits when it is all that its message holds, and every column of the schema can be made of it. Spark's
own parsers are more generous: they read `{"id":1}{"id":2}` as its first half, an empty message as a row of
nulls, and bytes that are no UTF-8 as other characters. Here these do not fit, for something would be lost.
A field that is missing is null, unless the schema says `not null`. With a column for what is `rescued`, a
field that has another type, or that the schema does not know, is in that column, as JSON, and ends nothing.

Rules that always hold:
  * Every message is a row of the good ones or of the bad ones, never of both.
  * The columns of a message (queue, offset, timestamp, …) stay beside those of its record, but for `value`;
    where both have a name, the record's counts.
  * Each message is parsed once: what comes out of the parser goes through a generator, which Spark's
    optimizer does not take apart. Otherwise a filter on the outcome would parse a second time.
  * Copies of bad records, which are in the log as dead letters of a pipeline, are no input of any pipeline.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from penstock.pipeline.coding import AVRO, PROTOBUF, decoder
from penstock.pipeline.ddl import quoted
from penstock.pipeline.model import FAIL, Parse
from penstock.spark.options import COPIES

if TYPE_CHECKING:
    import pyarrow as pa

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


def good_records(frame: DataFrame, parse: Parse, columns: Sequence[str] = ()) -> DataFrame:
    """Of what was parsed, the records that fit, as columns; one that does not may end the query.

    `columns` are those of the message, where Spark must not be asked for them.
    """
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
        frame = frame.where(sql.when(fits, True).otherwise(sql.raise_error(problem).cast("boolean")))
    else:
        frame = frame.where(fits)
    record, names = _record(parse), _columns(parse)
    hidden = {"value", _ROW, *(name.lower() for name in names)}
    named = [record.getField(name).alias(name) for name in names]
    if parse.rescued is not None:
        hidden.add(parse.rescued.lower())
        named.append(_rescued(parse, names).alias(parse.rescued))
    return frame.select(*named, *(name for name in columns or frame.columns if name not in hidden))


def is_bad(parse: Parse) -> Column:
    """Of what was parsed, whether it does not fit."""
    return ~_fits(parse)


def bad_records(frame: DataFrame, parse: Parse, pipeline: str) -> DataFrame:
    """Of what was parsed, the others, as dead letters: a queue, and JSON that says what is wrong with which
    record."""
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
    bad = _explained(frame.where(is_bad(parse)), parse)
    return bad.select("queue", as_report(report).alias("value"))


def as_report(report: Column) -> Column:
    """What a dead letter says, as JSON."""
    return sql.to_json(report, {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timeZone": "UTC"})


# --- the parsers -------------------------------------------------------------------------------------------


def parsed(frame: DataFrame, parse: Parse) -> DataFrame:
    """Every message with what the parser made of it, in a column beside its own."""
    if parse.format in (AVRO, PROTOBUF):
        return frame.withColumn(_ROW, _by_python(parse)(sql.col("value")))
    text = _text(parse)
    parser = {"json": _from_json, "csv": _from_csv, "text": _from_text}[parse.format]
    row = sql.struct(parser(text, parse).alias("parsed"), sql.is_valid_utf8(text).alias("utf8"))
    return frame.withColumn(_ROW, sql.explode(sql.array(row)))


def _by_python(parse: Parse) -> Any:  # a function of columns
    from pyspark.sql.pandas.types import to_arrow_type

    kind = StructType.fromDDL(f"parsed struct<{parse.schema}>, utf8 boolean, error string")
    arrow_type = to_arrow_type(kind, timezone="UTC")

    def decode(batches: "Iterator[pa.Array]") -> "Iterator[pa.Array]":
        import pyarrow

        one = decoder(parse)
        record_type = arrow_type.field("parsed").type

        def row(payload: bytes | None, checked: bool) -> dict[str, Any]:
            try:
                record = one(payload or b"")
                if checked:
                    pyarrow.scalar(record, record_type)
            except Exception as error:  # noqa: BLE001 - whatever the library raises, the record is bad
                return {"utf8": True, "error": f"it is no {parse.format}: {error}".rstrip(": ")}
            return {"parsed": record, "utf8": True}

        for batch in batches:
            payloads = batch.to_pylist()
            try:
                yield pyarrow.array([row(it, False) for it in payloads], arrow_type)
            except (pyarrow.ArrowException, OverflowError):  # one of them is too large for its column
                yield pyarrow.array([row(it, True) for it in payloads], arrow_type)

    functions: Any = sql  # these have no types
    with warnings.catch_warnings():
        # Spark would rather have hints, which need Arrow when this module loads.
        warnings.simplefilter("ignore", UserWarning)
        return functions.arrow_udf(decode, kind, functions.ArrowUDFType.SCALAR_ITER)


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


def _columns(parse: Parse) -> list[str]:
    """The names of a record's columns; as Spark reads them where only Spark can."""
    if parse.format == "text":
        return ["value"]
    if parse.fields is not None:
        return [field.name for field in parse.fields]
    return [field.name for field in StructType.fromDDL(parse.schema)]  # type: ignore[attr-defined]


def _rescued(parse: Parse, columns: list[str]) -> Column:
    """What of an object is in no column: fields of other names, those of another type, and those with members
    of other names in them."""
    raw = sql.from_json(_text(parse), "map<string, variant>")
    schema: Any = StructType.fromDDL(parse.schema)
    nested = [field for field in schema if isinstance(field.dataType, StructType | ArrayType | MapType)]
    # Something has another type: where it is within a column, nobody knows in which.
    inside = sql.col(_ROW).getField("parsed").getField(_CORRUPT).isNotNull()
    record = _record(parse)
    empty = sql.array_compact(
        sql.array(*(sql.when(record.getField(name).isNull(), sql.lit(name)) for name in columns))
    )

    def is_left(name: Column, value: Column) -> Column:
        left = ~name.isin(*columns)
        left |= sql.array_contains(empty, name) & value.isNotNull() & ~sql.is_variant_null(value)
        for field in nested:
            left |= (name == field.name) & (inside | _has_more(value, field.dataType))
        return left

    left = sql.map_filter(raw, is_left)
    names = sql.map_keys(raw)
    # An object that names a member twice, which no variant can be, is there as it came.
    return (
        sql.when(raw.isNull() | (sql.size(sql.array_distinct(names)) < sql.size(names)), _text(parse))
        .when(sql.size(left) > 0, sql.to_json(left))
        .when(inside, sql.to_json(raw))
    )


def _has_more(value: Column, kind: DataType) -> Column:
    """Whether there is a member in it, at any depth, that its type does not know."""
    more = sql.lit(False)
    if isinstance(kind, StructType):
        members = sql.try_variant_get(value, "$", "map<string, variant>")
        more = sql.exists(sql.map_keys(members), lambda name: ~name.isin(*kind.names))
        for field in kind:
            more |= _has_more(members.getItem(field.name), field.dataType)
    elif isinstance(kind, ArrayType):
        items = sql.try_variant_get(value, "$", "array<variant>")
        more = sql.exists(items, lambda it: _has_more(it, kind.elementType))
    elif isinstance(kind, MapType):
        members = sql.try_variant_get(value, "$", "map<string, variant>")
        more = sql.exists(sql.map_values(members), lambda it: _has_more(it, kind.valueType))
    return sql.coalesce(more, sql.lit(False))


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
        whole = _record(parse).isNotNull() & alone & ended
        return whole if parse.rescued is not None else whole & parsed.getField(_CORRUPT).isNull()
    if parse.format in (AVRO, PROTOBUF):
        return parsed.isNotNull()
    if parse.format == "csv":
        return (sql.length(_text(parse)) > 0) & parsed.getField(_CORRUPT).isNull()
    return sql.lit(True)


def _fits(parse: Parse) -> Column:
    """Whether a row is a good record; never null."""
    fits = _is_whole(parse) & sql.col(_ROW).getField("utf8")
    fields = parse.fields or ()
    if fields and "not null" not in "".join(field.type for field in fields):
        for field in fields:
            if field.required:
                fits &= _record(parse).getField(field.name).isNotNull()
    elif parse.schema:
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
    if parse.format in (AVRO, PROTOBUF):
        return bad.withColumn(_ERROR, sql.left(sql.col(_ROW).getField("error"), sql.lit(3 * SHOWN_MAX)))
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
