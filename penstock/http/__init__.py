"""The second process of a broker: the HTTP API, metrics and bulk reads.

It takes no part in moving messages. What must be changed is asked of the first process over the private
link; what is only looked at is read from the log's files here.
"""
