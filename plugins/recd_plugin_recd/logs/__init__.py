"""Log shards: append-only files of compressed blocks, in which a session's rows stay together.

Log infrastructure that spreads a session's rows over all shards hides their repetition from
compression; sharding by session shows it (RecD, section 4.1, O1).
"""
