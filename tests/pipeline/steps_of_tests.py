"""Steps in Python, as a user would write them beside a pipeline's file."""

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

NUMBER = 5


def loud(text: str) -> str:
    """Called by a function of Spark's workers, which cannot import this module."""
    return text.upper() + "!"


def shout(frame: DataFrame) -> DataFrame:
    as_function: Any = sql.udf(lambda text: loud(text), "string")
    return frame.select(as_function("region").alias("value"))


def counted(spark: SparkSession, views: dict[str, DataFrame]) -> DataFrame:
    return views["input"].groupBy("region").count()


def nothing(frame: DataFrame) -> None:
    return None


def failing(frame: DataFrame) -> DataFrame:
    raise KeyError("no such thing")


def dividing(frame: DataFrame) -> DataFrame:
    as_function: Any = sql.udf(lambda number: str(1 // (number - number)), "string")
    return frame.select(as_function("id").alias("value"))


def _fails(*_: object) -> None:
    raise OSError("no luck today")


def out_of_luck(frame: DataFrame) -> DataFrame:
    # Of a function with hints Spark tries to make another kind.
    as_function: Any = sql.udf(lambda value: _fails(value), "binary")
    return frame.select(as_function("value").alias("value"))


def three(one: DataFrame, two: DataFrame, more: DataFrame) -> DataFrame:
    return one
