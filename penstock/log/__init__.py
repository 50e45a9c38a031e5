"""The commit log: messages and their state in columnar blocks, on a `Disk`."""
