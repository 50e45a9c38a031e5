"""What is stored once, however often it is asked for: stages and their commits, and keys of single calls."""
