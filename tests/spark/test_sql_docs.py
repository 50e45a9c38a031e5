"""docs/spark-sql.md: its statements run."""

from pyspark.sql import SparkSession

from tests.http.api import Api
from tests.http.morgue import path_of, reject
from tests.spark.conftest import StartBroker
from tests.spark.rig import Queues, examples, url_of


def test_the_statements_run(spark: SparkSession, start_broker: StartBroker) -> None:
    broker = start_broker()
    session = spark.newSession()
    with Api(broker.ports["http"]) as api:
        reject(broker, api, "orders", [b"three apples", b"a pear"])
        session.sql("create database spark_sql_docs")
        session.sql("use spark_sql_docs")
        try:
            answers = []
            for statement in examples("spark-sql.md", "sql"):
                rows = session.sql(statement.replace("http://127.0.0.1:9180", url_of(broker))).collect()
                answers += [tuple(row) for row in rows]
        finally:
            session.sql("drop database spark_sql_docs cascade")
        assert answers == [
            *((0, "three apples"), (1, "a pear"), (1,), (2, 1)),
            *(("moin", "de"), ("good morning", "en")),
        ]
        ready = api.get(path_of("orders", "messages"), state="ready")["messages"]
        assert [message["offset"] for message in ready] == [0, 1]
    queues = Queues(spark, broker)
    assert queues.values("shouted") == {b"THREE APPLES": 1, b"A PEAR": 1, b"HELLO": 1, b"hello": 1}
    assert queues.values("greetings") == {b"hello": 1}
