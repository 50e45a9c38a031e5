"""Coding: records in Avro and Protobuf, decoded by their Python libraries a batch of messages at a time.

    avro        a schema as JSON; a message is one record without a header of its own, as `fastavro` and
                `schemaless_writer` write it
    protobuf    a compiled descriptor set (`protoc --include_imports --descriptor_set_out=FILE`), and the full
                name of a message in it

The columns are those of the schema, so that a file says nothing twice. What has no type in Spark is nearest:
an enum is its name, a fixed its bytes, a time of day its text. Of a union, null and one other may stand.

How it fails: `WrongDefinition` where a schema cannot be columns, when the file is judged. A message that does
not fit is a bad record.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.pipeline.ddl import quoted
from penstock.pipeline.model import Field, Parse

AVRO, PROTOBUF = "avro", "protobuf"
PACKAGES: Final = {AVRO: "fastavro", PROTOBUF: "google.protobuf"}

Decode = Callable[[bytes], dict[str, Any]]


class WrongDefinition(PenstockError):
    """A schema that cannot be the columns of a table. Says what of it."""


def fields_of(its_format: str, definition: bytes, message: str) -> tuple[Field, ...]:
    """The columns of a definition."""
    if its_format == AVRO:
        return tuple(_avro_fields(_avro_schema(definition)))
    return tuple(Field(it.name, _protobuf_type(it, ())) for it in _descriptor(definition, message).fields)


def ddl_of(fields: tuple[Field, ...]) -> str:
    return ", ".join(f"{quoted(it.name)} {it.type}{' not null' if it.required else ''}" for it in fields)


def decoder(parse: Parse) -> Decode:
    """What makes a record of a payload, or raises whatever the library raises."""
    return _avro_decoder(parse.definition) if parse.format == AVRO else _protobuf_decoder(parse)


# --- Avro --------------------------------------------------------------------------------------------------

_AVRO_TYPES: Final = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "bytes": "binary",
    "string": "string",
    "fixed": "binary",
    "enum": "string",
}
_AVRO_LOGICAL: Final = {
    "date": "date",
    "timestamp-millis": "timestamp",
    "timestamp-micros": "timestamp",
    "local-timestamp-millis": "timestamp_ntz",
    "local-timestamp-micros": "timestamp_ntz",
    "uuid": "string",
}


def _avro_schema(definition: bytes) -> Any:  # as fastavro has it: lists, texts and tables
    import fastavro

    try:
        schema: Any = fastavro.parse_schema(json.loads(definition))
    except Exception as error:  # noqa: BLE001 - whatever the library finds wrong
        raise WrongDefinition(f"this is no Avro schema: {type(error).__name__}: {error}") from None
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise WrongDefinition("the schema is of no record; a row is made of the fields of a record")
    return schema


def _avro_fields(schema: Mapping[str, Any]) -> Iterator[Field]:
    named: dict[str, Any] = {}
    for it in schema["fields"]:
        yield Field(it["name"], _avro_type(it["type"], named, (schema["name"],)))


def _avro_type(kind: Any, named: dict[str, Any], within: tuple[str, ...]) -> str:
    if isinstance(kind, list):
        others = [it for it in kind if it != "null"]
        if len(others) != 1:
            raise WrongDefinition(f"{within[-1]}: a union of {len(others)} types is no column; use one")
        return _avro_type(others[0], named, within)
    if isinstance(kind, str):
        if kind in within:
            raise WrongDefinition(f"{kind} holds itself, which no column can")
        if kind in named:
            return _avro_type(named[kind], named, within)
        return _AVRO_TYPES[kind]
    if "name" in kind:
        named[kind["name"]] = kind
    logical = kind.get("logicalType")
    if logical == "decimal":
        return f"decimal({kind['precision']},{kind.get('scale', 0)})"
    if logical in _AVRO_LOGICAL:
        return _AVRO_LOGICAL[logical]
    if logical is not None and logical.startswith("time-"):
        return "string"
    word = kind["type"]
    if word == "array":
        return f"array<{_avro_type(kind['items'], named, within)}>"
    if word == "map":
        return f"map<string, {_avro_type(kind['values'], named, within)}>"
    if word in ("record", "error"):
        inside = (*within, kind["name"])
        members = (f"{quoted(it['name'])}: {_avro_type(it['type'], named, inside)}" for it in kind["fields"])
        return f"struct<{', '.join(members)}>"
    return _avro_type(word, named, within) if isinstance(word, list | dict) else _AVRO_TYPES[word]


def _avro_decoder(definition: bytes) -> Decode:
    import fastavro

    schema = fastavro.parse_schema(json.loads(definition))

    def decode(payload: bytes) -> dict[str, Any]:
        stream = io.BytesIO(payload)
        record = fastavro.schemaless_reader(stream, schema, None)
        if stream.tell() != len(payload):
            raise ValueError(f"{len(payload) - stream.tell()} bytes stand behind the record")
        found: dict[str, Any] = _plain(record)
        return found

    return decode


def _plain(value: Any) -> Any:
    """As Arrow takes it: what is a class of its own in Python and a text in Spark, as text."""
    if isinstance(value, dict):
        return {name: _plain(it) for name, it in value.items()}
    if isinstance(value, list):
        return [_plain(it) for it in value]
    return str(value) if type(value).__name__ in ("UUID", "time") else value


# --- Protobuf ----------------------------------------------------------------------------------------------

_PROTOBUF_TYPES: Final = {
    "CPPTYPE_INT32": "int",
    "CPPTYPE_INT64": "bigint",
    "CPPTYPE_UINT32": "bigint",
    "CPPTYPE_UINT64": "decimal(20,0)",
    "CPPTYPE_DOUBLE": "double",
    "CPPTYPE_FLOAT": "float",
    "CPPTYPE_BOOL": "boolean",
    "CPPTYPE_ENUM": "string",
    "CPPTYPE_STRING": "string",
}
_TIMESTAMP: Final = "google.protobuf.Timestamp"


def _descriptor(definition: bytes, message: str) -> Any:  # the library has no types
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message import DecodeError

    pool = descriptor_pool.DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(definition).file
        for file in files:
            pool.Add(file)
        names = sorted(f"{file.package}.{it.name}".lstrip(".") for file in files for it in file.message_type)
    except (DecodeError, TypeError) as error:
        raise WrongDefinition(
            f"this is no descriptor set ({error}); protoc --include_imports --descriptor_set_out=FILE "
            "makes one"
        ) from None
    try:
        return pool.FindMessageTypeByName(message)
    except KeyError:
        raise WrongDefinition(f"there is no message {message!r}; there are {', '.join(names)}") from None


def _plain_type(field: Any) -> str:
    if field.type == field.TYPE_BYTES:
        return "binary"
    return next(it for name, it in _PROTOBUF_TYPES.items() if getattr(field, name) == field.cpp_type)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _protobuf_type(field: Any, within: tuple[str, ...]) -> str:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[it] for it in ("key", "value"))
        return f"map<{_protobuf_type(key, within)}, {_protobuf_type(value, within)}>"
    kind = field.message_type
    if kind is None:
        word = _plain_type(field)
    elif kind.full_name == _TIMESTAMP:
        word = "timestamp"
    else:
        if kind.full_name in within:
            raise WrongDefinition(f"{kind.full_name} holds itself, which no column can")
        inside = (*within, kind.full_name)
        word = (
            f"struct<{', '.join(f'{quoted(it.name)}: {_protobuf_type(it, inside)}' for it in kind.fields)}>"
        )
    return f"array<{word}>" if field.is_repeated else word


def _protobuf_decoder(parse: Parse) -> Decode:
    from google.protobuf import message_factory

    kind = message_factory.GetMessageClass(_descriptor(parse.definition, parse.message))
    return lambda payload: _message(kind.FromString(payload))


def _message(message: Any) -> dict[str, Any]:
    """The fields of a message: those that know whether they are there are null where they are not."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            inner = field.message_type.fields_by_name["value"]
            found[field.name] = [(key, _value(inner, value[key])) for key in value]
        elif field.is_repeated:
            found[field.name] = [_value(field, it) for it in value]
        elif not field.has_presence or message.HasField(field.name):
            found[field.name] = _value(field, value)
    return found


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP:
            return datetime.fromtimestamp(value.seconds, UTC).replace(microsecond=value.nanos // 1000)
        return _message(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    return value


# --- the other way, for tests ------------------------------------------------------------------------------


def encoder(parse: Parse) -> Callable[[Mapping[str, Any]], bytes]:
    """What makes a payload of a record."""
    if parse.format == AVRO:
        return lambda record: _avro_encoded(parse.definition, record)
    from google.protobuf import json_format, message_factory

    kind = message_factory.GetMessageClass(_descriptor(parse.definition, parse.message))
    return lambda record: bytes(json_format.ParseDict(dict(record), kind()).SerializeToString())


def _avro_encoded(definition: bytes, record: Mapping[str, Any]) -> bytes:
    import fastavro

    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(json.loads(definition)), dict(record))
    return stream.getvalue()
