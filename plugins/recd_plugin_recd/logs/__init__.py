"""``recd logs``: logs of rows and Kafka topics, sharded by session (RecD, section 4.1, O1)."""
