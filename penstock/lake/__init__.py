"""The lake: queues as Delta tables, filled from the log. Needs the extra `lake`; a process of its own."""
