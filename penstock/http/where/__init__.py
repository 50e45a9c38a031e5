"""Conditions over messages: a text becomes tokens, a tree, and a function that judges rows."""
