"""Backups: a running broker's log in another folder, and back."""
