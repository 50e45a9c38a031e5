"""What comes from the queue `orders`, and what goes to the queue `orders.large`."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
URL = spark.conf.get("penstock.url")


@dp.table(comment="Every order, once")
def orders() -> DataFrame:
    messages = (
        spark.readStream.format("penstock")
        .option("url", URL)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .load()
    )
    fields = f.from_json(f.col("value").cast("string"), "id bigint, region string, amount double")
    return messages.select("offset", "timestamp", fields.alias("order")).select(
        "offset", "timestamp", "order.*"
    )


dp.create_sink("large_orders", "penstock", {"url": URL, "queue": "orders.large"})


@dp.append_flow(target="large_orders")
def to_large_orders() -> DataFrame:
    large = spark.readStream.table("orders").where("amount >= 1000")
    return large.select(f.to_json(f.struct("id", "region", "amount")).alias("value"))
