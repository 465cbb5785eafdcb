"""Logs of rows in Parquet segments, sharded by session (RecD, section 4.1, O1), and Kafka topics.

Spreading a session's rows over all shards hides their repetition from compression.
"""
