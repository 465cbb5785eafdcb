"""``recd init TABLE``: looks at a table and writes a registry file that trains on it."""
