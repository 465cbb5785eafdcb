"""Parts of ``recd bench ingest``: stores that count what is read of them, and the table."""
