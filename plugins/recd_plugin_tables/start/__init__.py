"""``recd init TABLE``: inspects a table and writes a registry file that trains on it."""
