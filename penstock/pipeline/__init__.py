"""Pipelines: a file says what to read, how to parse and transform it, and where it goes; Spark does it.

    model      what a pipeline is, once its file has been judged
    file       from TOML to that, with every mistake, its line and its key
    ends       the sections of a file besides sources and steps
    sections   how sections are read, and variables filled in
    kinds      what the values in a file may be
    formats    what sinks can do
    functions  the code that steps in Python name
    coding     records in Avro and Protobuf
    ddl        schemas, as far as they can be read without Spark
    parsing    payloads to columns; records that do not fit, and what is said about them
    graph      views: sources, tables, and SQL and Python over them; expectations
    batchwise  a batch to a sink, once
    flows      the queries of a pipeline, and what each does with a batch
    sinks      how a query is started
    running    a pipeline from its start to its end
    progress   what is told meanwhile
    failures   what Spark says when something goes wrong, in one line
    testing    the tests in a file
    inferring  a schema from a sample
    exporting  a project of Spark Declarative Pipelines

The modules down to `ddl` need no Spark that runs. Everything here needs the extra `spark`.
"""
