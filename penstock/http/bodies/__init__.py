"""Bodies of many messages: NDJSON or Arrow in, a batch for each queue out."""
