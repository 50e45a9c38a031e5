"""Sharing: what several files of tests have in common ends with the last of them (`TOGETHER`)."""

goes_on = False
"""Whether the next test of this process is of a file that shares with this one: what they share stays."""
