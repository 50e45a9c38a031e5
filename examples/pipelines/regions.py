"""The step of regions.toml."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql


def counted(frame: DataFrame) -> DataFrame:
    """Orders by region."""
    return frame.groupBy("region").agg(sql.count("id").alias("orders"), sql.sum("amount").alias("total"))
