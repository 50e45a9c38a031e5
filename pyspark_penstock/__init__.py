"""What makes `format("penstock")` work with no registration: PySpark looks for modules whose names begin with
`pyspark_`, and takes the `DefaultSource` of each. It imports them all at the first use of any Python source,
so that this one must not fail where something is missing that only reading or writing needs.
"""

from penstock.spark import PenstockDataSource

__all__ = ["DefaultSource"]

DefaultSource = PenstockDataSource
