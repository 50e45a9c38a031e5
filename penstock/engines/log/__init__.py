"""The embedded log: a columnar commit log on local disk."""
