"""Conditions over dead letters: a text becomes tokens, a tree, and a function that judges rows."""
