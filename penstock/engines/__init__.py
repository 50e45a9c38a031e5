"""Where messages live: one small interface (`interface.py`) and the engines behind it."""
