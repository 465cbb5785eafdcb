"""Imports: a user's table as Parquet that training reads, made once."""
