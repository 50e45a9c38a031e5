"""The demonstration: what `penstock demo` shows, on a real broker.

orders     the messages: small JSON documents that can be summed up
screen     what a person sees: sections, steps with their times, tables
broker     `penstock serve` in a process of its own
traffic    three protocols, kill -9, and the count
analysis   the same orders through a Spark pipeline, and a report; needs the extra `spark`
"""
