"""Pipelines: a file says what to read, how to parse and transform it, and where it goes; Spark does it.

    model      what a pipeline is, once its file has been judged
    file       from TOML to that, with every mistake, its line and its key
    kinds      what the values in a file may be
    formats    what sinks can do
    functions  the code that steps in Python name
    ddl        schemas, as far as they can be read without Spark
    parsing    payloads to columns; records that do not fit, and what is said about them
    steps      SQL and Python in between
    sinks      where rows go
    batchwise  those of the sinks that write a batch at a time
    plan       all of these put together: the queries of a pipeline
    running    a pipeline from its start to its end
    progress   what is told meanwhile
    failures   what Spark says when something goes wrong, in one line

The modules down to `ddl` need no Spark that runs. Everything here needs the extra `spark`.
"""
