"""The private link between the two processes of a broker: what travels on it, and how.

The first process moves messages; the second one answers people, browsers and Spark. They speak over
one end each of a Unix socket pair, and have one number in common (`gauge.py`).
"""
